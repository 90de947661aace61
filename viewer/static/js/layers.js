// Layers of one sequence: error of every site at every token, and the front where it begins.

import { getArrays, getJson, runPath, scope } from './api.js';
import { choice } from './choice.js';
import { css, sequential } from './colour.js';
import { h, num, put, redraw } from './dom.js';
import { NONE as DASH, count, plural, short } from './format.js';
import { GridPage } from './gridpage.js';
import { makeGrid, promptEnd, rgb } from './heat_grid.js';
import {
  METRICS, NONE, THRESHOLDS, amountValue, binAt, binFront, clipped, nextChange, palette, pan, patternsOf,
  rowOfSite, rowOfText, rowsOf, textOfRow, zoom,
} from './heat_math.js';
import { notice } from './notices.js';
import { current, go, integer, link, replace } from './route.js';
import { scroller } from './scroll.js';
import { say, whisper } from './shell.js';
import { theme } from './theme.js';
import { makeTexts } from './texts.js';

const STATE_WORDS = { missing: 'not recorded, or not compared', equal: 'bitwise equal', not_measured: 'not known from sketches', not_finite: 'not finite' };
const HATCHED = { 0: ['/', 'hatch'], 2: ['.', 'dim'], 3: ['x', 'ground'] };

const ONLY_OUTPUTS = 'no tensor within this layer was recorded; replay --sites keeps them';

export async function open({ state, main, signal }) {
  const path = (...rest) => runPath(state, 'seqs', state.seq, ...rest);
  const info = await getJson(path('layers'), scope(state), signal);
  if (signal.aborted) return {};
  const page = new Page(state, info, path, signal);
  page.build(main);
  if (info.sites.length) page.ready = page.follow(state);
  return page;
}

/** What the address says of this page. */
function view(state, info) {
  const { n } = info;
  const metric = Math.max(0, METRICS.findIndex((m) => m.id === state.params.get('metric')));
  const full = METRICS[metric].presets.findIndex((p) => p.text === state.params.get('full'));
  const from = Math.min(integer(state.params.get('from')) ?? 0, Math.max(0, n - 1));
  const to = Math.min(Math.max(integer(state.params.get('to')) ?? n, from + 1), n);
  const asked = integer(state.params.get('tok'));
  const text = state.params.get('thr');
  const open_ = state.params.get('open') || '';
  return {
    metric, from, to, asked,
    full: full < 0 ? METRICS[metric].preset : full,
    tok: asked === null || !n ? null : Math.min(asked, n - 1),
    thr: thresholds(info).includes(text) ? text : defaultThreshold(info),
    open: open_ === 'all' ? 'all' : new Set(open_.split(',').filter((x) => /^\d+$/.test(x)).map(Number)),
    layer: state.params.get('layer'),
  };
}

function thresholds(info) {
  return THRESHOLDS.filter((t) => t !== 'floor' || info.report.by_site);
}

function defaultThreshold(info) {
  return info.report.by_site ? 'floor' : '1e-3';
}

function thresholdWords(text) {
  return text === 'floor' ? 'the noise floor' : text === '0' ? 'any other bit' : `rel L2 ${text}`;
}

class Page extends GridPage {
  constructor(state, info, path, signal) {
    super(state, info, path, signal);
    this.sites = info.sites.map((s) => s.site);
    this.texts = makeTexts(path, scope(state), signal, info.n);
    this.keys = info.sites.length ? this.makeKeys() : {};
  }

  canDraw() {
    return Boolean(this.view);
  }

