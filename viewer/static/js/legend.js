// The legend of the token strip: every state, and the scale.

import { css, unsymlog } from './colour.js';
import { h } from './dom.js';
import { short } from './format.js';
import { look } from './stats.js';

const STATES = [
  ['compared equal', 'bitwise equal'],
  ['masked', 'masked'],
  ['missing_a', 'missing in A'],
  ['missing_b', 'missing in B'],
  ['non_finite', 'NaN or infinite'],
  ['not_scored', 'not scored'],
  ['not_diffed', 'not compared'],
  ['compared flip', 'routing differs'],
  ['split', 'part of a character'],
];

export function legend(stat, scale, theme) {
  const swatch = (value, text) => {
    const { ground, ink, thickness } = look(stat, value, scale, theme);
    const style = { 'background-color': css(ground), color: css(ink), 'border-bottom-width': `${thickness}px` };
    return h('span', { class: 't compared swatch', style }, text);
  };
  return h('div', { class: 'legend', 'aria-label': 'Legend' },
    h('span', { class: 'scale' }, stat.signed ? bothWays(stat, scale, swatch) : oneWay(stat, scale, swatch)),
    h('ul', { class: 'states' }, STATES.map(([name, text]) =>
      h('li', {}, h('span', { class: `t swatch ${name}`, 'aria-hidden': 'true' }, name === 'split' ? '\\xe2' : 'abc'), ' ', text))));
}

function bothWays(stat, scale, swatch) {
  const steps = [-1, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1].map((t) => {
    const value = unsymlog(t, scale);
    return swatch(value, Math.abs(t) === 1 ? `${t < 0 ? '\u2264\u2212' : '\u2265'}${short(Math.abs(value))}` : short(value).replace('-', '\u2212'));
  });
  const equal = h('span', { class: 't compared equal swatch' }, '0');
  return [h('span', { class: 'hint' }, 'A higher '), steps.slice(0, 4), equal, steps.slice(4), h('span', { class: 'hint' }, ` B higher, ${stat.unit}`)];
}

function oneWay(stat, scale, swatch) {
  const shares = [0, 0.25, 0.5, 0.75, 1];
  const value = (t) => (stat.log ? Math.expm1(t * Math.log1p(scale)) : t * scale);
  return [shares.map((t) => swatch(value(t), `${t === 1 && stat.name !== 'overlap' ? '\u2265' : ''}${short(value(t))}`)), h('span', { class: 'hint' }, ` ${stat.unit}`)];
}
