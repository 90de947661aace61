// Versions of the weights: what was in place when, who holds the same, what was made with which.

import { getJson, runPath, scope } from './api.js';
import { h, num, put, svg } from './dom.js';
import { NONE, count, percent, plural } from './format.js';
import { engineName, ns, tickText, ticks } from './lanes.js';
import { notice } from './notices.js';
import { current, go, integer, link } from './route.js';
import { scroller } from './scroll.js';
import { say, whisper } from './shell.js';

const WIDTH = 1000;
const LEFT = 150;
const ROW = 26;
const MOST_BANDS = 400;

export async function open({ state, main, signal }) {
  const page = new Page(state, signal);
  await page.show(state, main);
  return page;
}

class Page {
  constructor(state, signal) {
    this.base = { run: state.run, rep: state.params.get('rep') };
    this.signal = signal;
    const step = (by) => () => this.walk(by);
    this.keys = {
      j: step(1), '.': step(1), ArrowRight: step(1), k: step(-1), ',': step(-1), ArrowLeft: step(-1),
      'g g': () => this.to(this.data.digests.first), G: () => this.to(this.data.digests.last),
      Escape: () => go(link(current(), { params: { version: null } })),
    };
  }

  update(state) {
    const same = state.screen === 'weights' && state.run === this.base.run && state.params.get('rep') === this.base.rep;
    if (same) this.show(state, this.main);
    return same;
  }

  async show(state, main) {
    this.main = main;
    const version = integer(state.params.get('version'));
    const data = await getJson(runPath(state, 'weights'), { ...scope(state), version }, this.signal);
    if (this.signal.aborted) return;
    this.data = data;
    this.version = version;
    const last = data.digests.last;
    put(main,
      h('h1', {}, 'Weights ', h('span', { class: 'hint' }, data.recorded ? `${plural(data.digests.all, 'version')} in ${plural(data.engines.length, 'engine')}` : '')),
      data.alarms.map(notice),
      (data.problems || []).map((p) => notice({ level: 'error', title: 'Damaged shard', text: `${p}. Everything else is served.` })),
      version !== null && last !== null && !data.digests.versions.includes(version) ? notice({ level: 'warn', title: `There is no version ${count(version)}`, text: `The tape has ${count(data.digests.first)} to ${count(last)}; the nearest earlier ones are shown.` }) : null,
      data.recorded ? [bands(data, state, version), digests(data, state, version), against(data)] : none(data),
      h('div', { class: 'columns even' }, staleness(data), straddling(data, state)),
      updates(data), engines(data));
    const chosen = main.querySelector('[aria-current=true]');
    if (chosen && chosen.scrollIntoView && version !== null && this.walked) chosen.focus();
    if (version !== null) whisper(`version ${version}`);
    this.walked = false;
  }

  walk(by) {
    const numbers = [...new Set(this.data.states.map((s) => s.version))].sort((a, b) => a - b);
    if (!numbers.length) return;
    const from = this.version ?? (by > 0 ? -Infinity : Infinity);
    const next = by > 0 ? numbers.find((n) => n > from) : numbers.findLast((n) => n < from);
    if (next === undefined) say(by > 0 ? 'this is the last version' : 'this is the first version');
    else this.to(next);
  }

  to(version) {
    if (version === null) return;
    this.walked = true;
    go(link(current(), { params: { version } }));
  }
}

function section(title, ...content) {
  return h('section', { class: 'card' }, h('h2', {}, title), content);
}

function head(names) {
  return h('thead', {}, h('tr', {}, names.map((n) => h('th', { scope: 'col' }, n))));
}

function name(version, label) {
  return label === null || label === undefined ? `v${version}` : `v${version} (${label})`;
}

function none(data) {
  const used = data.engines.some((e) => e.used);
  return notice({
    level: 'info', title: 'No weight versions recorded',
    text: `No update and no digest was recorded, so it is not known whether the two sides ran the same weights.${used ? ' The numbers of the versions that made the tokens are known and stand below.' : ''} rolltape record writes both for every engine that it hooks; a trainer tells its versions itself.`,
    commands: ['rolltape record -o TAPE -- python rollout.py'],
  });
}

// ---- bands over time --------------------------------------------------------------------------