  build(main) {
    const { info } = this;
    const title = h('h1', { class: 'mono' }, this.base.seq, h('span', { class: 'hint' }, ' layer by layer'));
    if (!info.sites.length) {
      put(main, title, info.notices.map(notice));
      return;
    }
    this.grid = makeGrid({
      label: 'Error of every layer at every token; arrows move, Enter opens the token', describedBy: 'heat-readout',
      move: (row, position, click) => this.move(row, position, click),
      open: (position) => this.openToken(position),
      hover: (row, position) => { this.hovered = row === null || position === null ? null : { row, position }; this.drawReadout(); },
      zoom: (from, to) => this.window(Math.max(0, from), Math.min(to, info.n)),
      toggle: (row) => this.toggle(row),
      resized: () => this.resized(),
    });
    this.controls = h('div', { class: 'controls' });
    this.legend = h('div', { class: 'legend', 'aria-label': 'Legend' });
    this.readout = h('p', { class: 'readout', id: 'heat-readout' });
    this.lead = h('p', { class: 'frontline', id: 'front-line' });
    this.front = h('div', {});
    this.token = h('div', {});
    this.tokenBox = h('details', { id: 'token-sites', on: { toggle: () => this.drawToken() } }, h('summary', {}, 'All sites at the chosen token, as a table'), this.token);
    put(main, title, this.outside, this.lead, this.controls, this.legend, this.readout, this.grid.root,
      h('details', { id: 'front-table', open: true }, h('summary', {}, 'The front by site, as a table'), this.front),
      this.tokenBox, lacking(info.lacking));
  }

  async follow(state) {
    const { info } = this;
    const next = view(state, info);
    this.view = next;
    this.drawOutside(next.asked, this.known(next.layer) ? null : next.layer, `The sequence has ${this.sites[0]} to ${this.sites.at(-1)}`);
    const open_ = next.open === 'all' ? 'all' : [...next.open].join();
    const rows = this.rows && this.opened === open_ ? this.rows : rowsOf(this.sites, next.open);
    const bins = Math.min(next.to - next.from, this.grid.columns());
    const sites = patternsOf(rows, this.sites);
    const want = [METRICS[next.metric].id, next.from, next.to, bins, sites].join(' ');
    const jobs = [];
    let { tile, fronts } = this;
    if (!tile || tile.key !== want) {
      jobs.push(getArrays(this.path('heat'), { ...scope(state), metric: METRICS[next.metric].id, start: next.from, end: next.to, bins, sites }, this.signal)
        .then((answer) => { tile = readTile(answer, rows, want); }));
    }
    if (!fronts || fronts.key !== next.thr) {
      jobs.push(getArrays(this.path('front'), { ...scope(state), threshold: next.thr === 'floor' ? null : next.thr }, this.signal)
        .then(({ arrays }) => { fronts = { key: next.thr, ...arrays }; }));
    }
    await Promise.all(jobs);
    if (this.view !== next) return; // the reader has moved on
    const first = !this.rows;
    const fresh = this.fronts !== fronts;
    Object.assign(this, { tile, fronts, rows, opened: open_ });
    this.drawControls(state);
    this.draw();
    if (fresh) this.drawFront();
    for (const box of [this.lead, this.front]) refresh(box, state);
    this.drawToken();
    if (next.tok !== null) await this.texts.load(next.tok);
    if (this.view !== next) return;
    this.drawReadout();
    if (next.tok !== null && !first) whisper(this.words(this.cursor()));
  }

  /** Whether the layer or site of the address is there. */
  known(text) {
    return text === null || rowOfText(rowsOf(this.sites, new Set()), text) >= 0;
  }

  cursor() {
    const { tok, layer } = this.view;
    if (tok === null) return null;
    const site = this.fronts.front[tok];
    const row = layer === null && site !== NONE ? rowOfSite(this.rows, site) : rowOfText(this.rows, layer);
    return { row: Math.max(0, row), position: tok };
  }

