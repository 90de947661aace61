// Schedule of a run: lanes of steps on a canvas, one step whole, the choices of kernels.

import { getJson, runPath, scope } from './api.js';
import { h, num, put } from './dom.js';
import { NONE, count, plural } from './format.js';
import { COMMAND, leftOut } from './folder.js';
import { everyStep } from './held.js';
import { LEFT, MARK_LETTERS, Picture, TOP } from './lanepaint.js';
import { MARKS, clamp, describe, describeBin, entry, hit, inside, ns, pan, spanAt, toAbsolute, toOffset, zoom } from './lanes.js';
import { notice } from './notices.js';
import { current, go, integer, link, replace } from './route.js';
import { edged, scroller } from './scroll.js';
import { say, whisper } from './shell.js';
import { drawStep, head } from './steppanel.js';
import { tacticTable } from './tactics.js';
import { onTheme } from './theme.js';

const MOST = 5000; // spans at a time

export async function open({ state, main, signal }) {
  const path = (...rest) => runPath(state, ...rest);
  const whole = await first(path('timeline'), state, signal);
  if (signal.aborted) return {};
  const page = new Page(state, whole, path, signal);
  if (!whole.steps) {
    put(main, h('h1', {}, 'Timeline'), noSteps(whole), page.tactics);
    page.drawTactics();
    return { update: (next) => page.same(next), close: () => page.close() };
  }
  page.build(main);
  page.ready = page.follow(state);
  return page;
}

/** The window of the address at once; all of it where that cannot be. */
async function first(path, state, signal) {
  const asked = Object.fromEntries(['t0', 't1'].map((n) => [n, state.params.get(n)]).filter(([, v]) => /^\d{1,19}$/.test(v || '')));
  const ask = (window) => getJson(path, { ...scope(state), ...window, max_spans: MOST }, signal);
  try {
    return await ask(asked);
  } catch (error) {
    if (!error.problem || error.status !== 400) throw error;
    return ask({});
  }
}

function noSteps(data) {
  return notice({
    level: 'info', title: 'No steps recorded',
    text: data.forwards
      ? 'The tape says what each sequence went through (forwards), not what each step was: it was imported, or written by an older rolltape. The token panel still shows what ran together. Record the job anew to see the schedule.'
      : 'The tape has no schedule: an import of logprobs, or a recording in which no step ran yet. `rolltape record` writes one with every engine.',
    commands: ['rolltape record -o TAPE -- python rollout.py'],
  });
}

class Page extends Picture {
  constructor(state, whole, path, signal) {
    super(whole);
    this.base = { run: state.run, rep: state.params.get('rep') };
    this.path = path;
    this.signal = signal;
    this.least = whole.axis === 'time' ? 1000 : 1;
    this.detail = new AbortController();
    this.loading = new AbortController();
    this.tactics = h('section', { class: 'card' });
    this.keys = whole.steps ? this.makeKeys() : {};
    this.unthemed = onTheme(() => {
      this.draw();
      this.swatches.forEach((paint) => paint());
    });
  }

  close() {
    this.loading.abort();
    this.detail.abort();
    this.unthemed();
    if (this.observer) this.observer.disconnect();
  }

  same(state) {
    return state.screen === 'timeline' && state.run === this.base.run && state.params.get('rep') === this.base.rep;
  }

  update(state) {
    if (!this.same(state)) return false;
    this.follow(state);
    return true;
  }