function bands(data, state, version) {
  const timed = data.states.filter((s) => s.t_ns !== null);
  if (!timed.length) return section('Over time', h('p', { class: 'hint' }, 'The versions have no times.'), stateTable(data, state, null));
  const origin = timed.map((s) => BigInt(s.t_ns)).reduce((a, b) => (b < a ? b : a));
  const at = (text) => Number(BigInt(text) - origin);
  const marks = data.updates.filter((u) => at(u.t_ns) >= 0);
  const end = Math.max(1, ...timed.flatMap((s) => [at(s.t_ns), s.until === null ? 0 : at(s.until)]), ...marks.map((u) => at(u.t_ns))) * 1.06;
  const names = data.engines.filter((e) => timed.some((s) => s.engine === e.id));
  const height = names.length * ROW + 30;
  const x = (t) => LEFT + (t / end) * (WIDTH - LEFT - 8);
  const every = Math.max(1, Math.ceil(timed.length / MOST_BANDS));
  const drawn = timed.filter((s, i) => i % every === 0 || s.state === 'dirty' || s.version === version);
  const band = (s) => {
    const row = names.findIndex((e) => e.id === s.engine);
    const left = x(at(s.t_ns));
    const wide = Math.max(2, x(s.until === null ? end : at(s.until)) - left - 1);
    const y = 4 + row * ROW;
    const words = `${s.state === 'dirty' ? `dirty after version ${s.version}${s.reason ? `, ${s.reason}` : ''}${s.steps ? `, ${plural(s.steps, 'step')} began meanwhile` : ''}` : `version ${s.version}${s.label === null ? '' : `, ${s.label}`}`}, from ${ns(at(s.t_ns), 1e6)}, ${s.until === null ? 'to the end' : `for ${ns(at(s.until) - at(s.t_ns))}`}`;
    const here = s.version === version && s.state === 'complete';
    return svg('a', { href: link(state, { params: { version: s.version } }), 'aria-label': words, 'aria-current': here ? 'true' : null },
      svg('title', {}, words),
      svg('rect', { x: left, y, width: wide, height: ROW - 8, class: `band ${s.state === 'dirty' ? 'dirty' : s.version % 2 ? 'odd' : 'even'}${here ? ' here' : ''}` }),
      wide > 30 ? svg('text', { x: left + 4, y: y + 13, class: s.state === 'dirty' ? 'on-dirty' : '' }, clip(s.state === 'dirty' ? 'dirty' : name(s.version, s.label), wide)) : null);
  };
  const found = end < 2 ? [] : ticks(0, end, 6); // of one moment alone there is no axis
  const step = found[1] - found[0];
  const picture = svg('svg', { viewBox: `0 0 ${WIDTH} ${height}`, class: 'bands', role: 'group', 'aria-label': 'Versions over time; the table below has the same' },
    found.map((t) => [svg('line', { x1: x(t), x2: x(t), y1: 0, y2: height - 20, class: 'grid' }), svg('text', { x: x(t) > WIDTH - 60 ? x(t) - 2 : x(t) + 2, y: height - 6, class: x(t) > WIDTH - 60 ? 'tick end' : 'tick' }, tickText(t, step, 'time', '0'))]),
    names.map((e, i) => svg('text', { x: 0, y: 17 + i * ROW, class: 'name' }, [engineName(e.id, data.engines), e.role].filter(Boolean).join(' '))),
    drawn.map(band),
    marks.slice(0, MOST_BANDS).map((u) => svg('path', { d: `M${x(at(u.t_ns))} ${height - 20} l-4 -8 h8 z`, class: `mark ${u.state}` }, svg('title', {}, `update ${u.state}: ${u.detail}`))));
  return section('Over time',
    scroller('Versions over time', picture),
    h('p', { class: 'hint' }, 'A band is a version in place; a red, dashed one is dirty: an update was writing. Triangles are updates as they were asked for or reported. Pick a version to see its digests.',
      every > 1 ? ` One band in ${every} is drawn.` : ''),
    stateTable(data, state, origin));
}

function clip(text, wide) {
  const room = Math.floor(wide / 6.6) - 1;
  return text.length > room ? `${text.slice(0, Math.max(1, room - 1))}\u2026` : text;
}

function stateTable(data, state, origin) {
  const shown = data.states.slice(0, 500);
  return h('details', { id: 'as-table' }, h('summary', {}, 'As a table'),
    scroller('States of the weights', h('table', { class: 'data' }, head(['engine', 'version', 'name', 'state', 'from', 'lasted', 'steps meanwhile', 'reason']),
      h('tbody', {}, shown.map((s) => h('tr', { class: s.state === 'dirty' ? 'differs' : null },
        h('td', { class: 'mono' }, engineName(s.engine, data.engines)),
        h('th', { scope: 'row', class: 'n' }, h('a', { href: link(state, { params: { version: s.version } }) }, s.version)),
        h('td', {}, s.label ?? NONE), h('td', {}, s.state),
        num(s.t_ns === null || origin === null ? NONE : ns(Number(BigInt(s.t_ns) - origin), 1e6)),
        num(s.until === null ? NONE : ns(Number(BigInt(s.until) - BigInt(s.t_ns)))),
        num(s.state === 'dirty' ? (s.steps === null ? 'not known' : count(s.steps)) : NONE),
        h('td', { class: 'wrap' }, s.reason ?? '')))))),
    data.states_total > shown.length ? h('p', { class: 'hint' }, `The first ${count(shown.length)} of ${count(data.states_total)} states.`) : null);
}