  draw() {
    const { tile, rows, view: now } = this;
    const metric = METRICS[now.metric];
    const full = metric.presets[now.full].value;
    const line = this.line();
    this.grid.draw({
      rows: rows.map((row) => ({ label: row.indent ? row.site.replace(/^layers\.\d+/, '') : row.site, toggle: row.toggle, indent: row.indent })),
      codes: tile.codes, bins: tile.starts.length, starts: tile.starts, from: now.from, to: now.to, prompt: this.info.prompt_len,
      colours: this.colours(full),
      hatched: HATCHED,
      line,
      ticks: line.map((row) => row >= 0),
      cursor: this.cursor(),
    });
    const said = [tile.key, full, theme(), now.thr].join(' ');
    if (this.said !== said) put(this.legend, this.legendOf(metric, full));
    this.said = said;
    this.drawReadout();
  }

  /** Per bin the row of the front, -1 for none. */
  line() {
    const { tile, fronts, rows } = this;
    const known = this.drawn;
    if (known && known.tile === tile && known.fronts === fronts && known.rows === rows) return known.line;
    const line = Array.from(binFront(fronts.front, tile.starts, this.view.to), (site) => (site === NONE ? -1 : rowOfSite(rows, site)));
    this.drawn = { tile, fronts, rows, line };
    return line;
  }

  colours(full) {
    const key = [full, theme(), this.view.metric].join(' ');
    if (this.inks && this.inks.key === key) return this.inks.table;
    const table = palette(this.tile.scale, { full, low: METRICS[this.view.metric].low, theme: theme(), states: { 1: rgb('ground'), 3: rgb('nonfinite') } });
    this.inks = { key, table };
    return table;
  }

  legendOf(metric, full) {
    const steps = full === metric.low ? [1] : [0, 0.2, 0.4, 0.6, 0.8, 1];
    const { cells, over } = { cells: this.tile.codes.length, over: clipped(this.tile.codes, this.tile.scale, full) };
    return [
      h('span', { class: 'ramp' }, steps.map((t) => h('span', { class: 'step' },
        h('span', { class: 'chipcolour', style: { 'background-color': css(sequential(t, theme())) }, 'aria-hidden': 'true' }),
        metric.id === 'equal' ? 'other bits' : `${t === 1 ? '\u2265' : t === 0 ? '\u2264' : ''}${short(amountValue(t, full, metric.low))}`)), ` ${metric.text}`),
      h('ul', { class: 'states' },
        [['equal', metric.id === 'non_finite' ? 'every value finite' : 'bitwise equal'], ['missing', 'not recorded'], ['not_measured', 'sketched: not known'], ['not_finite', 'not finite']]
          .map(([name, text]) => h('li', {}, h('span', { class: `cellstate ${name}`, 'aria-hidden': 'true' }), ` ${text}`)),
        h('li', {}, h('span', { class: 'cellstate frontmark', 'aria-hidden': 'true' }), ` front: first site over ${thresholdWords(this.view.thr)}`), promptEnd(this.info)),
      h('span', { class: 'hint', id: 'heat-clipped' }, `${count(over)} of ${count(cells)} cells over the scale; a cell shows the largest of ${this.tile.wide > 1 ? `about ${count(this.tile.wide)} positions` : 'one position'}`),
    ];
  }

  drawControls(state) {
    const { view: now, info } = this;
    const metric = METRICS[now.metric];
    const to = (params) => link(state, { params });
    const wide = now.to - now.from;
    redraw(this.controls,
      h('label', {}, 'measure ', this.choice('metric', METRICS.map((m) => [m.id, m.text]), metric.id, (id) => this.set({ metric: id, full: null }))),
      h('label', {}, 'full scale ', this.choice('full', metric.presets.map((p) => [p.text, p.text]), metric.presets[now.full].text, (text) => this.set({ full: text }))),
      h('label', {}, 'front over ', this.choice('thr', thresholds(info).map((t) => [t, thresholdWords(t)]), now.thr, (text) => this.set({ thr: text }))),
      this.rows.some((row) => row.toggle) ? h('button', { type: 'button', id: 'expand', on: { click: () => this.toggleAll() } }, now.open === 'all' ? 'Close all layers' : 'Open all layers') : null,
      h('span', { class: 'pager' }, `positions ${count(now.from)} to ${count(now.to - 1)} of ${count(info.n)} `,
        now.from > 0 ? [h('a', { href: to(range(this.beside(-1))), id: 'heat-previous' }, '[ previous'), ' '] : null,
        now.to < info.n ? [h('a', { href: to(range(this.beside(1))), id: 'heat-next' }, 'next ]'), ' '] : null,
        wide < info.n ? h('a', { href: to({ from: null, to: null }), id: 'heat-all' }, 'whole sequence') : null));
  }

