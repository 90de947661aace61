// Two replays of one tape side by side: the same tokens, coloured by what each replay made of them.

import { getArrays, getJson, runPath } from './api.js';
import { css, paint } from './colour.js';
import { choice } from './choice.js';
import { byId, h, num, put } from './dom.js';
import { COMMAND, leftOut } from './folder.js';
import { NONE, count, plural, short, signed } from './format.js';
import { besides } from './held.js';
import { notice } from './notices.js';
import { current, go, integer, link, replace } from './route.js';
import { scroller } from './scroll.js';
import { say, whisper } from './shell.js';
import { NAMES, VIEWS, readSides } from './sides_data.js';
import { STATS, presetOf } from './stats.js';
import { STATE_TEXT, WINDOW, drawStrip, paintStrip, readWindow } from './strip.js';
import { onTheme, theme } from './theme.js';

const DELTA = STATS[0];
// here B is one of two
const STATE_WORDS = { ...STATE_TEXT, missing_a: 'no logprob in the tape', missing_b: 'no logprob in the replay' };
const SHOWS = [['both', 'both'], ...VIEWS.map((view) => [view, NAMES[view]])];

export async function open({ state, main, runs, signal }) {
  const run = runs.runs.find((r) => r.id === state.run);
  const reports = run ? run.reports : [];
  if (reports.length < 2) return lonely(state, main, reports, signal);
  const chosen = choose(state, reports);
  if (chosen) {
    replace(link(state, { params: chosen }), { quiet: true });
    state = current();
  }
  const params = { a: state.params.get('a'), b: state.params.get('b') };
  if (params.a === params.b) {
    put(main, h('h1', { class: 'mono' }, state.seq), pickers(state, reports, params),
      notice({ level: 'info', title: 'R1 and R2 are the same report', text: 'Choose another one in either list.' }));
    refocus();
    return {};
  }
  const path = (...rest) => runPath(state, 'seqs', state.seq, ...rest);
  const info = await getJson(path('sides', 'info'), params, signal);
  if (signal.aborted) return {};
  const page = new Page({ state, info, reports, params, path, signal });
  page.build(main);
  page.ready = page.follow(state).then(refocus);
  return page;
}

/** Reports for the places that the address leaves open. */
function choose(state, reports) {
  const ids = reports.map((r) => r.id).filter((id) => besides(state.run, id));
  const [a, b] = [state.params.get('a'), state.params.get('b')];
  if (a && b) return null;
  const first = a || ids.find((id) => id !== b) || ids[0];
  return { a: first, b: b || ids.findLast((id) => id !== first) || first };
}

async function lonely(state, main, reports, signal) {
  const causes = await getJson(runPath(state, 'causes'), {}, signal);
  const row = causes.rows.find((r) => r.commands.length);
  put(main, h('h1', { class: 'mono' }, state.seq), notice({
    level: 'info', title: reports.length ? 'Only one report of this tape is open' : 'No report of this tape is open',
    text: `Two replays are compared here. ${row ? `This makes ${reports.length ? 'a second one' : 'some'}, and tests ${row.title.toLowerCase()}:` : 'Open the folder that holds the others.'}`,
    commands: row ? row.commands : [],
    extra: h('p', {}, h('a', { href: link(state, { screen: 'causes', seq: null }) }, 'What else could be tested')),
  }));
  return {};
}

class Page {
  constructor({ state, info, reports, params, path, signal }) {
    Object.assign(this, { info, reports, params, path, signal });
    this.base = { run: state.run, seq: state.seq };
    this.view = null;
    this.data = null;
    this.keys = this.makeKeys();
    this.unthemed = onTheme(() => this.paint());
  }

  close() {
    this.unthemed();
  }

  build(main) {
    const { info } = this;
    const state = current();
    this.strips = Object.fromEntries(VIEWS.map((view) => {
      const strip = h('div', { class: 'strip', id: `strip-${view}`, role: 'listbox', tabindex: 0, 'aria-label': `Tokens, ${this.words(view)}` });
      strip.addEventListener('click', (event) => {
        const token = event.target.closest('.t');
        if (token && !String(getSelection())) this.pin(position(token));
      });
      strip.addEventListener('mouseover', (event) => this.readout(event.target.closest('.t')));
      strip.addEventListener('mouseleave', () => this.readout(null));
      strip.addEventListener('scroll', () => this.sync(strip), { passive: true });
      return [view, strip];
    }));
    this.columns = Object.fromEntries(VIEWS.map((view) => [view, h('div', { class: 'side' }, h('h2', {}, this.title(view)), this.strips[view])]));
    this.line = h('p', { class: 'readout', id: 'readout' });
    this.controls = h('div', { class: 'controls' });
    put(main,
      h('h1', { class: 'mono' }, info.seq, h('span', { class: 'neighbours' }, h('a', { href: link(state, { screen: 'seq', params: { rep: this.params.a } }) }, 'tokens of R1'), ' ', h('a', { href: link(state, { screen: 'seq', params: { rep: this.params.b } }) }, 'tokens of R2'))),
      pickers(state, this.reports, this.params),
      ['a', 'b'].filter((s) => !info[s].here).map((s) => notice({
        level: 'warn', title: `${NAMES[s]} does not have this sequence`,
        text: `Report ${info[s].name} did not compare it: the replay left it out, or its tokens did not match. The other side is shown alone.`,
        extra: h('p', {}, h('a', { href: link(state, { screen: 'overview', seq: null, params: { rep: info[s].rep } }) }, 'What that report did not compare')),
      })),
      h('div', { class: 'twocards' }, settings(info), counts(info, state)),
      unmatched(info, state),
      info.n ? [h('div', { class: 'striphead' }, this.controls, this.line), h('div', { class: 'pair' }, VIEWS.map((v) => this.columns[v]))]
        : notice({ level: 'info', title: 'An empty sequence', text: 'It was opened and no token was recorded.' }));
  }

