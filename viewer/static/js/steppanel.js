// The panel of a step: its settings, what ran together in it, the kernel choices known by then.

import { h, num, put } from './dom.js';
import { NONE, count, plural } from './format.js';
import { ns } from './lanes.js';
import { link } from './route.js';
import { scroller } from './scroll.js';

/** The head of a table. */
export function head(names) {
  return h('thead', {}, h('tr', {}, names.map((n) => h('th', { scope: 'col' }, n))));
}

/** @param {HTMLElement} panel @param {Object} data answer of .../steps/{engine}/{step} */
export function drawStep(panel, data, state, whole) {
  const facts = [
    ['engine', h('span', { class: 'mono path' }, data.engine)],
    ['kind', data.kind],
    ['start', data.t_ns === null ? 'not recorded' : [ns(Number(BigInt(data.t_ns) - BigInt(whole.origin)), 1000), h('span', { class: 'hint mono' }, ` ${data.t_ns} ns`)]],
    ['until the next', data.t_ns === null ? NONE : data.duration_ns === null ? 'not known: the last step' : ns(data.duration_ns)],
    ['rows', count(data.rows)], ['tokens', count(data.tokens)], ['padded tokens', count(data.padded_tokens)],
    ['columns', count(data.columns)], ['call', count(data.call)],
    ['graph', data.graph ?? 'eager'], ['attention', data.attention ?? NONE], ['experts', data.experts ?? NONE],
    ['sdpa', data.sdpa], ['cache', data.cache ?? NONE], ['threads', count(data.threads)],
  ].filter(([, v]) => v !== null && v !== NONE);
  const to = (step, text, id) => (step === null ? h('span', { class: 'hint' }, text) : h('a', { href: link(state, { params: { step } }), id }, text));
  const drafts = data.batch.rows.some((r) => r.drafted !== null);
  const sources = data.batch.rows.some((r) => r.kv_source !== null && r.kv_source !== 'own');
  put(panel,
    h('h2', {}, `Step ${count(data.step)} `, h('span', { class: 'neighbours' }, to(data.previous, 'previous', 'step-previous'), ' ', to(data.next, 'next', 'step-next'))),
    h('table', { class: 'facts' }, h('tbody', {}, facts.map(([n, v]) => h('tr', {}, h('th', { scope: 'row' }, n), h('td', {}, v))))),
    h('h3', {}, data.batch.of ? `Ran together: ${plural(data.batch.of, 'row')}` : 'Rows'),
    data.batch.of ? scroller('Rows of the step', h('table', { class: 'data', id: 'batch' },
      head(['row', 'sequence', 'positions', 'kind', 'version', ...(drafts ? ['drafts'] : []), ...(sources ? ['KV'] : [])]),
      h('tbody', {}, data.batch.rows.map((r) => h('tr', {},
        h('td', { class: 'n' }, r.row),
        h('td', { class: 'mono' }, r.seq === null ? 'padding' : r.known ? h('a', { href: link(state, { screen: 'seq', seq: r.seq, params: { tok: r.chunk || r.kind === 'cached' ? r.start + r.n - 1 : r.start + r.n } }) }, r.seq) : r.seq),
        h('td', { class: 'n' }, r.n > 1 ? `${count(r.start)}\u2013${count(r.start + r.n - 1)}` : count(r.start)),
        h('td', {}, r.chunk ? 'prefill, unfinished' : r.kind === 'cached' ? 'cached prefix' : r.kind),
        num(r.weight_version ?? NONE),
        drafts ? num(r.drafted === null ? NONE : `${r.accepted ?? NONE} of ${r.drafted}`) : null,
        sources ? h('td', {}, r.kv_source ?? NONE) : null)))))
      : h('p', { class: 'hint' }, 'No rows of this step were recorded.'),
    data.batch.of > data.batch.rows.length ? h('p', { class: 'hint' }, `The first ${count(data.batch.rows.length)} of ${count(data.batch.of)} rows.`) : null,
    h('details', {}, h('summary', {}, `Kernel choices known by then, ${data.graph === null ? 'eager' : `in graph ${data.graph}`}: ${count(data.tactics.of)}`),
      data.tactics.timed ? null : h('p', { class: 'hint' }, 'The step has no time: all choices of the tape are listed.'),
      !data.tactics.of ? h('p', { class: 'hint' }, 'None recorded.') : scroller('Kernel choices', h('table', { class: 'data' }, head(['op', 'implementation', 'tactic', 'source']),
        h('tbody', {}, data.tactics.rows.map((t) => h('tr', {}, h('td', { class: 'mono wrap', title: t.key }, t.op), h('td', { class: 'wrap' }, t.implementation ?? NONE), h('td', { class: 'mono wrap' }, t.tactic ?? NONE), h('td', {}, t.source))))))));
}
