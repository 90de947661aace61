// Routing agreement of one sequence: a map of flips, a row a layer, margins, both expert lists.

import { getArrays, getJson, runPath, scope } from './api.js';
import { bars } from './charts.js';
import { h, num, put, redraw, svg } from './dom.js';
import { NONE as DASH, count, percent, plural, short } from './format.js';
import { COMMAND, leftOut } from './folder.js';
import { GridPage } from './gridpage.js';
import { makeGrid, promptEnd, rgb } from './heat_grid.js';
import { pan } from './heat_math.js';
import { notice } from './notices.js';
import { current, go, integer, link, replace } from './route.js';
import { FLIP, MOST, UNMOVED, STATES, WINDOW, layerRows, marginsOf, nextFlip, squeeze, totals, windowOf } from './routing_math.js';
import { scroller } from './scroll.js';
import { say, whisper } from './shell.js';
import { makeTexts } from './texts.js';
import { theme } from './theme.js';

const HATCHED = Object.fromEntries(STATES.flatMap(([, , kind, ink], i) => (kind ? [[i, [kind, ink]]] : [])));

export async function open({ state, main, signal }) {
  const path = (...rest) => runPath(state, 'seqs', state.seq, ...rest);
  const info = await getJson(path('routes'), scope(state), signal);
  if (signal.aborted) return {};
  const page = new Page(state, info, path, signal);
  page.build(main);
  if (info.comparable) page.ready = page.follow(state);
  return page;
}

function view(state, info) {
  const asked = integer(state.params.get('tok'));
  const tok = asked === null || !info.n ? null : Math.min(asked, info.n - 1);
  const [from, to] = windowOf(integer(state.params.get('from')), integer(state.params.get('to')), tok, info.n, Boolean(COMMAND));
  const eps = state.params.get('eps');
  const layer = /\d+/.exec(state.params.get('layer') || '');
  return { asked, tok, from, to, eps: !COMMAND && eps !== null && eps !== '' && Number(eps) >= 0 ? eps : null, layer: layer ? Number(layer[0]) : null };
}

class Page extends GridPage {
  constructor(state, info, path, signal) {
    super(state, info, path, signal);
    this.texts = makeTexts(path, scope(state), signal, info.n);
    this.keys = info.comparable ? this.makeKeys() : {};
  }

  /** Whether it is not known how far scores move between the sides: margins of one alone, or too few that differ. */
  unmoved() {
    const { rule, margin_side: sides } = this.tile.meta;
    return rule === 'rank' || sides.length < 2;
  }

  states() {
    return this.unmoved() ? UNMOVED : STATES;
  }

  canDraw() {
    return Boolean(this.tile);
  }

  build(main) {
    const { info } = this;
    const title = h('h1', { class: 'mono' }, this.base.seq, h('span', { class: 'hint' }, ' routing agreement'));
    if (!info.comparable) {
      put(main, title, info.notices.map(notice));
      return;
    }
    this.grid = makeGrid({
      label: 'Flips of every MoE layer at every token; arrows move, Enter opens the token', describedBy: 'routing-readout', tall: 320,
      move: (row, position, click) => (click ? go : replace)(link(current(), { params: { tok: position, layer: this.rows[row].layer, ...this.here() } })),
      open: (position) => go(link(current(), { screen: 'seq', params: { tok: position } })),
      hover: (row, position) => { this.hovered = row === null || position === null ? null : { row, position }; this.drawReadout(); },
      zoom: (from, to) => this.window(Math.max(0, from), Math.min(to, info.n)),
      resized: () => this.resized(),
    });
    this.lead = h('p', { class: 'frontline', id: 'routing-lead' });
    this.rule = h('p', { class: 'hint', id: 'routing-rule' });
    this.controls = h('div', { class: 'controls' });
    this.legend = h('div', { class: 'legend', 'aria-label': 'Legend' });
    this.readout = h('p', { class: 'readout', id: 'routing-readout' });
    this.layers = h('div', { id: 'routing-layers' });
    this.layer = h('section', { class: 'card', id: 'routing-layer' });
    this.token = h('section', { class: 'card', id: 'routing-token', 'aria-label': 'Experts of the chosen token' });
    put(main, title, info.notices.map(notice), leftOut('Windows and eps are fixed in this folder', `Agreement and eps are those of a window, so an exported folder has windows of ${count(WINDOW)} positions with eps by the rule; zoom and another eps need the viewer.`), this.outside, this.lead, this.rule, this.controls, this.legend, this.readout, this.grid.root,
      h('div', { class: 'routingwork' }, h('div', {}, this.token, this.layer), scroller('Agreement by layer', this.layers)));
  }

