// Choices of kernels, A against B, filtered and paged by the server.

import { getJson, scope } from './api.js';
import { h, put } from './dom.js';
import { NONE, count, plural, short } from './format.js';
import { notice } from './notices.js';
import { current } from './route.js';
import { scroller } from './scroll.js';

/** Fills `section` with the table; the filter stands beside it. */
export async function tacticTable(section, path, signal) {
  let query = '';
  const body = h('div', {});
  const box = h('input', { type: 'search', id: 'tactic-filter', autocomplete: 'off', spellcheck: 'false', placeholder: 'fused_moe cached', 'aria-describedby': 'tactic-help' });
  const submit = (event) => {
    event.preventDefault();
    query = box.value.trim();
    load(null);
  };
  const form = h('form', { class: 'filter', role: 'search', on: { submit } },
    h('label', { for: 'tactic-filter' }, 'Filter'), box, h('button', {}, 'Apply'),
    h('p', { id: 'tactic-help', class: 'hint' }, 'All words must stand in operator, key, graph or answer; differs keeps the choices on which A and B differ.'));
  const load = async (after) => {
    const data = await getJson(path, { ...scope(current()), q: query || null, after }, signal);
    if (!signal.aborted) draw(body, data, query, load);
    return data;
  };
  const data = await load(null);
  if (signal.aborted) return;
  const any = data.total || data.unrecorded.length;
  put(section, h('h2', {}, 'Kernel choices'), any ? [data.total ? form : null, body] : notice({
    level: 'info', title: 'No kernel choices recorded',
    text: 'No tuner of this run was watched: the engine uses none that is known, or the tape is older than format 1.2. --profile-kernels names the kernels of the first batch shapes (transformers).',
    commands: ['rolltape record --profile-kernels 4 -o TAPE -- python rollout.py'],
  }));
}

function draw(body, data, query, load) {
  const cell = (answers) => h('td', { class: 'wrap' }, answers.length ? answers.map((a) => h('div', {},
    h('span', { class: 'mono' }, a.implementation ?? NONE), a.tactic === null ? null : [' ', h('span', { class: 'mono' }, a.tactic)],
    h('span', { class: 'hint' }, ` ${a.source}${a.time_ms === null ? '' : `, ${short(a.time_ms)} ms`}${a.count > 1 ? `, \u00d7 ${count(a.count)}` : ''}${a.processes > 1 ? ` in ${plural(a.processes, 'process', 'processes')}` : ''}`))) : NONE);
  let last = null;
  const rows = data.rows.flatMap((row) => {
    const group = `${row.tuner} \u00b7 ${row.op}`;
    const title = group === last ? null : h('tr', { class: 'group' }, h('th', { colspan: data.b ? 5 : 3, scope: 'colgroup', class: 'mono' }, group));
    last = group;
    return [title, h('tr', { class: row.differs ? 'differs' : null },
      h('td', { class: 'mono wrap key' }, row.key), h('td', { class: 'mono' }, row.graph ?? 'eager'), cell(row.a),
      data.b ? [cell(row.b), h('td', {}, row.differs ? h('strong', {}, '\u2260 differs') : row.differs === false ? '=' : row.only ? `only in ${row.only.toUpperCase()}` : NONE)] : null)];
  });
  const names = ['key', 'graph', data.b ? 'A' : 'answers', ...(data.b ? ['B', 'verdict'] : [])];
  put(body,
    data.total ? h('p', { class: 'counts', id: 'tactic-counts' }, `${count(data.matched)} of ${plural(data.total, 'choice')}`,
      data.b ? (data.b_recorded ? `; A and B differ in ${count(data.differ)}` : '; B recorded none') : '; tape B is not open') : null,
    data.rows.length ? scroller('Kernel choices', h('table', { class: 'data tactics', id: 'tactics' },
      h('thead', {}, h('tr', {}, names.map((n) => h('th', { scope: 'col' }, n)))), h('tbody', {}, rows.filter(Boolean))))
      : data.total ? notice({ level: 'info', title: 'The filter leaves no choice', text: `None of ${plural(data.total, 'choice')} matches ${query}.` }) : h('p', { class: 'hint' }, 'None recorded.'),
    h('p', { class: 'pager' },
      data.start ? h('button', { type: 'button', on: { click: () => load(null) } }, 'First page') : null,
      data.next ? h('button', { type: 'button', id: 'tactic-next', on: { click: () => load(data.next) } }, 'Next page') : null),
    data.unrecorded.length ? h('details', { open: !data.total || null }, h('summary', {}, `What cannot be seen: ${count(data.unrecorded.length)}`),
      h('table', { class: 'data' }, h('thead', {}, h('tr', {}, ['library', 'operators', 'why'].map((n) => h('th', { scope: 'col' }, n)))),
        h('tbody', {}, data.unrecorded.map((u) => h('tr', {}, h('td', {}, u.tuner), h('td', { class: 'mono' }, u.op), h('td', { class: 'wrap' }, u.reason ?? 'no reason was recorded')))))) : null);
}