  title(view) {
    return [`${NAMES[view]} `, h('span', { class: 'hint' }, this.words(view).slice(NAMES[view].length + 2))];
  }

  /** Its name and what is under it. */
  words(view) {
    return `${NAMES[view]}: ${view === 'diff' ? 'logprob of R1 minus logprob of R2' : this.info[view].name}`;
  }

  update(state) {
    const same = state.screen === 'sides' && state.run === this.base.run && state.seq === this.base.seq
      && state.params.get('a') === this.params.a && state.params.get('b') === this.params.b;
    if (same) this.follow(state);
    return same;
  }

  async follow(state) {
    const { n } = this.info;
    if (!n) return;
    const tok = integer(state.params.get('tok'));
    const win = integer(state.params.get('win'));
    const pinned = tok === null ? null : Math.min(tok, n - 1);
    const start = Math.floor(Math.min(win ?? pinned ?? 0, n - 1) / WINDOW) * WINDOW;
    const show = SHOWS.some(([s]) => s === state.params.get('show')) ? state.params.get('show') : 'both';
    const old = this.view;
    const next = { pinned, start, end: Math.min(start + WINDOW, n), show, preset: presetOf(DELTA, state.params.get('scale')) };
    this.view = next;
    if (!this.data || old.start !== start) {
      const range = { start, end: next.end };
      const one = this.info.a.here ? this.params.a : this.params.b;
      const [tokens, sides] = await Promise.all([
        getArrays(this.path('tokens'), { ...range, rep: one }, this.signal),
        getArrays(this.path('sides'), { ...this.params, ...range }, this.signal),
      ]);
      if (this.view !== next) return; // the reader has moved on
      this.data = readSides(readWindow(tokens), sides);
      this.drawn = new Set();
    }
    this.draw(state);
  }

  shown() {
    return this.view.show === 'both' ? ['a', 'b'] : [this.view.show];
  }

  draw(state) {
    const shown = this.shown();
    for (const view of VIEWS) {
      this.columns[view].hidden = !shown.includes(view);
      if (!shown.includes(view) || this.drawn.has(view)) continue;
      put(this.strips[view], drawStrip(this.data[view], prefix(view)));
      this.drawn.add(view);
    }
    this.drawControls(state);
    this.paint();
    this.mark();
    this.readout(null);
  }

  paint() {
    if (!this.data) return;
    const { value } = DELTA.presets[this.view.preset];
    // strips that are hidden are coloured too: a blink must only change what is visible
    for (const view of this.drawn) {
      const key = `${value} ${theme()}`;
      if (this.strips[view].dataset.painted !== `${key} ${this.view.start}`) {
        paintStrip(this.data[view], DELTA, value, theme(), prefix(view));
        this.strips[view].dataset.painted = `${key} ${this.view.start}`;
      }
    }
  }

  mark() {
    const { pinned } = this.view;
    for (const view of this.shown()) {
      const strip = this.strips[view];
      strip.querySelectorAll('[aria-selected]').forEach((t) => t.removeAttribute('aria-selected'));
      const token = pinned === null ? null : byId(`${prefix(view)}${pinned}`);
      if (!token) {
        strip.removeAttribute('aria-activedescendant');
        continue;
      }
      token.setAttribute('aria-selected', 'true');
      strip.setAttribute('aria-activedescendant', token.id);
      const box = token.getBoundingClientRect();
      const frame = strip.getBoundingClientRect();
      if (box.top < frame.top + 8 || box.bottom > frame.bottom - 8) strip.scrollTop += (box.top + box.bottom) / 2 - (frame.top + frame.bottom) / 2;
    }
  }