  async follow(state) {
    const { info } = this;
    const next = view(state, info);
    const old = this.view;
    this.view = next;
    const layers = [...new Set([...info.a.layers, ...info.b.layers])].sort((x, y) => x - y);
    this.drawOutside(next.asked, next.layer === null || layers.includes(next.layer) ? null : next.layer, `Routes were recorded of layers ${layers[0]} to ${layers.at(-1)}`);
    const key = [next.from, next.to, next.eps].join(' ');
    if (!this.tile || this.tile.key !== key) {
      const answer = await getArrays(this.path('routing'), { ...scope(state), start: next.from, end: next.to, eps: next.eps }, this.signal);
      if (this.view !== next) return; // the reader has moved on
      this.tile = { key, ...answer.arrays, meta: answer.metadata, edges: JSON.parse(answer.metadata.edges) };
      this.rows = layerRows(answer.arrays);
      this.loads = new Map();
      this.drawControls(state);
      this.drawLead();
    }
    this.draw();
    if (!old || this.listed !== this.tile || old.layer !== next.layer) {
      this.listed = this.tile;
      this.drawLayers();
      this.drawLayer();
    }
    for (const a of this.layers.querySelectorAll('a')) a.href = link(state, { params: { layer: a.dataset.layer, ...this.here() } });
    this.drawToken();
    if (next.tok === null) return;
    await this.texts.load(next.tok);
    if (this.view !== next) return;
    this.drawReadout();
    if (old && (old.tok !== next.tok || old.layer !== next.layer)) whisper(this.words(this.cursor()));
  }

  // The window is written into the address as soon as something is chosen in it.
  here() {
    const { from, to } = this.view;
    return from === 0 && to === this.info.n ? {} : { from, to };
  }

  cursor() {
    if (this.view.tok === null || !this.rows.length) return null;
    return { row: Math.max(0, this.rows.findIndex((row) => row.layer === this.view.layer)), position: this.view.tok };
  }

  draw() {
    const { tile, rows, view: now } = this;
    const columns = this.grid.columns();
    if (!this.small || this.small.tile !== tile || this.small.columns !== columns) {
      this.small = { tile, columns, ...squeeze(tile.map, tile.starts.length, rows.length, columns) };
      this.small.starts = this.small.starts.map((at) => at + now.from);
      this.small.ticks = Array.from(this.small.starts, (_, bin) => rows.some((__, row) => this.small.codes[row * this.small.starts.length + bin] >= FLIP));
    }
    const { codes, starts, ticks } = this.small;
    const inks = `${theme()} ${this.unmoved()}`;
    if (this.inks !== inks) {
      this.inks = inks;
      this.colours = Array.from({ length: 256 }, (_, code) => (STATES[code] && !STATES[code][2] ? [...rgb(this.states()[code][3]), 255] : [0, 0, 0, 0]));
    }
    this.grid.draw({
      rows: rows.map((row) => ({ label: `layer ${row.layer}`, toggle: null, indent: false })),
      codes, bins: starts.length, starts, from: now.from, to: now.to, prompt: this.info.prompt_len,
      colours: this.colours, hatched: HATCHED, line: null, cursor: this.cursor(), ticks,
    });
    put(this.legend, h('ul', { class: 'states' }, this.states().map(([name, words, , ink]) =>
      h('li', {}, h('span', { class: `cellstate r-${name} ink-${ink}`, 'aria-hidden': 'true' }), ` ${words}`)), promptEnd(this.info)));
    this.drawReadout();
  }

