// Sequence page: facts, minimap, token strip, panel of the pinned token.

import { getArrays, getJson, runPath, scope } from './api.js';
import { starButton } from './basket.js';
import { choice } from './choice.js';
import { byId, h, put } from './dom.js';
import { NONE, count, percent, short } from './format.js';
import { legend } from './legend.js';
import { makeMinimap } from './minimap.js';
import { notice, notices } from './notices.js';
import { drawPanel } from './panel.js';
import { current, go, integer, link, replace } from './route.js';
import { edged } from './scroll.js';
import { say, whisper } from './shell.js';
import { STATS, presetOf, statOf } from './stats.js';
import { findText } from './find.js';
import { WINDOW, describe, drawStrip, paintStrip, readWindow } from './strip.js';
import { onTheme, theme } from './theme.js';

/** Arrays of a window that every statistic needs. */
const USUAL = ['ids', 'state', 'flags', 'a', 'b', 'delta', 'flips', 'text_offsets', 'text_bytes'];
const NOT_STORED = 'the tapes hold no distributions; record with --top-logprobs';

export async function open({ state, main, signal }) {
  const path = (...rest) => runPath(state, 'seqs', state.seq, ...rest);
  const info = await getJson(path(), scope(state, ['rep', 'sort', 'q']), signal);
  if (signal.aborted) return {};
  const page = new Page(state, info, path, signal);
  page.build(main);
  page.ready = page.follow(state); // keys act from now on
  return page;
}

/** What the address says of this page. */
function view(state, n) {
  const tok = integer(state.params.get('tok'));
  const pinned = tok === null || !n ? null : Math.min(tok, n - 1);
  const win = integer(state.params.get('win'));
  const wanted = win !== null && n ? Math.min(win, n - 1) : pinned || 0;
  const start = Math.floor(wanted / WINDOW) * WINDOW;
  const stat = statOf(state.params.get('stat'));
  return {
    pinned,
    asked: tok,
    start,
    end: Math.min(start + WINDOW, n),
    stat,
    preset: presetOf(stat, state.params.get('scale')),
    hideMasked: state.params.get('mask') === 'hide',
    at: integer(state.params.get('at')),
  };
}

class Page {
  constructor(state, info, path, signal) {
    this.base = { run: state.run, seq: state.seq, rep: state.params.get('rep') };
    this.info = info;
    this.path = path;
    this.signal = signal;
    this.data = null; // the window that is shown
    this.view = null;
    this.hovered = null;
    this.detail = new AbortController();
    this.keys = this.makeKeys();
    this.unthemed = onTheme(() => this.paint());
    this.onScroll = this.onScroll.bind(this);
    addEventListener('scroll', this.onScroll, { passive: true });
  }

  close() {
    this.detail.abort();
    this.unthemed();
    this.minimap.close();
    removeEventListener('scroll', this.onScroll);
  }