  choice(id, options, chosen, change) {
    return choice(id, options, chosen, change, () => this.grid.canvas.focus({ preventScroll: true }));
  }

  words(at) {
    if (!at || !this.tile) return '\u00a0';
    const { tile, view: now, rows } = this;
    const row = rows[at.row];
    const inside = at.position >= now.from && at.position < now.to;
    const bin = inside ? binAt(tile.starts, at.position) : -1;
    const last = bin < 0 ? at.position : (bin + 1 < tile.starts.length ? tile.starts[bin + 1] : now.to) - 1;
    const text = this.texts.get(at.position);
    const site = this.fronts.front[at.position];
    const first = site === NONE ? `nothing over ${thresholdWords(now.thr)}` : `first over ${thresholdWords(now.thr)} at ${this.sites[site]}`;
    const many = last > at.position;
    const cell = inside ? cellWords(tile, METRICS[now.metric], at.row, bin) : '';
    return [
      `${many ? `tokens ${at.position} to ${last}` : `token ${at.position}`}${text ? ` ${text}` : ''}`,
      inside ? `${many && /\d/.test(cell) ? 'at most ' : ''}${cell} at ${row.site}` : 'outside of this window',
      first,
    ].join(', ');
  }

  drawReadout() {
    if (!this.rows) return;
    const at = this.hovered && this.hovered.row < this.rows.length ? this.hovered : this.cursor();
    put(this.readout, this.words(at));
  }

  drawFront() {
    const { fronts, sites, info } = this;
    const { thr } = this.view;
    const tok = (position, site) => h('a', { 'data-tok': position, 'data-layer': site }, count(position));
    const found = sites.map((site, i) => ({ site, i, over: fronts.over[i], first: fronts.first[i] })).filter((row) => row.over);
    const all = fronts.front.reduce((sum, site) => sum + (site !== NONE), 0);
    const earliest = fronts.front.findIndex((site) => site !== NONE);
    put(this.lead, found.length ? [
      `First site over ${thresholdWords(thr)}: `, h('strong', {}, found[0].site), ' at position ', tok(found[0].first, found[0].site), '. ',
      earliest !== found[0].first ? ['Earliest position: ', tok(earliest, sites[fronts.front[earliest]]), ` at ${sites[fronts.front[earliest]]}. `] : null,
      `${plural(all, 'position')} of ${count(info.n)} ${all === 1 ? 'has' : 'have'} one.`,
    ] : `No site is over ${thresholdWords(thr)} at any position that was compared.`, ' ',
    h('span', { class: 'hint' }, floorWords(info, thr)));
    const heads = ['site', 'compared', 'other bits', 'over', 'first over', 'is the front'];
    put(this.front, scroller('The front by site', h('table', { class: 'data' },
      h('thead', {}, h('tr', {}, heads.map((t, i) => h('th', { scope: 'col', class: i ? 'n' : null }, t)))),
      h('tbody', {}, sites.map((site, i) => h('tr', { class: fronts.over[i] ? 'differs' : null },
        h('th', { scope: 'row', class: 'mono' }, site, info.sites[i].sketched ? h('span', { class: 'hint' }, ' sketched') : null),
        num(count(fronts.compared[i])), num(count(fronts.unequal[i])), num(count(fronts.over[i])),
        h('td', { class: 'n' }, fronts.over[i] ? tok(fronts.first[i], site) : DASH), num(count(fronts.leads[i]))))))));
  }