  drawLead() {
    const sum = totals(this.rows);
    const { meta } = this.tile;
    const bad = sum.not_near_tie;
    put(this.lead, sum.decisions ? [
      h('strong', {}, `${count(sum.flips)} of ${count(sum.decisions)} choices are of other experts`), ` (${percent(sum.flips / sum.decisions)}): `,
      `${count(sum.near_tie)} near a tie, `, this.unmoved() ? `${count(bad)} above eps: not shown to be a tie` : h('strong', { class: bad ? 'bad' : null }, `${count(bad)} not explained by a tie`), `, ${count(sum.margin_unknown)} with a margin that is not known. `,
      `${count(sum.order_only)} differ in slot order alone.`,
    ] : 'Nothing in this window was recorded on both sides.');
    const only = ['a', 'b'].map((side) => [side.toUpperCase(), JSON.parse(meta[`only_${side}`])]).filter(([, layers]) => layers.length);
    put(this.rule,
      `A flip is near a tie if its margin, k-th minus (k+1)-th score of ${meta.margin_side ? meta.margin_side[0].toUpperCase() : 'no side'}, is below eps. Eps: ${meta.rule_words}${meta.rule === 'given' ? ` (${this.view.eps})` : ''}. `,
      meta.role_a === 'live' || meta.role_b === 'live' ? 'Compared are the own choices, not the forced ones. ' : null,
      meta.order === '0' ? 'One side kept sorted sets, so that slot order says nothing. ' : null,
      only.map(([side, layers]) => `Layers of ${side} only: ${layers.join(', ')}. `));
  }

  drawControls(state) {
    const { view: now, info } = this;
    const to = ([from, end], text, id) => h('a', { href: link(state, { params: { from, to: end } }), id }, text);
    const box = h('input', { type: 'text', id: 'eps', size: 8, inputmode: 'decimal', placeholder: 'by the rule', value: now.eps ?? '', on: {
      change: (event) => {
        const text = event.target.value.trim();
        if (document.activeElement === box) this.grid.canvas.focus({ preventScroll: true }); // Enter, not Tab
        if (text === '' || Number(text) >= 0) go(link(current(), { params: { eps: text || null, ...this.here() } }));
        else say('eps is a number from 0 on');
      },
    } });
    redraw(this.controls, COMMAND ? null : h('label', {}, 'eps ', box), h('span', { class: 'pager' }, `positions ${count(now.from)} to ${count(now.to - 1)} of ${count(info.n)} `,
      now.from > 0 ? [to(this.beside(-1), '[ previous', 'routing-previous'), ' '] : null,
      now.to < info.n ? to(this.beside(1), 'next ]', 'routing-next') : null));
  }

  words(at) {
    if (!at) return '\u00a0';
    const { tile, view: now, rows } = this;
    const row = rows[at.row];
    if (at.position < now.from || at.position >= now.to) return `token ${at.position} is outside of this window`;
    const state = this.states()[tile.map[at.row * tile.starts.length + at.position - now.from]];
    const text = this.texts.get(at.position);
    return `token ${at.position}${text ? ` ${text}` : ''} as input, layer ${row.layer}: ${state[1]}${state[0].includes('tie') && row.eps !== null ? ` (eps ${short(row.eps)})` : ''}`;
  }

  drawReadout() {
    if (!this.rows) return;
    put(this.readout, this.words(this.hovered && this.hovered.row < this.rows.length ? this.hovered : this.cursor()));
  }

  drawLayers() {
    const top = Math.max(...this.rows.map((row) => (row.decisions ? row.flips / row.decisions : 0)));
    const heads = ['layer', 'flips', '', 'share', 'near tie', this.unmoved() ? 'above eps' : 'not a tie', 'unknown', 'order only', 'Jaccard', 'top 1', 'weight L1', 'load TV', 'eps'];
    const titles = { 'top 1': 'agreement of the expert with the largest combine weight; needs weights of both sides', 'weight L1': 'mean distance of the combine weights where the sets agree', 'load TV': 'total variation of the expert loads' };
    put(this.layers, h('table', { class: 'data' }, h('caption', { class: 'sr' }, 'Agreement by layer in this window'),
      h('thead', {}, h('tr', {}, heads.map((t, i) => h('th', { scope: 'col', class: i > 0 && i !== 2 ? 'n' : null, title: titles[t] ?? null }, t || h('span', { class: 'sr' }, 'bar'))))),
      h('tbody', {}, this.rows.map((row) => h('tr', { class: row.layer === this.view.layer ? 'chosen' : null },
        h('th', { scope: 'row' }, h('a', { 'data-layer': row.layer, 'aria-current': row.layer === this.view.layer ? 'true' : null }, row.layer)),
        num(count(row.flips)), h('td', { class: 'barcell' }, bars(row.decisions ? row.flips / row.decisions : 0, top)),
        num(row.decisions ? percent(row.flips / row.decisions) : DASH),
        num(count(row.near_tie)), h('td', { class: row.not_near_tie && !this.unmoved() ? 'n bad' : 'n' }, count(row.not_near_tie)), num(count(row.margin_unknown)), num(count(row.order_only)),
        num(share(row.jaccard)), num(row.top1 === null ? 'no weights' : percent(row.top1)), num(row.weight_l1 === null ? 'no weights' : short(row.weight_l1)), num(short(row.load_tv)), num(short(row.eps)))))));
  }