  build(main) {
    const { info } = this;
    const state = current();
    this.minimap = makeMinimap(info.minimap, info.n, (position) => this.pin(position));
    this.strip = h('div', { class: 'strip', id: 'strip', role: 'listbox', tabindex: 0, 'aria-label': 'Tokens' });
    this.strip.addEventListener('click', (event) => {
      const token = event.target.closest('.t');
      if (token && !String(getSelection())) this.pin(tokenPosition(token));
    });
    this.strip.addEventListener('mouseover', (event) => this.hover(event.target.closest('.t')));
    this.strip.addEventListener('mouseleave', () => this.hover(null));
    this.readout = h('p', { class: 'readout', id: 'readout' });
    this.panel = h('aside', { class: 'panel', id: 'panel', 'aria-label': 'Pinned token' });
    this.legend = h('div', {});
    this.scales = h('fieldset', { class: 'scales' });
    this.pager = h('span', { class: 'pager' });
    this.clipped = h('span', { class: 'hint', id: 'clipped' });
    this.stats = choice('stat', STATS.map((stat) => (this.has(stat) ? [stat.name, stat.text] : [stat.name, `${stat.text} (not recorded)`, { disabled: true, title: NOT_STORED }])),
      null, (name) => this.setStat(name), () => this.strip.focus({ preventScroll: true }));
    this.find = h('input', { type: 'search', id: 'find', size: 12, placeholder: 'find text', 'aria-label': 'Find text in the sequence; Enter goes on', on: { keydown: (event) => this.onFind(event) } });
    this.outside = h('div', {});
    this.maskBox = h('input', { type: 'checkbox', id: 'mask', on: { change: () => this.toggleMask() } });
    put(
      main,
      h('h1', { class: 'mono' }, info.seq.id, neighbours(state, info), starButton({ run: state.run, name: info.run.name, seq: state.seq, hash: link(state, { params: { tok: null } }), ...scope(state) })),
      notices(info.notices, { brief: true }),
      info.tokenizer.missing && info.run.open
        ? h('p', { class: 'hint', id: 'no-tokenizer' }, `Tokens are shown as ids: ${info.tokenizer.missing}.`) : null,
      facts(state, info),
      this.causes(state),
      this.outside,
      info.n ? h('div', { class: 'work' },
        h('div', { class: 'left' },
          this.head = h('div', { class: 'striphead' },
            this.minimap.canvas,
            h('div', { class: 'controls' },
              h('span', {}, h('label', { for: 'stat' }, 'colour '), this.stats), this.scales, this.clipped,
              h('span', {}, this.maskBox, ' ', h('label', { for: 'mask' }, `show masked (${count(info.counts.masked)})`)),
              this.find, this.pager),
            this.readout),
          this.legend, this.strip),
        edged(this.panel, 'panelbox')) : notice({ level: 'info', title: 'An empty sequence', text: 'It was opened and no token was recorded. Aborted requests are kept like this.' }),
    );
  }

  /** Fetched when it is opened: most looks at a sequence are about its tokens. */
  causes(state) {
    const box = h('details', { id: 'causes' }, h('summary', {}, 'Causes, as far as they were tested'));
    box.addEventListener('toggle', async () => {
      const { causesPanel } = await import('./causes.js');
      box.append(await causesPanel({ state, signal: this.signal }));
    }, { once: true });
    return box;
  }

  /** Another address of the same page: change what differs. */
  update(state) {
    const same = state.screen === 'seq' && state.run === this.base.run && state.seq === this.base.seq && state.params.get('rep') === this.base.rep;
    if (same) this.follow(state);
    return same;
  }

  async follow(state) {
    const { info } = this;
    const old = this.view;
    const next = view(state, info.n);
    this.view = next;
    if (!info.n) return;
    put(this.outside, next.asked !== null && next.asked >= info.n ? notice({
      level: 'warn', title: `There is no position ${count(next.asked)}`,
      text: `The sequence has positions 0 to ${count(info.n - 1)}; the nearest one is pinned.`,
    }) : []);
    if (!this.data || this.data.start !== next.start || next.stat.columns.some((name) => !this.data.arrays.includes(name))) {
      const data = await this.load(next.start, next.stat.columns);
      if (this.view !== next) return; // the reader has moved on
      this.data = data;
      put(this.strip, drawStrip(this.data));
    }
    this.drawControls(state);
    this.strip.classList.toggle('hide-masked', next.hideMasked);
    this.panel.classList.toggle('empty', next.pinned === null);
    if (!old || old.preset !== next.preset || old.start !== next.start || old.stat !== next.stat) this.paint();
    else this.minimap.set({ start: next.start, end: next.end, pinned: next.pinned });
    this.mark(old, next);
    if (!old || old.pinned !== next.pinned) this.drawDetail();
    this.drawReadout();
  }

  /** Whether the tapes hold what a statistic needs. */
  has(stat) {
    return stat.columns.every((name) => (this.info.extra || []).includes(name));
  }

  async load(start, columns = []) {
    const cols = columns.length ? [...USUAL, ...columns].join(',') : null;
    const end = Math.min(start + WINDOW, this.info.n);
    return readWindow(await getArrays(this.path('tokens'), { ...scope(current()), start, end, cols }, this.signal));
  }

