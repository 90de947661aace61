// The panel of the pinned token: everything that is known about it.

import { h, put } from './dom.js';
import { NONE, count, plural } from './format.js';
import { link } from './route.js';
import { scroller } from './scroll.js';
import { tokenText } from './text.js';

/** @param {HTMLElement} panel @param {Object} data answer of .../tokens/{position} */
export function drawPanel(panel, data, { state, info }) {
  put(
    panel,
    h('h2', {}, `Position ${count(data.position)} `, h('span', { class: 'hint' }, `of ${count(info.n)}, ${data.part}`)),
    h('p', { class: `statewords s-${data.state}` }, data.equal ? 'compared: bitwise equal' : data.state_words),
    facts([
      ['token', token(data)],
      ['id', data.id ?? NONE],
      ['A', logprob(data.a)],
      ['B', info.run.report ? logprob(data.b) : h('span', { class: 'hint' }, 'no report')],
      data.delta !== null ? ['\u0394 = B \u2212 A', h('span', { class: 'mono' }, data.delta, ' nat')] : null,
      data.ratio !== null ? ['ratio e^\u0394', h('span', { class: 'mono' }, data.ratio)] : null,
      data.ulp !== null ? ['distance', `${count(data.ulp)} ulp of float32`] : null,
      ['semantics', semantics(data)],
    ]),
    sides(data.sides, state, info),
    routes(data),
  );
}

function facts(rows) {
  return h('table', { class: 'facts' }, h('tbody', {}, rows.filter(Boolean).map(([name, value]) =>
    h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, value)))));
}

function token(data) {
  if (data.bytes === null) return h('span', { class: 'hint' }, data.id === null ? 'not recorded' : 'no text');
  const { text, split } = tokenText(data.bytes);
  return [h('span', { class: 'chip mono' }, text), split ? h('span', { class: 'hint' }, ' part of a character') : null];
}

function logprob(side) {
  if (side === null) return h('span', { class: 'hint' }, 'no logprob');
  return h('span', { class: 'mono' }, side.text, ' ', h('span', { class: 'hint' }, side.hex));
}

function semantics(data) {
  const words = (side) => {
    const s = side && side.semantics;
    if (!s) return null;
    return [
      s.temperature !== null ? `T ${s.temperature}` : 'T unknown',
      ...(s.edits || []), ...(s.truncation || []),
      s.vocab_size ? `vocabulary ${count(s.vocab_size)}` : null, s.dtype, s.source,
    ].filter(Boolean).join(', ');
  };
  const [a, b] = [words(data.a), words(data.b)];
  const column = data.column || 'unknown column';
  if (!a && !b) return column;
  if (a === b || !b || !a) return `${column}: ${a || b}`;
  return [h('div', {}, `${column}, A: ${a}`), h('div', {}, `${column}, B: ${b}`)];
}

function sides({ a, b }, state, info) {
  if (!a && !b) return null;
  const row = (name, of) => h('tr', {}, h('th', { scope: 'row' }, name), h('td', {}, a ? of(a) : NONE), b ? h('td', {}, of(b)) : null);
  return [
    h('table', { class: 'data sides' },
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, ''), h('th', { scope: 'col' }, 'A'), b ? h('th', { scope: 'col' }, 'B') : null)),
      h('tbody', {},
        row('weights', (s) => (s.weight_version === null ? NONE : `version ${s.weight_version}`)),
        row('step', (s) => (s.step ? stepLink(s, state) : 'not recorded')),
        row('support', (s) => supportWords(s.support)))),
    settings(a, b),
    a && a.step ? batch('Ran together with, in A', a, (seq) => link(state, { screen: 'seq', seq, params: { tok: null } })) : null,
    b && b.step && b.step.batch_size > 1 && info.b_run
      ? batch('Ran together with, in B', b, (seq) => link(state, { screen: 'seq', run: info.b_run, seq })) : null,
  ];
}

function stepLink(side, state) {
  const { step } = side;
  const run = side.tape === state.run ? {} : { run: side.tape };
  return h('a', { href: link(state, { screen: 'timeline', seq: null, ...run, params: { step: step.step, lane: step.engine } }), title: 'the step on the timeline' }, stepWords(step));
}

function stepWords(step) {
  const own = step.batch.find((r) => r.own);
  return `${count(step.step)}: ${own ? own.kind : step.facts.kind || 'unknown kind'}, ${plural(step.batch_size, 'row')}`;
}