  sync(from) {
    if (this.columns.a.contains(from) && from.parentNode.hidden) return;
    this.top = from.scrollTop;
    for (const view of this.shown()) if (this.strips[view] !== from && Math.abs(this.strips[view].scrollTop - this.top) > 1) this.strips[view].scrollTop = this.top;
  }

  drawControls(state) {
    const { start, end, preset, show } = this.view;
    const to = (changes, text, id, props = {}) => h('a', { href: link(state, { params: changes }), id, ...props }, text);
    const radios = (name, legend, rows, value, pick) => h('fieldset', { class: 'scales' }, h('legend', {}, legend), rows.map(([key, text]) => h('label', {},
      h('input', { type: 'radio', name, value: key, checked: key === value || null, on: { change: () => pick(key) } }), ` ${text}`)));
    const scale = DELTA.presets[preset];
    const swatch = (v, text) => {
      const look = paint(v, scale.value, theme());
      return h('span', { class: 't compared swatch', style: { 'background-color': css(look.ground), color: css(look.ink), 'border-bottom-width': `${look.thickness}px` } }, text);
    };
    const focus = document.activeElement && document.activeElement.name;
    put(this.controls,
      radios('show', 'show', SHOWS, show, (key) => go(link(current(), { params: { show: key === 'both' ? null : key } }))),
      radios('scale', 'full scale, nat', DELTA.presets.map((p) => [p.text, p.text]), scale.text, (key) => go(link(current(), { params: { scale: key } }))),
      h('span', { class: 'hint' }, show === 'diff' ? [swatch(-scale.value, 'R2 higher'), ' ', swatch(scale.value, 'R1 higher')] : [swatch(-scale.value, 'tape higher'), ' ', swatch(scale.value, 'replay higher')]),
      this.info.first === null ? h('span', { class: 'hint' }, 'no difference') : to({ tok: this.info.first, win: null }, `first difference: ${count(this.info.first)}`, 'first-difference', { class: 'button' }),
      h('span', { class: 'pager' }, `positions ${count(start)} to ${count(end - 1)} of ${count(this.info.n)} `,
        start > 0 ? to({ win: start - WINDOW }, '[ previous', 'win-previous') : null, ' ', end < this.info.n ? to({ win: start + WINDOW }, 'next ]', 'win-next') : null));
    if (focus) (this.controls.querySelector(`input[name="${CSS.escape(focus)}"]:checked`) || this.controls).focus();
  }

  readout(token) {
    const at = token ? position(token) : this.view.pinned;
    const there = at !== null && this.data && at >= this.view.start && at < this.view.end;
    const text = there ? describe(this.data, at) : '\u00a0';
    put(this.line, there ? [h('strong', {}, count(at)), ' '] : null, text);
    if (there && !token) whisper(`token ${at}, ${text}`);
  }

  pin(at, { step = false } = {}) {
    const hash = link(current(), { params: { tok: Math.min(Math.max(at, 0), this.info.n - 1), win: null } });
    if (step) replace(hash);
    else go(hash);
  }

  walk(step) {
    this.pin(this.view.pinned === null ? this.view.start : this.view.pinned + step, { step: true });
  }

  async seek(back) {
    const from = this.view.pinned ?? (back ? this.info.n : -1);
    const show = this.view.show === 'both' ? 'diff' : this.view.show;
    const threshold = DELTA.presets[this.view.preset].value;
    const found = await getJson(this.path('sides', 'over'), { ...this.params, show, threshold, from, back }, this.signal);
    const what = show === 'diff' ? NAMES.diff : `\u0394 of ${NAMES[show]}`;
    if (found.position === null) say(`no ${back ? 'earlier' : 'later'} token whose ${what} is over ${threshold} nat`);
    else {
      say(`${found.rank} of ${found.of}: ${what} over ${threshold} nat`);
      this.pin(found.position);
    }
  }

  window(step) {
    const start = this.view.start + step * WINDOW;
    if (start >= 0 && start < this.info.n) go(link(current(), { params: { win: start, tok: null } }));
    else say(step < 0 ? 'this is the first window' : 'this is the last window');
  }

  blink() {
    const show = this.view.show === 'a' ? 'b' : 'a';
    const { top } = this;
    replace(link(current(), { params: { show } }));
    if (top !== undefined) this.strips[show].scrollTop = top;
    say(`showing ${this.words(show)}`);
  }

  scale(step) {
    const next = DELTA.presets[this.view.preset + step];
    if (next) go(link(current(), { params: { scale: next.text } }));
  }

  makeKeys() {
    if (!this.info.n) return {};
    const first = () => (this.info.first === null ? say('no difference') : this.pin(this.info.first));
    return {
      j: () => this.walk(1), ArrowRight: () => this.walk(1), k: () => this.walk(-1), ArrowLeft: () => this.walk(-1),
      n: () => this.seek(false), N: () => this.seek(true), p: () => this.seek(true),
      x: () => this.blink(), d: first, '-': () => this.scale(-1), '=': () => this.scale(1),
      '[': () => this.window(-1), ']': () => this.window(1),
      'g g': () => this.pin(0), G: () => this.pin(this.info.n - 1),
      Escape: () => go(link(current(), { params: { tok: null } })),
    };
  }
}