// ---- digests ----------------------------------------------------------------------------------

function digests(data, state, version) {
  const d = data.digests;
  if (!d.versions.length) return section('Digests', h('p', { class: 'hint' }, 'No version was ever complete.'));
  const to = (v, text, id) => (v === null || v === undefined ? null : h('a', { href: link(state, { params: { version: v } }), id }, text));
  const [low, high] = [d.versions[0], d.versions[d.versions.length - 1]];
  const labels = {};
  d.groups.forEach((g) => g.cells.forEach((c, i) => c.answers.forEach((a) => { if (a.label !== null) labels[d.versions[i]] = a.label; })));
  const cell = (c, i) => h('td', { class: d.versions[i] === version ? 'here' : null }, c.answers.length ? c.answers.map((a) => h('div', {},
    a.digest === null ? h('span', { class: 'hint' }, 'no digest') : h('span', { class: 'mono hex' }, a.digest),
    a.moved === false ? h('span', { class: 'hint', title: 'the same as in the version before' }, ' same') : null,
    c.answers.length > 1 ? h('span', { class: 'hint' }, ` ${a.engines.map((e) => engineName(e, data.engines)).slice(0, 4).join(' ')}${a.engines.length > 4 ? ` and ${a.engines.length - 4} more` : ''}`) : null,
    a.reason ? h('span', { class: 'reason', title: a.reason }, ' \u2020') : null)) : NONE,
    c.engines === 'differs' ? h('strong', { class: 'bad' }, '\u2260 engines differ') : c.engines.startsWith('not comparable') && c.answers.length > 1 ? h('span', { class: 'hint' }, c.engines) : null);
  const reasons = [...new Set(d.groups.flatMap((g) => g.cells.flatMap((c) => c.answers.map((a) => a.reason).filter(Boolean))))];
  return section('Digests of tensor groups',
    h('p', { class: 'pager' }, `versions ${count(low)} to ${count(high)} of ${count(d.first)} to ${count(d.last)}`,
      low > d.first ? to(Math.max(d.first, low - 1), 'earlier', 'earlier') : null,
      high < d.last ? to(Math.min(d.last, high + 8), 'later', 'later') : null),
    scroller('Digests of tensor groups', h('table', { class: 'data digests tall', id: 'digests' },
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'group'), d.versions.map((v) => h('th', { scope: 'col', class: v === version ? 'here' : null }, to(v, name(v, labels[v])))))),
      h('tbody', {}, d.groups.map((g) => h('tr', { class: g.cells.some((c) => c.engines === 'differs') ? 'differs' : null }, h('th', { scope: 'row' }, g.group || 'whole model'), g.cells.map(cell)))))),
    reasons.length ? h('details', {}, h('summary', {}, `\u2020 not comparable with other implementations: ${plural(reasons.length, 'reason')}`), h('ul', {}, reasons.map((r) => h('li', {}, r)))) : null);
}

function against({ against_b: b }) {
  const words = { match: 'the same weights', mismatch: 'other weights', inconclusive: 'not everything can be compared', 'not-run': 'not compared' };
  const verdict = h('p', {}, h('strong', { class: `verdict v-${{ match: 'identical', mismatch: 'divergent' }[b.state] || b.state}` }, `${b.state}: ${words[b.state]}`), b.reason ? `: ${b.reason}` : '',
    b.paired_by ? h('span', { class: 'hint' }, ` \u00b7 versions paired by their ${b.paired_by}; ${Object.entries(b.counts).map(([k, n]) => `${count(n)} ${k}`).join(', ')}`) : null);
  const shown = b.mismatches.length ? [...b.mismatches, ...b.rows.filter((r) => r.result !== 'mismatch')] : b.rows;
  return section('A against B', verdict, shown.length ? scroller('A against B', h('table', { class: 'data tall', id: 'against' },
    head(['version', 'group', 'A', 'B', 'verdict']),
    h('tbody', {}, shown.slice(0, 400).map((r) => h('tr', { class: r.result === 'mismatch' ? 'differs' : null },
      h('td', {}, r.version === r.version_b ? name(r.version, r.label) : `${name(r.version, r.label)} / v${r.version_b}`),
      h('th', { scope: 'row' }, r.group || 'whole model'), h('td', { class: 'mono hex' }, r.a ?? NONE), h('td', { class: 'mono hex' }, r.b ?? NONE),
      h('td', { class: 'wrap' }, r.result === 'mismatch' ? h('strong', { class: 'bad' }, '\u2260 mismatch') : r.result === 'match' ? '= match' : r.result, r.pairs > 1 ? h('span', { class: 'hint' }, ` in ${r.pairs} pairs of engines`) : null)))))) : null);
}