  async drawLayer() {
    const { layer } = this.view;
    const index = this.rows.findIndex((row) => row.layer === layer);
    const { edges } = this.tile;
    const found = marginsOf(this.tile, edges.length - 1, index);
    const eps = index >= 0 ? this.rows[index].eps : null;
    const title = index < 0 ? 'Margins, all layers' : `Margins of layer ${layer}`;
    put(this.layer, h('h2', {}, title), marginChart(found, edges, eps), index < 0 ? h('p', { class: 'hint' }, 'Choose a layer for its eps and the load of its experts.') : null);
    if (index < 0) return;
    const { tile } = this;
    if (!this.loads.has(layer)) {
      const answer = await getArrays(this.path('routing'), { ...scope(current()), start: this.view.from, end: this.view.to, bins: 1, layers: layer }, this.signal);
      this.loads.set(layer, answer.arrays.load);
    }
    const load = this.loads.get(layer);
    if (this.tile === tile && this.view.layer === layer && load) this.layer.append(...loadChart(load, layer));
  }

  async drawToken() {
    const { tok } = this.view;
    if (tok === null) {
      this.shown = null;
      put(this.token, h('h2', {}, 'Experts of a token'), h('p', { class: 'hint' }, 'Choose a cell, or press n for the next flip.'));
      return;
    }
    if (!this.shown || this.shown.position !== tok) {
      const answer = await getJson(this.path('routing', String(tok)), scope(current()), this.signal);
      if (this.view.tok !== tok) return;
      this.shown = answer;
    }
    const rows = this.shown.layers;
    const odd = rows.filter((row) => row.same === false || row.order_only || row.layer === this.view.layer);
    const rest = rows.filter((row) => !odd.includes(row));
    const differ = rows.filter((row) => row.same === false).length;
    put(this.token, h('h2', {}, `Experts with token ${count(tok)} as input `, h('a', { href: link(current(), { screen: 'seq' }) }, 'open the token')),
      h('p', { class: differ ? 'flagline' : 'hint' }, rows.some((row) => row.same !== null) ? `${plural(differ, 'layer')} of ${rows.length} chose other experts.` : 'Not recorded on both sides here.'),
      odd.length ? expertTable(odd, this.view.layer) : null,
      rest.length ? h('details', {}, h('summary', {}, `${plural(rest.length, 'other layer')}`), expertTable(rest)) : null);
  }

  beside(step) {
    if (!COMMAND) return super.beside(step);
    const { from, to } = this.view;
    const start = from + step * WINDOW;
    return start >= 0 && start < this.info.n ? [start, Math.min(start + WINDOW, this.info.n)] : [from, to];
  }

  window(from, to) {
    if (COMMAND && (from % WINDOW || to !== Math.min(from + WINDOW, this.info.n))) {
      say('windows are fixed in an exported folder');
      return;
    }
    const end = Math.min(to, from + MOST);
    replace(link(current(), { params: { from, to: end } }));
    if (end < to) say(`a window holds at most ${count(MOST)} positions`);
  }

  walk(step) {
    const { tok, from } = this.view;
    const next = tok === null ? from : Math.min(Math.max(tok + step, 0), this.info.n - 1);
    this.choose(next, this.view.layer, replace);
  }