  async drawToken() {
    const { tok } = this.view || {};
    if (!this.tokenBox.open || tok === undefined) return;
    if (tok === null) {
      put(this.token, h('p', { class: 'hint' }, 'Choose a token in the map first.'));
      return;
    }
    if (this.tokenShown === tok) return;
    const answer = await getJson(this.path('layers', String(tok)), scope(current()), this.signal);
    if (this.view.tok !== tok) return;
    this.tokenShown = tok;
    const cell = (row, name) => (row.equal && name !== 'non_finite' ? 'equal' : row[name] ?? (row.sketched ? 'not known' : name === 'rel_l2' || name === 'cosine' ? 'row of zeros' : DASH));
    put(this.token, h('p', { class: 'hint' }, `Position ${count(tok)}.`), scroller(`Sites at position ${count(tok)}`, h('table', { class: 'data' },
      h('thead', {}, h('tr', {}, ['site', 'rel L2', 'max |b - a|', 'cosine', 'ulp', 'not finite'].map((t, i) => h('th', { scope: 'col', class: i ? 'n' : null }, t)))),
      h('tbody', {}, answer.rows.map((row) => h('tr', {},
        h('th', { scope: 'row', class: 'mono' }, row.site),
        ['rel_l2', 'max_abs', 'cosine', 'ulp', 'non_finite'].map((name) => h('td', { class: 'n mono' }, String(cell(row, name))))))))));
  }

  move(row, position, click) {
    const hash = link(current(), { params: { tok: position, layer: textOfRow(this.rows[row]) } });
    if (click) go(hash);
    else replace(hash); // walking leaves no trail
  }

  walk(step) {
    const at = this.cursor();
    const position = at ? Math.min(Math.max(at.position + step, 0), this.info.n - 1) : this.view.from;
    this.show(position, at ? at.row : 0, replace);
  }

  /** Moves the cursor; the window follows if it would leave it. */
  show(position, row, how) {
    const { from, to } = this.view;
    const inside = position >= from && position < to;
    const params = { tok: position, layer: textOfRow(this.rows[row]), ...(inside ? {} : range(pan(position - Math.floor((to - from) / 2), to - from, this.info.n))) };
    how(link(current(), { params }));
  }

  seek(back) {
    const at = this.view.tok ?? (back ? this.info.n : -1);
    const found = nextChange(this.fronts.front, at, back);
    if (found < 0) say(`no ${back ? 'earlier' : 'later'} change of the front`);
    else {
      const site = this.fronts.front[found];
      say(`front at ${this.sites[site]}`);
      this.show(found, rowOfSite(this.rows, site), go);
    }
  }

  openToken(position) {
    go(link(current(), { screen: 'seq', params: { tok: position } }));
  }

  set(params) {
    go(link(current(), { params }));
  }

  window(from, to) {
    const whole = from <= 0 && to >= this.info.n;
    replace(link(current(), { params: whole ? { from: null, to: null } : { from, to } }));
  }

  threshold(step) {
    const all = thresholds(this.info);
    const at = Math.min(Math.max(all.indexOf(this.view.thr) + step, 0), all.length - 1);
    say(`front over ${thresholdWords(all[at])}`);
    this.set({ thr: all[at] });
  }

  toggle(row) {
    if (!this.rows[row] || !this.rows[row].toggle) {
      say(ONLY_OUTPUTS);
      return;
    }
    const { layer } = this.rows[row];
    const every = new Set(this.rows.filter((r) => r.toggle).map((r) => r.layer));
    const open_ = this.view.open === 'all' ? every : new Set(this.view.open);
    if (!open_.delete(layer)) open_.add(layer);
    this.set({ open: [...open_].sort((a, b) => a - b).join(',') || null });
  }