  build(main) {
    const { whole } = this;
    this.canvas = h('canvas', { class: 'lanes', tabindex: 0, role: 'application', 'aria-roledescription': 'timeline',
      'aria-label': 'Steps by lane. Arrows move between steps and lanes, Enter opens a step, W and S zoom, A and D pan; the table below has the same' });
    this.map = h('canvas', { class: 'tlmap', 'aria-hidden': 'true' });
    this.readout = h('p', { class: 'readout', id: 'readout' });
    this.note = h('p', { class: 'hint', id: 'window-note' });
    this.explain = h('p', { class: 'hint', id: 'explain' });
    this.panel = h('aside', { class: 'panel', id: 'panel', 'aria-label': 'Step' });
    this.table = h('details', { id: 'as-table', on: { toggle: () => this.drawTable() } }, h('summary', {}, 'As a table'));
    this.eventList = h('details', { id: 'events' });
    this.outside = h('div', {});
    this.files = h('span', { class: 'pager' });
    const button = (text, title, act, id) => h('button', { type: 'button', title, id, on: { click: act } }, text);
    put(main,
      h('h1', {}, 'Timeline ', h('span', { class: 'hint' }, `${plural(whole.steps, 'step')} of ${plural(whole.engines.length, 'engine')}`)),
      whole.axis === 'step' ? notice({ level: 'warn', title: 'No times: the axis is the number of the step',
        text: `${plural(whole.untimed, 'step')} of ${count(whole.steps)} ${whole.untimed === 1 ? 'has' : 'have'} no time, so durations, events and weight versions have no place here. Tapes of this version of rolltape record the time of each step.` }) : null,
      (whole.problems || []).map((p) => notice({ level: 'error', title: 'Damaged shard', text: `${p}. Everything else is served.` })),
      everyStep(current().run) ? null : leftOut('Not all of the schedule is in this folder', `Whole are the steps that drew a token of its sequences. ${whole.bins ? 'Elsewhere steps are put together in bins, however close one comes. ' : ''}Perfetto and CSV files are not written.`),
      this.outside,
      h('div', { class: 'work tl' },
        h('div', { class: 'left' },
          this.map,
          h('div', { class: 'controls' },
            button('\u2212', 'zoom out (S)', () => this.zoom(2), 'zoom-out'), button('+', 'zoom in (W)', () => this.zoom(0.5), 'zoom-in'),
            button('\u2190', 'earlier (A)', () => this.pan(-0.25)), button('\u2192', 'later (D)', () => this.pan(0.25)),
            button('Fit', 'fit the step, then the whole (F)', () => this.fit(), 'fit'),
            this.note, this.files),
          this.canvas, this.readout, this.legend(), this.table, this.eventList),
        edged(this.panel, 'panelbox')),
      this.tactics);
    this.listen();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    this.drawTactics();
  }

  // ---- address -> page --------------------------------------------------------------------

  async follow(state) {
    const { whole } = this;
    const { origin, extent } = whole;
    const asked = [toOffset(state.params.get('t0'), origin), toOffset(state.params.get('t1'), origin)];
    const outside = asked.some((t) => t !== null && (t < 0 || t > extent));
    put(this.outside, outside ? notice({ level: 'warn', title: 'The window lies outside the recording', text: 'The nearest part that was recorded is shown.' }) : []);
    this.view = clamp(asked[0] ?? 0, asked[1] ?? extent, extent, this.least);
    this.drawPanel(state);
    if (!this.covers()) {
      await this.load();
      return;
    }
    this.seat(state);
    this.draw();
    this.drawTable();
    this.drawEvents();
  }

  /** Whether the spans at hand are enough for the view. */
  covers() {
    const [a, b] = this.data.window;
    const [t0, t1] = this.view;
    if (a > Math.ceil(t0) || b < Math.floor(t1)) return false;
    if (this.data.spans === null) return (t1 - t0) * 1.5 > b - a;
    // the kinds of rows were left out for the whole, and are within reach for the part
    return this.data.spans.flags !== null || this.inView().reduce((n, i) => n + (this.data.spans.rows[i] || 1), 0) * 2.2 > this.data.flags_limit;
  }

  /** Indices of the spans that reach into the view. */
  inView() {
    const { spans } = this.data;
    return spans ? [...spans.t.keys()].filter((i) => inside(spans, i, this.view)) : [];
  }

  async load() {
    clearTimeout(this.settle);
    this.loading.abort();
    this.loading = new AbortController();
    const { signal } = this.loading;
    // a margin on both sides: panning a little asks for nothing
    const [t0, t1] = this.view;
    const wide = [t0 - (t1 - t0) / 2, t1 + (t1 - t0) / 2];
    const [a, b] = clamp(...wide, this.whole.extent, this.least);
    const ask = ([from, to]) => getJson(this.path('timeline'), { ...scope(current()), t0: toAbsolute(from, this.whole.origin), t1: toAbsolute(Math.ceil(to), this.whole.origin), max_spans: MOST }, signal);
    try {
      let data = await ask([Math.floor(a), b]);
      if (data.spans === null) data = await ask([Math.floor(t0), t1]);
      this.data = data;
    } catch (error) {
      if (error.name !== 'AbortError') throw error;
      return;
    }
    if (this.signal.aborted) return;
    this.seat(current());
    this.draw();
    this.drawTable();
    this.drawEvents();
  }

  /** Puts the cursor on the step of the address, if it is among what was loaded. */
  seat(state) {
    const { spans } = this.data;
    const step = integer(state.params.get('step'));
    const engine = engineOf(state.params.get('lane'), this.data);
    const found = !spans || step === null ? -1 : spans.step.findIndex((s, i) => s === step && this.laneEngine(i) === engine);
    this.at = found < 0 ? null : { span: found };
  }