function settings(a, b) {
  const of = (side) => (side && side.step ? side.step.facts : {});
  const names = [...new Set([...Object.keys(of(a)), ...Object.keys(of(b))])]
    .filter((name) => (of(a)[name] ?? of(b)[name] ?? '') !== '');
  if (!names.length) return null;
  return h('details', {}, h('summary', {}, 'Settings of the step'), h('table', { class: 'data sides' },
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, ''), h('th', { scope: 'col' }, 'A'), b ? h('th', { scope: 'col' }, 'B') : null)),
    h('tbody', {}, names.map((name) => h('tr', {},
      h('th', { scope: 'row' }, name.replace('_', ' ')), h('td', {}, of(a)[name] ?? NONE), b ? h('td', {}, of(b)[name] ?? NONE) : null)))));
}

function supportWords(support) {
  if (support.state === 'full') return 'full vocabulary';
  if (support.state === 'unrecorded') return 'not recorded';
  const holds = support.holds_token === false ? ', without this token' : '';
  return `${count(support.size)} kept${holds}${support.derived ? ', recomputed' : ''}`;
}

function batch(title, side, href) {
  const { step } = side;
  const others = step.batch.filter((r) => !r.own);
  if (!others.length) return h('p', { class: 'hint' }, `${title}: nothing else, a batch of 1.`);
  return h('details', {}, h('summary', {}, `${title} ${count(step.batch_size - 1)} other row${step.batch_size > 2 ? 's' : ''}`),
    h('table', { class: 'data' },
      h('thead', {}, h('tr', {}, ['row', 'sequence', 'input positions', 'kind'].map((t) => h('th', { scope: 'col' }, t)))),
      h('tbody', {}, others.map((r) => h('tr', {},
        h('td', { class: 'n' }, r.row),
        h('td', { class: 'mono' }, r.dummy ? 'padding' : h('a', { href: href(r.seq) }, r.seq)),
        h('td', { class: 'n' }, r.n > 1 ? `${r.start}\u2013${r.start + r.n - 1}` : r.start),
        h('td', {}, r.kind))))),
    step.batch_size > step.batch.length ? h('p', { class: 'hint' }, `The first ${step.batch.length} of ${count(step.batch_size)} rows.`) : null);
}

// The routes that drew a token are those of the input before it: they stand first and open.
function routes(data) {
  const own = data.routes;
  if (!own.layers.length) return h('p', { class: 'hint' }, `Experts: ${own.missing}.`);
  const input = data.position - 1;
  return [
    data.drawn_by ? routeTable(`Experts that drew this token (input ${input})`, data.drawn_by) : null,
    h('details', { open: data.drawn_by ? null : true },
      h('summary', {}, `Experts when it was the input itself (${verdict(own)})`), routeTable(null, own)),
  ];
}

function verdict(r) {
  if (!r.comparable) return 'not compared';
  return r.differ ? `differs in ${r.differ} layer${r.differ > 1 ? 's' : ''}` : 'the same in every layer';
}

function routeTable(title, r) {
  const lead = !r.comparable ? null : r.differ
    ? `Routing ${verdict(r)}.` : 'Both sides chose the same experts in every layer.';
  const b = r.b_role !== null;
  const cell = (own, other) => {
    if (own.ids === null) return h('td', { class: 'hint' }, own.reason || 'not recorded');
    const parts = own.ids.map((id, i) => [i ? ' ' : null, other.ids && !other.ids.includes(id) ? h('mark', {}, id) : String(id)]);
    return h('td', { class: 'mono ids' }, parts);
  };
  return [
    title ? h('h3', {}, title) : null,
    lead ? h('p', { class: r.differ ? 'flagline' : 'hint' }, lead) : null,
    scroller(title || 'Experts', h('table', { class: 'data routes' },
      h('thead', {}, h('tr', {},
        h('th', { scope: 'col' }, 'layer'), h('th', { scope: 'col' }, 'A'),
        b ? h('th', { scope: 'col' }, r.b_role === 'live' ? 'B, own choice' : 'B') : null,
        b ? h('th', { scope: 'col' }, h('span', { class: 'sr' }, 'verdict')) : null,
        h('th', { scope: 'col', title: 'k-th minus (k+1)-th choice score' }, 'margin A'),
        b ? h('th', { scope: 'col', title: 'k-th minus (k+1)-th choice score' }, 'margin B') : null)),
      h('tbody', {}, r.layers.map((row) => h('tr', { class: row.same === false ? 'differs' : null },
        h('th', { scope: 'row', class: 'n' }, row.layer),
        cell(row.a, row.b),
        b ? cell(row.b, row.a) : null,
        b ? h('td', {}, row.same === false ? h('strong', {}, '\u2260', h('span', { class: 'sr' }, ' differs')) : row.order_only ? 'order' : row.same ? '=' : NONE) : null,
        h('td', { class: 'n' }, margin(row.a)),
        b ? h('td', { class: 'n' }, margin(row.b)) : null))))),
    b ? null : h('p', { class: 'hint' }, 'Side B is not open, or recorded no routes.'),
  ];
}

function margin(side) {
  return side.margin === null ? NONE : Number(Number(side.margin).toPrecision(3));
}