  toggleAll() {
    if (!this.rows.some((r) => r.toggle)) {
      say(ONLY_OUTPUTS);
      return;
    }
    this.set({ open: this.view.open === 'all' ? null : 'all' });
  }

  makeKeys() {
    const keys = {
      j: () => this.walk(1), ArrowRight: () => this.walk(1), k: () => this.walk(-1), ArrowLeft: () => this.walk(-1),
      n: () => this.seek(false), N: () => this.seek(true),
      '-': () => this.threshold(-1), '=': () => this.threshold(1),
      '[': () => this.page(-1), ']': () => this.page(1),
      z: () => this.zoomBy(0.5), Z: () => this.zoomBy(2), 0: () => this.window(0, this.info.n),
      e: () => { const at = this.cursor(); if (at) this.toggle(this.rows.findIndex((r, i) => i >= at.row && r.layer === this.rows[at.row].layer && r.toggle)); },
      E: () => this.toggleAll(),
      Enter: () => { if (this.view.tok !== null) this.openToken(this.view.tok); },
      Escape: () => go(link(current(), { params: { tok: null, layer: null } })),
    };
    METRICS.forEach((metric, i) => { keys[String(i + 1)] = () => this.set({ metric: metric.id, full: null }); });
    return keys;
  }
}

/** The tile with its rows in the order of the page. */
function readTile({ arrays, metadata }, rows, key) {
  const bins = arrays.starts.length;
  const at = new Map(JSON.parse(metadata.rows).map((site, i) => [site, i]));
  const codes = new Uint8Array(rows.length * bins);
  rows.forEach((row, i) => {
    const from = at.get(row.site);
    if (from !== undefined) codes.set(arrays.codes.subarray(from * bins, (from + 1) * bins), i * bins);
  });
  const wide = Math.ceil((Number(metadata.end) - Number(metadata.start)) / Math.max(1, bins));
  return { key, codes, starts: arrays.starts, scale: arrays.scale, states: metadata.states.split(','), wide };
}

function cellWords(tile, metric, row, bin) {
  const code = tile.codes[row * tile.starts.length + bin];
  const state = tile.states[code];
  if (state === 'equal') return metric.id === 'non_finite' ? 'every value finite' : STATE_WORDS.equal;
  if (state) return STATE_WORDS[state];
  return metric.id === 'equal' ? 'other bits' : `${metric.text} ${short(tile.scale[code])}`;
}

function floorWords(info, thr) {
  const { floor } = info.report;
  if (thr === 'floor') return `Measured on ${count(floor.positions)} positions of ${plural(floor.sequences, 'sequence')} (${(floor.executions || []).join('; ')}); a site that was not measured has no noise.`;
  if (info.report.by_site) return '';
  if (floor) return 'The report was judged by a noise floor and does not say its thresholds, so this one is a choice; write the report anew for them.';
  return 'No noise floor was measured, so the threshold is a choice; rolltape diff --floor FILE judges by a measured one.';
}

function lacking({ only_a: a, only_b: b, not_compared: both }) {
  const line = (title, sites) => (sites && sites.length ? h('li', {}, `${title}: `, h('span', { class: 'mono' }, sites.join(', '))) : null);
  const lines = [line('Side A only', a), line('Side B only', b), line('On both sides, not compared', both)].filter(Boolean);
  if (a === null) return h('p', { class: 'hint', id: 'lacking' }, 'Which sites one side lacks is not known: not both tapes are open.');
  return lines.length ? h('section', { class: 'card', id: 'lacking' }, h('h2', {}, 'Sites that are not in the map'), h('ul', {}, lines)) : null;
}

// Tables are drawn once; where their links lead depends on everything else in the address.
function refresh(box, state) {
  for (const a of box.querySelectorAll('a[data-tok]')) a.href = link(state, { params: { ...a.dataset, from: null, to: null } });
}

function range([from, to]) {
  return { from, to };
}