  choose(tok, layer, how) {
    const { from, to } = this.view;
    const inside = tok >= from && tok < to;
    const [start, end] = inside ? [from, to] : COMMAND ? windowOf(null, null, tok, this.info.n, true) : pan(tok - Math.floor((to - from) / 2), to - from, this.info.n);
    how(link(current(), { params: { tok, layer, ...(start === 0 && end === this.info.n ? {} : { from: start, to: end }) } }));
  }

  seek(back) {
    const { tile, rows, view: now } = this;
    const n = tile.starts.length;
    const inside = now.tok !== null && now.tok >= now.from && now.tok < now.to;
    const found = nextFlip(tile.map, n, rows.length, inside ? now.tok - now.from : back ? n : -1, back);
    if (found) this.choose(now.from + found.at, rows[found.row].layer, go);
    else say(`no ${back ? 'earlier' : 'later'} flip in this window; ${back ? '[ goes to the previous' : '] goes to the next'} one`);
  }

  step(down) {
    const at = this.rows.findIndex((row) => row.layer === this.view.layer);
    const row = this.rows[Math.min(Math.max(at + down, 0), this.rows.length - 1)];
    replace(link(current(), { params: { layer: row.layer, ...this.here() } }));
  }

  makeKeys() {
    return {
      j: () => this.walk(1), ArrowRight: () => this.walk(1), k: () => this.walk(-1), ArrowLeft: () => this.walk(-1),
      n: () => this.seek(false), N: () => this.seek(true),
      '[': () => this.page(-1), ']': () => this.page(1),
      z: () => this.zoomBy(0.5), Z: () => this.zoomBy(2),
      '-': () => this.step(-1), '=': () => this.step(1),
      Enter: () => { if (this.view.tok !== null) go(link(current(), { screen: 'seq' })); },
      Escape: () => go(link(current(), { params: { tok: null, layer: null } })),
    };
  }
}

function expertTable(rows, chosen) {
  const cell = (own, other) => {
    if (own.ids === null) return h('td', { class: 'hint' }, own.reason || 'not recorded');
    return h('td', { class: 'mono experts' }, own.ids.map((id, i) => h('span', { class: 'expert' },
      other.ids && !other.ids.includes(id) ? h('mark', {}, id) : id, own.weights ? h('small', { class: 'hint', title: own.weights[i] }, ` ${short(own.weights[i])}`) : null)),
    own.used ? h('div', { class: 'hint' }, `used: ${own.used.join(' ')}`) : null);
  };
  const verdict = (row) => (row.same === false ? h('strong', {}, '\u2260', h('span', { class: 'sr' }, ' differs')) : row.order_only ? 'order' : row.same ? '=' : DASH);
  return scroller('Experts by layer', h('table', { class: 'data routes' },
    h('thead', {}, h('tr', {}, ['layer', 'A, slot order', 'B, slot order', '', 'margin A', 'margin B'].map((t) => h('th', { scope: 'col' }, t || h('span', { class: 'sr' }, 'verdict'))))),
    h('tbody', {}, rows.map((row) => h('tr', { class: row.same === false ? 'differs' : row.layer === chosen ? 'chosen' : null },
      h('th', { scope: 'row', class: 'n' }, row.layer), cell(row.a, row.b), cell(row.b, row.a), h('td', {}, verdict(row)),
      ...[row.a, row.b].map((side) => h('td', { class: 'n mono', title: side.margin }, side.margin === null ? DASH : short(side.margin))))))));
}