  laneEngine(i) {
    return this.data.lanes[this.data.spans.lane[i]].engine;
  }

  // ---- what the reader does ---------------------------------------------------------------

  show([t0, t1], { push = false } = {}) {
    const { extent, origin } = this.whole;
    const all = t0 <= 0 && t1 >= extent;
    const params = { t0: all ? null : toAbsolute(t0, origin), t1: all ? null : toAbsolute(t1, origin) };
    const hash = link(current(), { params });
    if (push) go(hash);
    else replace(hash, { quiet: true });
    this.view = [t0, t1];
    this.draw();
    clearTimeout(this.settle);
    this.settle = setTimeout(() => {
      if (this.signal.aborted) return;
      if (this.covers()) this.drawTable();
      else this.load();
    }, 60);
  }

  zoom(factor, at = null) {
    const cursor = this.at && this.data.spans ? this.data.spans.t[this.at.span] : null;
    const [t0, t1] = this.view;
    const middle = at ?? (cursor !== null && cursor >= t0 && cursor <= t1 ? cursor : (t0 + t1) / 2);
    this.show(zoom(this.view, factor, middle, this.whole.extent, this.least));
  }

  pan(share) {
    this.show(pan(this.view, share, this.whole.extent));
  }

  fit() {
    const chosen = this.chosen();
    const { extent } = this.whole;
    if (chosen) {
      const width = Math.max((chosen.duration || 0) * 3, this.least * 10);
      const middle = chosen.t + (chosen.duration || 0) / 2;
      const next = clamp(middle - width / 2, middle + width / 2, extent, this.least);
      const there = Math.abs(next[0] - this.view[0]) < 2 && Math.abs(next[1] - this.view[1]) < 2;
      this.show(there ? [0, extent] : next, { push: true });
    } else this.show([0, extent], { push: true });
  }

  chosen() {
    return this.at && this.at.span !== undefined && this.data.spans ? spanAt(this.data, this.at.span) : null;
  }

  select(i, { step = false } = {}) {
    const span = spanAt(this.data, i);
    this.at = { span: i };
    const [t0, t1] = this.view;
    const end = span.t + (span.duration || 0);
    const least = 0.2 * Math.min(end - span.t, t1 - t0); // so much of it in view is enough to see it
    if (!inside(this.data.spans, i, this.view) || Math.min(end, t1) - Math.max(span.t, t0) < least) {
      const width = Math.max(t1 - t0, (span.duration || 0) * 1.2);
      this.view = clamp(span.t - width / 2, span.t + width / 2, this.whole.extent, this.least);
    }
    const { origin, extent } = this.whole;
    const all = this.view[0] <= 0 && this.view[1] >= extent;
    const hash = link(current(), { params: {
      step: span.step, lane: `${span.engine}:${span.kind}`,
      t0: all ? null : toAbsolute(this.view[0], origin), t1: all ? null : toAbsolute(this.view[1], origin) } });
    if (step) replace(hash);
    else go(hash);
    whisper(describe(span, this.whole.axis));
  }

  /** The step under the cursor, where the reader can see it. */
  seen() {
    return this.chosen() && inside(this.data.spans, this.at.span, this.view) ? this.at.span : null;
  }

  /** The next step of the same engine, in whatever lane; of what is in view, if the cursor is not. */
  async walk(by) {
    if (!this.covers()) await this.load(); // the view has just moved
    if (!this.data.spans) {
      say('zoom in until single steps are shown (W)');
      return;
    }
    const { spans } = this.data;
    const state = current();
    const here = this.seen();
    if (here === null) {
      const wanted = engineOf(state.params.get('lane'), this.data);
      const same = entry(spans, this.view, by < 0, (i) => this.laneEngine(i) === wanted);
      const found = same >= 0 && inside(spans, same, this.view) ? same : entry(spans, this.view, by < 0);
      if (found < 0) say('no step near this window; F fits the whole');
      else this.select(found, { step: true });
      return;
    }
    const engine = this.laneEngine(here);
    const next = here + by;
    if (next >= 0 && next < spans.t.length && this.laneEngine(next) === engine) {
      this.select(next, { step: true });
      return;
    }
    const shown = this.panelData;
    const number = shown && (by > 0 ? shown.next : shown.previous);
    if (number === null || number === undefined || !state.params.get('step')) {
      say(by > 0 ? 'this is the last step' : 'this is the first step');
      return;
    }
    // it lies beyond what is loaded
    const width = this.view[1] - this.view[0];
    this.view = clamp(this.view[0] + by * width * 0.5, this.view[1] + by * width * 0.5, this.whole.extent, this.least);
    await this.load();
    const found = this.data.spans ? this.data.spans.step.findIndex((s, i) => s === number && this.laneEngine(i) === engine) : -1;
    if (found >= 0) this.select(found, { step: true });
  }