  paint() {
    if (!this.data) return;
    const { stat, preset } = this.view;
    const scale = stat.presets[preset].value;
    const here = paintStrip(this.data, stat, scale, theme());
    put(this.legend, legend(stat, scale, theme()));
    const whole = stat.name === 'dlp' ? `, ${count(this.info.clipped[preset].count)} in the sequence` : '';
    put(this.clipped, `over the scale: ${count(here)} in this window${whole}`);
    // the map is of |delta| whatever the strip shows
    this.minimap.set({ start: this.view.start, end: this.view.end, pinned: this.view.pinned, scale: stat.signed ? scale : 0.1 });
  }

  drawControls(state) {
    const { stat, preset, start, end, hideMasked } = this.view;
    this.stats.value = stat.name;
    put(this.scales, h('legend', {}, `full scale, ${stat.name === 'dlp' ? 'nat' : stat.unit.split(',')[0]}`), stat.presets.map((p, i) => h('label', {},
      h('input', { type: 'radio', name: 'scale', value: p.text, checked: i === preset || null, on: { change: () => this.setScale(i) } }), ` ${p.text}`)));
    this.maskBox.checked = !hideMasked;
    const to = (win, text, id) => h('a', { href: link(state, { params: { win, at: null } }), id }, text);
    put(this.pager, `positions ${count(start)} to ${count(end - 1)} of ${count(this.info.n)} `,
      start > 0 ? to(start - WINDOW, '[ previous', 'win-previous') : null, ' ',
      end < this.info.n ? to(start + WINDOW, 'next ]', 'win-next') : null);
  }

  mark(old, next) {
    const before = this.strip.querySelector('[aria-selected]');
    if (before) before.removeAttribute('aria-selected');
    const token = next.pinned === null ? null : byId(`t${next.pinned}`);
    if (token) {
      token.setAttribute('aria-selected', 'true');
      this.strip.setAttribute('aria-activedescendant', token.id);
    } else this.strip.removeAttribute('aria-activedescendant');
    const first = !old || old.start !== next.start;
    const place = next.at !== null && byId(`t${next.at}`);
    if (first && place) scrollTo({ top: place.getBoundingClientRect().top + scrollY - this.topEdge() });
    else if (token && (first || old.pinned !== next.pinned)) this.reveal(token, first);
    else if (first && old) this.strip.scrollIntoView({ block: 'start' });
  }

  topEdge() {
    const sticky = getComputedStyle(this.head).position === 'sticky';
    return byId('top').offsetHeight + (sticky ? this.head.offsetHeight : 0) + 8;
  }

  // In a narrow window the panel lies over the foot of the strip.
  bottomEdge() {
    const foot = innerHeight - byId('status').offsetHeight - 8;
    const below = this.panel.getBoundingClientRect().left <= this.strip.getBoundingClientRect().left;
    return below ? foot - this.panel.offsetHeight : foot;
  }

  reveal(token, centre) {
    const box = token.getBoundingClientRect();
    const [top, low] = [this.topEdge(), this.bottomEdge()];
    if (!centre && box.top > top && box.bottom < low) return;
    scrollTo({ top: scrollY + (box.top + box.bottom) / 2 - (top + low) / 2 });
  }

  // The address keeps the place: nothing while the pinned token is in view, else the first token.
  onScroll() {
    clearTimeout(this.settle);
    this.settle = setTimeout(() => {
      if (this.signal.aborted || !this.data) return;
      const token = this.view.pinned === null ? null : byId(`t${this.view.pinned}`);
      const box = token && token.getBoundingClientRect();
      const seen = box && box.bottom > 0 && box.top < innerHeight;
      const first = seen ? null : this.firstInView();
      replace(link(current(), { params: { at: first && first > this.view.start ? first : null } }), { quiet: true });
    }, 150);
  }