// ---- sequences --------------------------------------------------------------------------------

function staleness({ staleness: s }) {
  const top = Math.max(1, ...s.lags.map((r) => r.sequences));
  const total = s.lags.reduce((n, r) => n + r.sequences, 0);
  const what = s.basis === 'trainer'
    ? 'the version that the trainer scored with, minus the oldest version that made a token of the sequence; both sides count from the weights that they loaded'
    : 'the version in place when the sequence closed, minus the oldest version that made a token of it; what the optimiser had done by then is not in a rollout tape';
  return section('Staleness', h('p', { class: 'hint' }, `Lag: ${what}.`),
    s.lags.length ? h('table', { class: 'data', id: 'staleness' }, head(['lag', 'sequences', 'share', '']),
      h('tbody', {}, s.lags.slice(0, 60).map((r) => h('tr', {}, h('th', { scope: 'row', class: 'n' }, r.lag), num(count(r.sequences)), num(percent(r.sequences / total)),
        h('td', { class: 'barcell' }, svg('svg', { viewBox: '0 0 120 10', class: 'rowbar', 'aria-hidden': 'true' }, svg('rect', { width: 120, height: 10, class: 'track' }), svg('rect', { width: Math.max(1, (120 * r.sequences) / top), height: 10, class: 'bar' })))))))
      : h('p', {}, 'Not known for any sequence.'),
    s.unknown ? h('p', { class: 'hint' }, `Not known for ${count(s.unknown)} of ${plural(s.of, 'sequence')}: no version, or no time of its end or of the update.`) : null);
}

function straddling({ straddling: s }, state) {
  return section('Sequences that straddle an update',
    h('p', {}, h('strong', {}, count(s.count)), ` of ${plural(s.known, 'sequence')} with known versions`, s.of > s.known ? h('span', { class: 'hint' }, `; ${count(s.of - s.known)} have none`) : null),
    s.rows.length ? scroller('Sequences that straddle an update', h('table', { class: 'data tall', id: 'straddling' }, head(['sequence', 'versions', 'tokens']),
      h('tbody', {}, s.rows.map((r) => h('tr', {}, h('th', { scope: 'row', class: 'mono' }, h('a', { href: link(state, { screen: 'seq', seq: r.seq }) }, r.seq)), h('td', { class: 'n' }, `${r.from} to ${r.to}`), num(count(r.length))))))) : null,
    s.count > s.rows.length ? h('p', { class: 'hint' }, `The first ${count(s.rows.length)}.`) : null);
}

function updates(data) {
  if (!data.updates.length) return section('Updates', h('p', { class: 'hint' }, 'No update was recorded: the weights that were loaded are all there were.'));
  const result = (u) => (u.state === 'requested'
    ? u.applied === true ? 'asked for, and in place later' : u.applied === false ? h('strong', { class: 'bad' }, 'asked for, never in place') : 'asked for; versions have no names'
    : u.state === 'failed' ? h('strong', { class: 'bad' }, 'failed') : 'applied');
  return section('Updates, asked for and applied', h('details', { open: data.updates.length <= 12 || null }, h('summary', {}, plural(data.updates.length, 'update')),
    scroller('Updates', h('table', { class: 'data', id: 'updates' }, head(['time, ns', 'engine', 'name', 'version', 'what came of it', 'detail']),
      h('tbody', {}, data.updates.slice(0, 500).map((u) => h('tr', { class: u.applied === false || u.state === 'failed' ? 'differs' : null },
        h('td', { class: 'mono' }, u.t_ns), h('td', { class: 'mono' }, (u.engine || NONE).slice(0, 8)), h('th', { scope: 'row' }, u.label ?? NONE), num(u.version ?? NONE), h('td', {}, result(u)), h('td', { class: 'wrap' }, u.detail))))))));
}

function engines(data) {
  return section('Engines', scroller('Engines', h('table', { class: 'data' }, head(['engine', 'role', 'adapter', 'dtype', 'quantisation', 'versions that made tokens']),
    h('tbody', {}, data.engines.map((e) => h('tr', {}, h('th', { scope: 'row', class: 'mono' }, e.id), h('td', {}, e.role ?? NONE), h('td', {}, e.adapter ?? NONE), h('td', {}, e.dtype ?? NONE),
      h('td', {}, e.quantization.join(', ') || 'none recorded'), h('td', { class: 'n' }, e.used ? (e.used[0] === e.used[1] ? e.used[0] : `${e.used[0]} to ${e.used[1]}`) : NONE)))))));
}