  /** To the nearest step of another lane. */
  lane(by) {
    if (this.seen() === null) {
      this.walk(1);
      return;
    }
    const here = this.chosen();
    const { spans } = this.data;
    for (let lane = spans.lane[this.at.span] + by; lane >= 0 && lane < this.data.lanes.length; lane += by) {
      let best = -1;
      for (let i = 0; i < spans.t.length; i += 1) {
        if (spans.lane[i] === lane && (best < 0 || Math.abs(spans.t[i] - here.t) < Math.abs(spans.t[best] - here.t))) best = i;
      }
      if (best >= 0) {
        this.select(best, { step: true });
        return;
      }
    }
    say(by > 0 ? 'no lane below has a step in this window' : 'no lane above has a step in this window');
  }

  makeKeys() {
    return {
      w: () => this.zoom(0.5), s: () => this.zoom(2), a: () => this.pan(-0.25), d: () => this.pan(0.25),
      W: () => this.zoom(0.5), S: () => this.zoom(2), A: () => this.pan(-0.25), D: () => this.pan(0.25),
      '.': () => this.walk(1), ',': () => this.walk(-1), f: () => this.fit(), F: () => this.fit(),
      '/': () => { const box = document.getElementById('tactic-filter'); if (box) box.focus(); },
      Escape: () => { this.at = null; go(link(current(), { params: { step: null, lane: null } })); },
    };
  }