// The page is made anew for another pair: what the focus was to go to is looked for then.
let focus = null;

function refocus() {
  const element = focus && [focus, 'strip-a', 'strip-b', 'strip-diff', 'pick-a'].map(byId).find((e) => e && e.offsetParent);
  focus = null;
  if (element) element.focus({ preventScroll: true });
}

function pickers(state, reports, params) {
  const pick = (side) => {
    const id = `pick-${side}`;
    const changed = (rep) => {
      focus = document.activeElement.id || 'strip-a';
      go(link(current(), { params: { [side]: rep } }));
    };
    const options = reports.map((r) => (besides(state.run, r.id) ? [r.id, r.name] : [r.id, `${r.name} (not in this folder)`, { disabled: true }]));
    return h('label', {}, `${NAMES[side]} `, choice(id, options, params[side], changed, () => (byId('strip-a') || document.activeElement).focus({ preventScroll: true })));
  };
  const few = reports.filter((r) => besides(state.run, r.id)).length;
  return [h('p', { class: 'pickers' }, pick('a'), ' ', pick('b'), ' ',
    h('a', { class: 'button', href: link(state, { params: { a: params.b, b: params.a } }) }, 'Swap')),
  COMMAND && few < reports.length ? leftOut(`Of ${count(reports.length)} reports ${count(few)} can be put side by side in this folder`, 'It holds every two of the newest ones.') : null];
}

const prefix = (view) => `t${view}-`;

function position(token) {
  return Number(token.id.slice(token.id.indexOf('-') + 1));
}

function describe(data, at) {
  const i = at - data.a.start;
  const { text, bare } = data.a.text(i);
  const side = (view) => {
    const value = data[view].delta(i);
    if (value !== null) return `\u0394 ${signed(value)} nat`;
    return STATE_WORDS[data[view].state(i)] || NONE;
  };
  const difference = data.diff.delta(i);
  return [bare ? `token id ${text}` : `\u201c${text}\u201d`, `R1: ${side('a')}`, `R2: ${side('b')}`,
    difference === null ? null : data.diff.has(i, 'equal') ? 'R1 and R2 have the same bits' : `R1 \u2212 R2 ${signed(difference)} nat`].filter(Boolean).join(', ');
}

function settings(info) {
  const { rows, equal } = info.settings;
  return h('section', { class: 'card' }, h('h2', {}, 'What differs between the replays'),
    rows.length ? scroller('What differs', h('table', { class: 'data sides' },
      h('thead', {}, h('tr', {}, ['', `R1 ${info.a.name}`, `R2 ${info.b.name}`].map((t) => h('th', { scope: 'col' }, t)))),
      h('tbody', {}, rows.map((r) => h('tr', {}, h('th', { scope: 'row' }, r.name), h('td', { class: 'mono' }, r.a ?? 'not said'), h('td', { class: 'mono' }, r.b ?? 'not said'))))))
      : h('p', {}, 'No recorded condition differs.'),
    h('p', { class: 'hint' }, `${plural(equal, 'condition')} equal and not listed.`));
}

function counts(info, state) {
  const c = info.counts;
  const at = (tok, text) => (tok === null ? text : [h('a', { href: link(state, { params: { tok, win: null } }) }, text), ` at ${count(tok)}`]);
  return h('section', { class: 'card' }, h('h2', {}, 'This sequence'), h('table', { class: 'facts' }, h('tbody', {}, [
    ['compared in both', count(c.both)], ['same bits in both', count(c.equal)],
    ['compared in R1 only / R2 only', `${count(c.only_a)} / ${count(c.only_b)}`],
    ['mean |\u0394| of R1 / R2, nat', `${short(c.mean_a)} / ${short(c.mean_b)}`],
    ['mean |R1 \u2212 R2|, nat', short(c.mean_difference)], ['max |R1 \u2212 R2|, nat', at(c.max_at, short(c.max))],
  ].map(([name, value]) => h('tr', {}, h('th', { scope: 'row' }, name), num(value))))));
}

function unmatched(info, state) {
  if (!info.unmatched.length) return null;
  return notice({
    level: 'warn', title: 'Without a match', text: '',
    extra: h('ul', {}, info.unmatched.map((u) => h('li', {}, u.only ? `${u.what} in ${NAMES[u.only]} only: ` : `${u.what} have another state: `, u.names.join(', '),
      u.tok === undefined ? null : [' ', h('a', { href: link(state, { params: { tok: u.tok, win: null } }) }, `the first at ${count(u.tok)}`)]))),
  });
}