  firstInView() {
    const edge = this.topEdge();
    let [low, high] = [this.data.start, this.data.end - 1];
    while (low < high) { // tokens are in reading order
      const middle = (low + high) >> 1;
      const box = byId(`t${middle}`).getBoundingClientRect();
      if (box.height && box.bottom > edge) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  async drawDetail() {
    const { pinned } = this.view;
    this.detail.abort();
    this.detail = new AbortController();
    if (pinned === null) {
      put(this.panel, h('p', { class: 'hint' }, 'Click a token, or press Enter, to pin it here. n goes to the next one over the scale.'));
      return;
    }
    this.panel.setAttribute('aria-busy', 'true');
    const state = current();
    const { signal } = this.detail;
    const data = await getJson(this.path('tokens', String(pinned)), scope(state), signal);
    if (signal.aborted) return;
    drawPanel(this.panel, data, { state, info: this.info });
    this.panel.removeAttribute('aria-busy');
    if (this.data && pinned >= this.data.start && pinned < this.data.end) whisper(`token ${pinned}, ${describe(this.data, pinned, this.view.stat)}`);
  }

  hover(token) {
    this.hovered = token ? tokenPosition(token) : null;
    this.drawReadout();
  }

  drawReadout() {
    const position = this.hovered ?? this.view.pinned;
    const here = position !== null && this.data && position >= this.data.start && position < this.data.end;
    put(this.readout, here ? [h('strong', {}, count(position)), ' ', describe(this.data, position, this.view.stat)] : '\u00a0');
  }

  pin(position, { step = false } = {}) {
    const params = { tok: Math.min(Math.max(position, 0), this.info.n - 1), win: null, at: null };
    const hash = link(current(), { params });
    if (step) replace(hash); // walking leaves no trail
    else go(hash);
  }

  setScale(index) {
    const preset = this.view.stat.presets[index];
    if (preset) go(link(current(), { params: { scale: preset.text } }));
    else say(index < 0 ? 'this is the finest scale' : 'this is the coarsest scale');
  }

  setStat(name) {
    const stat = statOf(name);
    if (this.has(stat)) go(link(current(), { params: { stat: stat === STATS[0] ? null : name, scale: null } }));
    else say(`${stat.text}: ${NOT_STORED}`);
  }

  onFind(event) {
    if (event.key === 'Escape') this.strip.focus();
    if (event.key !== 'Enter') return;
    event.preventDefault();
    this.search(this.find.value);
  }

  async search(wanted) {
    if (!wanted) return;
    const from = this.view.pinned === null ? this.view.start : this.view.pinned + 1;
    const found = await findText(wanted, from, this.info.n, async (start) => (start === this.data.start ? this.data : this.load(start)));
    if (found === null) say(`\u201c${wanted}\u201d is not in this sequence`);
    else {
      if (found < from) say('went on from the start');
      this.pin(found);
    }
  }

  toggleMask() {
    go(link(current(), { params: { mask: this.view.hideMasked ? null : 'hide' } }));
  }

  walk(step) {
    if (this.view.pinned === null) this.pin(this.firstInView(), { step: true });
    else this.pin(this.view.pinned + step, { step: true });
  }

  async seek(back) {
    const { stat, preset, pinned } = this.view;
    const from = pinned ?? (back ? this.info.n : -1);
    const threshold = stat.presets[preset].value;
    if (stat.name !== 'dlp') {
      this.seekHere(stat, threshold, from, back);
      return;
    }
    const found = await getJson(this.path('over'), { ...scope(current()), threshold, from, back }, this.signal);
    if (found.position === null) say(found.of ? `no ${back ? 'earlier' : 'later'} token over ${threshold} nat` : `no token over ${threshold} nat`);
    else {
      say(`${found.rank} of ${found.of} over ${threshold} nat`);
      this.pin(found.position);
    }
  }

  seekHere(stat, threshold, from, back) {
    const { start, end } = this.data;
    for (let at = Math.min(Math.max(from, start - 1), end) + (back ? -1 : 1); at >= start && at < end; at += back ? -1 : 1) {
      const value = stat.value(this.data, at - start);
      if (value !== null && Math.abs(value) > threshold) {
        this.pin(at);
        return;
      }
    }
    say(`no ${back ? 'earlier' : 'later'} token over ${threshold} in this window`);
  }

  window(step) {
    const start = this.view.start + step * WINDOW;
    if (start >= 0 && start < this.info.n) go(link(current(), { params: { win: start, at: null } }));
    else say(step < 0 ? 'this is the first window' : 'this is the last window');
  }

  neighbour(name) {
    const seq = this.info.neighbours[name];
    if (seq) go(link(current(), { seq }));
    else say(`no ${name} sequence`);
  }

  makeKeys() {
    if (!this.info.n) return { J: () => this.neighbour('next'), K: () => this.neighbour('previous') };
    const keys = {
      j: () => this.walk(1), ArrowRight: () => this.walk(1),
      k: () => this.walk(-1), ArrowLeft: () => this.walk(-1),
      n: () => this.seek(false), N: () => this.seek(true), p: () => this.seek(true),
      '[': () => this.window(-1), ']': () => this.window(1),
      'g g': () => this.pin(0), G: () => this.pin(this.info.n - 1),
      J: () => this.neighbour('next'), K: () => this.neighbour('previous'),
      Enter: () => this.pin(this.hovered ?? this.firstInView()),
      Escape: () => go(link(current(), { params: { tok: null } })),
      m: () => this.toggleMask(),
      f: () => this.find.focus(),
      '-': () => this.setScale(this.view.preset - 1), '=': () => this.setScale(this.view.preset + 1),
      go: (position) => this.pin(position),
    };
    STATS.forEach((stat, i) => { keys[String(i + 1)] = () => this.setStat(stat.name); });
    return keys;
  }

  grown(reopen) {
    if (byId('grown')) return;
    const item = notice({
      level: 'info', title: 'The recording has grown', text: 'This page shows what was there when it was opened.',
      extra: h('button', { type: 'button', on: { click: reopen } }, 'Show what is new'),
    });
    item.id = 'grown';
    this.outside.before(item);
  }
}

function tokenPosition(token) {
  return Number(token.id.slice(1));
}

function neighbours(state, info) {
  const { previous, next, rank, of } = info.neighbours;
  const to = (seq, text, id) => (seq ? h('a', { href: link(state, { seq }), id }, text) : h('span', { class: 'hint' }, text));
  return h('span', { class: 'neighbours' }, to(previous, 'previous', 'seq-previous'), ' ',
    rank ? `${count(rank)} of ${count(of)}` : 'not in the filtered list', ' ', to(next, 'next', 'seq-next'));
}

function facts(state, info) {
  const { seq } = info;
  const at = (tok) => link(state, { params: { tok, win: null, at: null } });
  const weights = seq.weight_version_min !== seq.weight_version && seq.weight_version_min !== null
    ? `${seq.weight_version_min} to ${seq.weight_version}` : seq.weight_version ?? NONE;
  const items = [
    ['group', seq.group ?? NONE], ['finish', seq.finish ?? NONE],
    ['prompt', count(info.prompt_len)], ['response', count(info.n - info.prompt_len)],
    ['weight version', weights],
    ...(info.run.report ? [
      ['compared', `${count(info.counts.compared)}, ${count(info.equal)} bitwise equal`],
      ['masked', count(info.counts.masked)],
      ['missing A / B', `${count(info.counts.missing_a)} / ${count(info.counts.missing_b)}`],
      ['not finite', count(info.counts.non_finite)],
      ['mean |\u0394|', short(seq.mean_abs)],
      ['max |\u0394|', seq.max_at === null || seq.max_at === undefined ? short(seq.max_abs)
        : [h('a', { href: at(seq.max_at), id: 'worst' }, short(seq.max_abs)), ` at ${count(seq.max_at)}`]],
      ['first > 0.1', seq.first_over === null || seq.first_over === undefined ? NONE : h('a', { href: at(seq.first_over) }, count(seq.first_over))],
      ['routing', `${percent(seq.disagree_share)} of decisions, ${percent(seq.tokens_any_share)} of tokens`],
    ] : []),
  ];
  return h('dl', { class: 'seqfacts' }, items.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
}
