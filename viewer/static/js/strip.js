// The token strip: one span a token, at most one window of them.

import { css } from './colour.js';
import { h } from './dom.js';
import { NONE, short, signed } from './format.js';
import { look } from './stats.js';
import { tokenText } from './text.js';

export const WINDOW = 4096;
const BLOCK = 64; // tokens that share a position label
const NO_ROUTE = 0xffff;

/** What a state looks like in words, for the legend and the readout. */
export const STATE_TEXT = {
  compared: 'compared',
  masked: 'masked',
  missing_a: 'missing in A',
  missing_b: 'missing in B',
  non_finite: 'not finite',
  not_scored: 'not scored',
  not_diffed: 'not compared',
};

/**
 * The window's arrays with named accessors.
 * @param {{arrays: Object, metadata: Object}} answer
 */
export function readWindow({ arrays, metadata }) {
  const states = metadata.states.split(',');
  const bits = Object.fromEntries(metadata.flags.split(',').map((name, bit) => [name, 1 << bit]));
  const start = Number(metadata.start);
  const has = (i, name) => Boolean(arrays.flags[i] & bits[name]);
  const cache = new Map();
  return {
    start,
    end: Number(metadata.end),
    arrays: Object.keys(arrays),
    has,
    state: (i) => states[arrays.state[i]],
    id: (i) => (has(i, 'id') ? arrays.ids[i] : null),
    a: (i) => (has(i, 'a') ? arrays.a[i] : null),
    b: (i) => (has(i, 'b') ? arrays.b[i] : null),
    delta: (i) => (has(i, 'delta') ? arrays.delta[i] : null),
    /** One of the arrays that were asked for besides the usual ones; NaN where there is none. */
    extra: (name, i) => (arrays[name] && !Number.isNaN(arrays[name][i]) ? arrays[name][i] : null),
    flips: (i) => (arrays.flips[i] === NO_ROUTE ? null : arrays.flips[i]),
    /** {text, flow, split} of a token; its id where there is no text. */
    text(i) {
      if (!has(i, 'id')) return { text: '\u2205', flow: '\u2205', split: false, bare: true };
      if (!has(i, 'text')) {
        const text = String(arrays.ids[i]);
        return { text, flow: text, split: false, bare: true };
      }
      const id = arrays.ids[i];
      if (!cache.has(id)) {
        cache.set(id, tokenText(arrays.text_bytes.subarray(arrays.text_offsets[i], arrays.text_offsets[i + 1])));
      }
      return cache.get(id);
    },
  };
}

/** Builds the strip of a window; `data` is from `readWindow`, ids are the prefix and the position. */
export function drawStrip(data, prefix = 't') {
  const blocks = [];
  let block = null;
  let last = null;
  const n = data.end - data.start;
  for (let i = 0; i < n; i += 1) {
    const position = data.start + i;
    const prompt = data.has(i, 'prompt');
    if (block === null || position % BLOCK === 0 || prompt !== last) {
      block = h('div', { class: 'flow', role: 'presentation' });
      const title = prompt !== last ? (prompt ? 'prompt' : 'response') : null;
      if (title) blocks.push(h('div', { class: `part ${title}`, 'aria-hidden': 'true' }, title));
      blocks.push(h('div', { class: prompt ? 'block prompt' : 'block', role: 'presentation' },
        h('span', { class: 'gutter', 'aria-hidden': 'true' }, position), block));
      last = prompt;
    }
    const { flow, split, bare } = data.text(i);
    const token = document.createElement('span');
    token.id = `${prefix}${position}`;
    token.setAttribute('role', 'option');
    token.className = classes(data, i, split, bare);
    token.textContent = flow;
    block.append(token);
  }
  return blocks;
}

function classes(data, i, split, bare) {
  const state = data.state(i);
  const names = ['t', state];
  if (state === 'compared' && data.has(i, 'equal')) names.push('equal');
  if (split) names.push('split');
  if (bare) names.push('bare');
  if (data.flips(i)) names.push('flip');
  return names.join(' ');
}

/** Colours the tokens by a statistic; returns how many are clipped. */
export function paintStrip(data, stat, scale, theme, prefix = 't') {
  let clipped = 0;
  const n = data.end - data.start;
  for (let i = 0; i < n; i += 1) {
    const value = stat.value(data, i);
    const plain = value === null || (stat.signed && (data.state(i) !== 'compared' || data.has(i, 'equal')));
    const { style, classList } = document.getElementById(`${prefix}${data.start + i}`);
    classList.toggle('amount', !plain && !stat.signed);
    if (plain) {
      if (style.backgroundColor) ['background-color', 'color', 'border-bottom-width'].forEach((name) => style.removeProperty(name));
      classList.remove('clipped');
      continue;
    }
    const { ground, ink, thickness, clipped: over } = look(stat, value, scale, theme);
    style.backgroundColor = css(ground);
    style.color = css(ink);
    style.borderBottomWidth = `${thickness}px`;
    classList.toggle('clipped', over);
    clipped += over;
  }
  return clipped;
}

/** One line about a token: `71 "the" delta +0.83 nat, compared, routing differs in 2 layers`. */
export function describe(data, position, stat = null) {
  const i = position - data.start;
  const { text, bare } = data.text(i);
  const delta = data.delta(i);
  const flips = data.flips(i);
  const state = data.state(i);
  return [
    bare ? (data.id(i) === null ? 'token not recorded' : `token id ${text}`) : `\u201c${text}\u201d`,
    delta === null ? null : data.has(i, 'equal') ? 'bitwise equal' : `\u0394 ${signed(delta)} nat`,
    stat && stat.name !== 'dlp' && stat.value(data, i) !== null ? `${stat.text} ${stat.signed ? signed(stat.value(data, i)) : short(stat.value(data, i))}` : null,
    delta !== null || data.a(i) === null ? null : `logprob ${signed(data.a(i))}`,
    STATE_TEXT[state] || NONE,
    flips ? `routing differs in ${flips} layer${flips > 1 ? 's' : ''}` : null,
  ].filter(Boolean).join(', ');
}