/** Decisions that agree and flips by margin; counts on a log axis, flips below the line. */
function marginChart({ agree, flips }, edges, eps) {
  const sum = agree.reduce((x, y) => x + y, 0) + flips.reduce((x, y) => x + y, 0);
  if (!sum) return h('p', { class: 'hint' }, 'No margins were recorded.');
  const [wide, high, left, head] = [520, 76, 40, 14];
  const x = (i) => left + (i * (wide - left - 8)) / (edges.length - 1);
  const top = Math.log10(Math.max(10, ...agree, ...flips)) + 0.3;
  const tall = (n) => (n ? ((Math.log10(n) + 0.3) / top) * high : 0);
  const bar = (n, i, kind, down, words) => (n ? svg('rect', { x: x(i) + 0.5, y: head + (down ? high + 10 : high + 8 - tall(n)), width: x(i + 1) - x(i) - 1, height: tall(n), class: kind }, svg('title', {}, `${words}, margin ${short(edges[i])} to ${short(edges[i + 1])}: ${count(n)}`)) : null);
  const at = eps === null || eps <= 0 ? null : Math.min(Math.max((Math.log10(eps) - Math.log10(edges[0])) / (Math.log10(edges[1]) - Math.log10(edges[0])), 0), edges.length - 1);
  const rows = edges.slice(1).map((edge, i) => [i, agree[i], flips[i]]).filter(([, a, f]) => a || f);
  return h('figure', {},
    svg('svg', { viewBox: `0 0 ${wide} ${head + 2 * high + 38}`, class: 'chart', role: 'img', 'aria-label': 'Margins of decisions that agree, above, and of flips, below; the table has the numbers' },
      svg('text', { x: 0, y: head + high }, 'agree'), svg('text', { x: 0, y: head + high + 24 }, 'flips'),
      agree.map((n, i) => bar(n, i, 'bar', false, 'agree')), flips.map((n, i) => bar(n, i, 'over', true, 'flips')),
      svg('line', { x1: left, x2: wide - 8, y1: head + high + 9, y2: head + high + 9, class: 'axis' }),
      edges.map((edge, i) => (i % 4 ? null : svg('text', { x: x(i), y: head + 2 * high + 24, class: 'mid' }, short(edge)))),
      at === null ? null : [svg('line', { x1: x(at), x2: x(at), y1: 0, y2: head + 2 * high + 12, class: 'limit' }), svg('text', { x: x(at) + 3, y: 10 }, `eps ${short(eps)}`)],
      svg('text', { x: wide - 8, y: head + 2 * high + 36, class: 'end' }, 'margin, log axis; counts on a log axis')),
    h('details', {}, h('summary', {}, 'Numbers'), h('table', { class: 'data narrow' },
      h('thead', {}, h('tr', {}, ['margin', 'agree', 'flips'].map((t) => h('th', { scope: 'col' }, t)))),
      h('tbody', {}, rows.map(([i, a, f]) => h('tr', {}, h('th', { scope: 'row', class: 'n' }, `${short(edges[i])} to ${short(edges[i + 1])}`), num(count(a)), num(count(f))))))));
}

/** Choices by expert on both sides: A above, B below. */
function loadChart(load, layer) {
  const experts = load.length / 2;
  const [wide, high, left] = [520, 60, 16];
  const top = Math.max(1, ...load);
  const step = (wide - left) / experts;
  const bar = (side, e) => {
    const n = load[side * experts + e];
    const tall = (n / top) * high;
    return n ? svg('rect', { x: left + e * step, y: side ? high + 2 : high - tall, width: Math.max(0.5, step - (step > 3 ? 1 : 0)), height: tall, class: side ? 'over' : 'bar' }, svg('title', {}, `expert ${e}, ${side ? 'B' : 'A'}: ${count(n)}`)) : null;
  };
  const all = Array.from({ length: experts }, (_, e) => e);
  return [h('h2', {}, `Load of the experts of layer ${layer}`), h('figure', {},
    svg('svg', { viewBox: `0 0 ${wide} ${2 * high + 16}`, class: 'chart', role: 'img', 'aria-label': 'Choices by expert, A above and B below; the table has the numbers' },
      all.map((e) => [bar(0, e), bar(1, e)]), svg('line', { x1: left, x2: wide, y1: high + 1, y2: high + 1, class: 'axis' }),
      svg('text', { x: 0, y: high - 6 }, 'A'), svg('text', { x: 0, y: high + 16 }, 'B'), svg('text', { x: left, y: 2 * high + 14 }, `experts 0 to ${experts - 1}; highest bar ${count(top)}`)),
    h('details', {}, h('summary', {}, 'Numbers'), h('table', { class: 'data narrow' },
      h('thead', {}, h('tr', {}, ['expert', 'A', 'B', 'B \u2212 A'].map((t) => h('th', { scope: 'col' }, t)))),
      h('tbody', {}, all.map((e) => h('tr', {}, h('th', { scope: 'row', class: 'n' }, e), num(count(load[e])), num(count(load[experts + e])), num(count(load[experts + e] - load[e]))))))))];
}

function share(value) {
  return value === null ? DASH : value < 1 && value > 0.999 ? '>0.999' : short(value);
}