  listen() {
    const { canvas } = this;
    const timeAt = (event) => {
      const box = canvas.getBoundingClientRect();
      return this.view[0] + ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * (this.view[1] - this.view[0]);
    };
    const laneAt = (event) => {
      const y = event.clientY - canvas.getBoundingClientRect().top - TOP;
      const row = this.layout.rows.find((r) => y >= r.y && y < r.y + r.h);
      return row ? row.lane : null;
    };
    const find = (event) => {
      const lane = laneAt(event);
      if (lane === null || !this.data) return null;
      const t = timeAt(event);
      const pixel = (this.view[1] - this.view[0]) / Math.max(1, canvas.clientWidth - LEFT);
      if (this.data.spans) {
        const i = hit(this.data.spans, t, lane, pixel * 4);
        return i === null ? null : { span: i };
      }
      const { edges } = this.data.bins;
      const bin = edges.findLastIndex((e) => e + this.data.window[0] <= t);
      return bin >= 0 && bin < edges.length - 1 ? { lane, bin } : null;
    };
    let drag = null;
    canvas.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      drag = { from: timeAt(event), to: timeAt(event), x: event.clientX };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', (event) => {
      if (drag) {
        drag.to = timeAt(event);
        this.draw(Math.abs(event.clientX - drag.x) > 4 ? drag : null);
        return;
      }
      this.hovered = find(event);
      this.drawReadout();
    });
    canvas.addEventListener('pointerleave', () => { this.hovered = null; this.drawReadout(); });
    canvas.addEventListener('pointerup', (event) => {
      const was = drag;
      drag = null;
      if (!was) return;
      if (Math.abs(event.clientX - was.x) > 4) {
        const [a, b] = [was.from, was.to].sort((x, y) => x - y);
        this.show(clamp(a, b, this.whole.extent, this.least), { push: true });
        return;
      }
      const found = find(event);
      if (found && found.span !== undefined) this.select(found.span);
      else if (found) this.zoom(1 / 8, timeAt(event));
    });
    canvas.addEventListener('wheel', (event) => {
      if (!event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
    }, { passive: false });
    canvas.addEventListener('keydown', (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const act = { ArrowRight: () => this.walk(1), ArrowLeft: () => this.walk(-1), ArrowDown: () => this.lane(1), ArrowUp: () => this.lane(-1),
        Enter: () => (this.data.spans ? this.walk(0) : this.zoom(1 / 8)), Home: () => this.show([0, this.view[1] - this.view[0]]), End: () => this.pan(1e9) }[event.key];
      if (!act) return;
      event.preventDefault();
      event.stopPropagation();
      act();
    });
    for (const name of ['focus', 'blur']) canvas.addEventListener(name, () => this.draw());
    const jump = (event) => {
      const box = this.map.getBoundingClientRect();
      const middle = ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * this.whole.extent;
      const half = (this.view[1] - this.view[0]) / 2;
      this.show(clamp(middle - half, middle + half, this.whole.extent, this.least));
    };
    this.map.addEventListener('pointerdown', (event) => { this.map.setPointerCapture(event.pointerId); jump(event); });
    this.map.addEventListener('pointermove', (event) => { if (event.buttons) jump(event); });
  }

  // ---- drawing ------------------------------------------------------------------------------

  drawNote() {
    const { data, whole } = this;
    const span = this.view[1] - this.view[0];
    const width = whole.axis === 'time' ? ns(span, span / 100) : plural(Math.round(span), 'step');
    const time = whole.axis === 'time';
    put(this.note, `${width} shown, ${data.spans ? plural(this.inView().length, 'step') : `${plural(data.in_window, 'step')} as bins`}`);
    put(this.explain, data.bins
      ? `Too many steps for single ones: a bar is the share of time of that kind in its bin, each at least a line. ${COMMAND ? 'Single steps are here where the sequences of this folder ran.' : 'Zoom in for steps.'}`
      : time ? 'A bar is as high as its step has rows. Its length is the time until the next step of that engine begins: only starts are recorded, so waiting counts. The last step of an engine has no length.'
        : 'A bar is as high as its step has rows; each is one step wide.',
    data.spans && !data.spans.flags ? ` R, C, \u2026 and V are shown for up to ${count(data.flags_limit)} rows: zoom in.` : '');
    const state = current();
    const base = { ...scope(state), t0: toAbsolute(this.view[0], whole.origin), t1: toAbsolute(Math.ceil(this.view[1]), whole.origin) };
    const file = (format, text) => h('a', { href: `${this.path('timeline')}?${new URLSearchParams({ ...base, format })}`, download: '', class: 'button', id: `save-${format}` }, text);
    if (!COMMAND) put(this.files, file('perfetto', 'Perfetto'), ' ', file('csv', 'CSV'));
  }

  drawReadout() {
    const at = this.hovered || this.at;
    const { data } = this;
    let text = null;
    if (at && at.span !== undefined && data.spans && at.span < data.spans.t.length) text = describe(spanAt(data, at.span), this.whole.axis);
    else if (at && at.bin !== undefined && data.bins) text = describeBin(data, at.lane, at.bin);
    put(this.readout, text || '\u00a0');
  }

  drawTable() {
    if (!this.table || !this.table.open) return;
    const { data, whole } = this;
    const [summary] = this.table.children;
    if (data.bins) {
      const rows = data.lanes.map((lane, l) => {
        const { share, rows: most, steps } = data.bins.lanes[l];
        const sum = steps.reduce((x, y) => x + y, 0);
        return h('tr', {}, h('th', { scope: 'row', class: 'mono' }, lane.engine.slice(0, 8)), h('td', {}, lane.kind), num(count(sum)),
          num(`${(share.reduce((x, y) => x + y, 0) / share.length / 10).toFixed(1)} %`), num(count(Math.max(-1, ...most.map((m) => m ?? -1)) < 0 ? null : Math.max(...most.map((m) => m ?? -1)))));
      });
      put(this.table, summary, h('p', { class: 'hint' }, 'Put together over the window; zoom in for single steps.'),
        h('table', { class: 'data' }, head(['engine', 'kind', 'steps', 'share of time', 'most rows']), h('tbody', {}, rows)));
      return;
    }
    const inView = this.inView();
    const shown = inView.slice(0, 500);
    const time = whole.axis === 'time';
    put(this.table, summary,
      scroller('Steps in view', h('table', { class: 'data', id: 'span-table' },
        head(['engine', 'step', 'kind', ...(time ? ['start', 'until next'] : []), 'rows', 'tokens', 'padding', 'graph', 'attention', 'experts', 'cache', 'rows of kind']),
        h('tbody', {}, shown.map((i) => {
          const s = spanAt(data, i);
          const href = link(current(), { params: { step: s.step, lane: `${s.engine}:${s.kind}` } });
          return h('tr', {}, h('td', { class: 'mono' }, s.engine.slice(0, 8)), h('th', { scope: 'row', class: 'n' }, h('a', { href }, count(s.step))), h('td', {}, s.kind),
            time ? [num(ns(s.t, 1000)), num(ns(s.duration))] : null,
            num(count(s.rows)), num(count(s.tokens)), num(count(s.padded)), h('td', {}, s.graph ?? 'eager'),
            h('td', {}, s.attention ?? NONE), h('td', {}, s.experts ?? NONE), h('td', {}, s.cache ?? NONE),
            h('td', {}, s.marks === null ? NONE : s.marks.map((m) => (MARKS[m] ? MARKS[m][1] : m)).join(', ')));
        })))),
      inView.length > shown.length ? h('p', { class: 'hint' }, `The first ${count(shown.length)} of ${plural(inView.length, 'step')} in view; the CSV has all.`) : null);
  }

  drawEvents() {
    const { events, events_total: total } = this.data;
    const all = Object.entries(total);
    this.eventList.hidden = !all.length;
    const open = (event) => (event.seq ? h('a', { href: link(current(), { screen: 'seq', seq: event.seq }) }, event.seq) : NONE);
    put(this.eventList, h('summary', {}, `Events${this.whole.axis === 'time' ? ' near this window' : ''}: ${all.map(([k, n]) => `${count(n)} ${k.replace('_', ' ')}`).join(', ')}`),
      scroller('Events', h('table', { class: 'data' }, head(['', 'event', 'at', 'sequence', 'what']),
        h('tbody', {}, events.slice(0, 200).map((e) => h('tr', {}, h('td', {}, h('b', {}, MARK_LETTERS[e.kind])), h('td', {}, e.kind.replace('_', ' '), e.count > 1 ? ` \u00d7 ${count(e.count)}` : ''),
          num(e.t === null ? NONE : ns(e.t, 1e5)), h('td', { class: 'mono' }, open(e)), h('td', { class: 'wrap' }, e.detail)))))));
  }

  async drawPanel(state) {
    const step = integer(state.params.get('step'));
    const engine = engineOf(state.params.get('lane'), this.whole);
    const key = `${engine}/${step}`;
    this.panel.classList.toggle('empty', step === null || !engine);
    if (step === null || !engine) {
      this.panelKey = this.panelData = null;
      put(this.panel, h('p', { class: 'hint' }, 'Click a step, or walk with . and , to see it here. Drag over the lanes to zoom; Ctrl and the wheel zoom, too.'));
      return;
    }
    if (this.panelKey === key) return;
    this.panelKey = key;
    this.detail.abort();
    this.detail = new AbortController();
    const { signal } = this.detail;
    this.panel.setAttribute('aria-busy', 'true');
    try {
      const data = await getJson(this.path('steps', engine, String(step)), scope(state), signal);
      if (signal.aborted) return;
      this.panelData = data;
      drawStep(this.panel, data, state, this.whole);
      this.approach(data);
    } catch (error) {
      if (error.name === 'AbortError') return;
      if (!error.problem) throw error;
      put(this.panel, notice({ level: error.problem.level || 'warn', title: COMMAND ? `Step ${count(step)} is not in this folder` : `No step ${count(step)}`, text: error.message, commands: error.problem.commands }));
    } finally {
      if (!signal.aborted) this.panel.removeAttribute('aria-busy');
    }
  }

  /** A link that names a step and no window: the lanes show it, too, where all would be too much. */
  approach({ t_ns: t, duration_ns: duration, step }) {
    const { params } = current();
    const { origin, extent, axis } = this.whole;
    if (params.get('t0') || params.get('t1') || !this.data.bins) return;
    const start = axis === 'time' ? toOffset(t, origin) : step - Number(origin);
    const half = Math.max((axis === 'time' ? duration || extent / 1e4 : 1) * 30, this.least);
    this.show(clamp(start - half, start + half, extent, this.least));
  }

  async drawTactics() {
    await tacticTable(this.tactics, this.path('tactics'), this.signal);
  }

  grown(reopen) {
    if (document.getElementById('grown')) return;
    const item = notice({ level: 'info', title: 'The recording has grown', text: 'This page shows what was there when it was opened.',
      extra: h('button', { type: 'button', on: { click: reopen } }, 'Show what is new') });
    item.id = 'grown';
    this.outside.before(item);
  }
}

function engineOf(lane, data) {
  if (!lane) return data.engines.length === 1 ? data.engines[0].id : null;
  const name = lane.slice(0, lane.lastIndexOf(':') < 0 ? undefined : lane.lastIndexOf(':'));
  const found = data.engines.filter((e) => e.id.startsWith(name));
  return found.length === 1 ? found[0].id : null;
}
