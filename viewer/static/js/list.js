// Sequence list: sorted and filtered by the server, one page at a time.

import { getJson, runPath, scope } from './api.js';
import { symlog } from './colour.js';
import { byId, h, num, put, svg } from './dom.js';
import { COMMAND } from './folder.js';
import { NONE, count, percent, short } from './format.js';
import { command, notice, notices } from './notices.js';
import { current, go, link, replace } from './route.js';
import { scroller } from './scroll.js';
import { setHidden } from './shell.js';

const COLUMNS = [
  { name: 'id', text: 'sequence' },
  { name: null, text: 'along it', title: 'largest |delta| by position, on the fixed scale of 1 nat' },
  { name: 'group', text: 'group' },
  { name: 'finish', text: 'finish' },
  { name: 'prompt_len', text: 'prompt', n: true },
  { name: 'response_len', text: 'response', n: true },
  { name: 'weight_version', text: 'weights', n: true, title: 'weight version that produced the response; first to last if it changed' },
  { name: 'mean_abs', text: 'mean |\u0394|', n: true, title: 'nat' },
  { name: 'p99_abs', text: 'p99', n: true, title: '99th percentile of |delta|, nat' },
  { name: 'max_abs', text: 'max |\u0394|', n: true, title: 'nat; the link goes to the token' },
  { name: 'first_over', text: 'first > 0.1', n: true, title: 'first position whose |\u0394| is over 0.1 nat' },
  { name: 'disagree_share', text: 'routing', n: true, title: 'share of routing decisions that disagree' },
  { name: 'tokens_any_share', text: 'tokens', n: true, title: 'share of tokens with any routing disagreement' },
  { name: null, text: 'left out' },
];
const EXPORTED = 100000; // rows that one answer holds
const HELP = COMMAND ? 'Words match id, group or finish; all of them have to. Conditions such as max_abs > 0.5 need the viewer:'
  : 'Words match id, group or finish. Conditions: max_abs > 0.5 and (wver_span > 1 or not finish = length); a space joins like and.';
const FACETS = ['finish', 'weight_version'];

export async function open({ state, main, signal }) {
  const params = { ...scope(state, ['rep', 'sort', 'q', 'after']) };
  let data = null;
  let problem = null;
  try {
    data = await getJson(runPath(state, 'seqs'), { ...params, facets: FACETS.join(',') }, signal);
  } catch (error) {
    if (!error.problem || !['q', 'sort', 'after'].includes(error.problem.field)) throw error;
    problem = error;
  }
  if (signal.aborted) return {};
  put(
    main,
    h('h1', {}, 'Sequences'),
    data ? notices(data.notices, { brief: true }) : null,
    filter(state, data, problem),
    data ? facets(state, data) : null,
    data ? body(state, data) : wrong(state, problem),
  );
  if (data) {
    setHidden(data.total - data.matched);
    const row = state.params.get('row');
    const chosen = row && main.querySelector(`a[data-row="${CSS.escape(row)}"]`);
    if (chosen) chosen.focus();
  }
  return { keys: keys(main) };
}

function filter(state, data, problem) {
  const bad = problem && problem.problem.field === 'q' && !problem.problem.level;
  const box = h('input', {
    type: 'search', id: 'filter', value: state.params.get('q') || '', spellcheck: 'false', autocomplete: 'off',
    'aria-describedby': 'filter-help', 'aria-invalid': bad ? 'true' : null, placeholder: COMMAND ? 'words' : 'max_abs>0.1 finish=length group:0-1',
  });
  const submit = (event) => {
    event.preventDefault();
    go(link(current(), { params: { q: box.value.trim(), after: null, row: null } }));
  };
  const counts = data ? `${count(data.matched)} of ${count(data.total)} sequences` : '';
  return h('form', { class: 'filter', role: 'search', on: { submit } },
    h('label', { for: 'filter' }, 'Filter'), box, h('button', {}, 'Apply'),
    state.params.get('q') ? h('a', { href: link(state, { params: { q: null, after: null } }) }, 'Clear') : null,
    h('span', { class: 'counts' }, counts),
    h('p', { id: 'filter-help', class: bad ? 'hint bad' : 'hint' }, bad ? problem.message : HELP),
    COMMAND && !bad ? command(COMMAND) : null);
}

/** Words of a filter, if it is no more than that: each can be dropped by itself. */
function words(q) {
  return /\b(and|or|not)\b|[()"]/.test(q) ? [q] : q.split(/\s+/).filter(Boolean);
}

function facets(state, data) {
  const q = state.params.get('q') || '';
  const chosen = words(q);
  const to = (next) => link(state, { params: { q: next.join(' ') || null, after: null, row: null } });
  const chips = chosen.map((word) => h('a', { class: 'chip on', href: to(chosen.filter((w) => w !== word)), title: 'drop this condition' }, word, h('span', { 'aria-hidden': 'true' }, ' \u00d7'), h('span', { class: 'sr' }, ' drop')));
  const rows = FACETS.filter((name) => data.facets && data.facets[name] && data.facets[name].values.length > 1).map((name) => {
    const facet = data.facets[name];
    const column = COLUMNS.find((c) => c.name === name).text;
    return h('li', {}, h('span', { class: 'hint' }, `${column}: `), facet.values.map(([value, n]) => {
      const word = `${name}=${value === 'null' ? '"null"' : value}`;
      if (value === null || chosen.includes(word) || /\s/.test(String(value))) return h('span', { class: 'chip' }, value === null ? 'none' : String(value), ' ', h('b', {}, count(n)));
      return h('a', { class: 'chip', href: to([...chosen, word]) }, String(value), ' ', h('b', {}, count(n)));
    }), facet.more ? h('span', { class: 'hint' }, `and ${count(facet.more)} more values`) : null, facet.timed_out ? h('span', { class: 'hint' }, ' not all rows were counted') : null);
  });
  const query = new URLSearchParams({ ...scope(state, ['rep', 'sort', 'q']) });
  const save = (format, text) => h('a', { href: `${runPath(state, 'seqs')}?${query}&format=${format}`, download: `sequences.${format}` }, text);
  return h('div', { class: 'facets' }, chips.length ? h('p', {}, chips) : null, rows.length ? h('ul', {}, rows) : null,
    data.rows.length && !COMMAND ? h('p', { class: 'hint' }, `${data.matched > EXPORTED ? `The first ${count(EXPORTED)}` : 'All'} matching rows as `, save('csv', 'CSV'), ' or ', save('arrow', 'Arrow')) : null);
}

/** The largest |delta| along a sequence, on one fixed scale for all of them. */
function spark(values) {
  if (!values || !values.length) return NONE;
  const size = 64 / values.length;
  const bars = values.map((value, i) => {
    if (value === null) return null;
    const t = Number.isFinite(Number(value)) ? symlog(Math.abs(Number(value)), 1) : 1;
    return svg('rect', { x: i * size, y: 16 - Math.max(t * 16, t > 0 ? 1 : 0), width: Math.max(size - 0.4, 0.6), height: Math.max(t * 16, t > 0 ? 1 : 0), class: Number(value) > 0.1 ? 'over' : 'bar' });
  });
  return svg('svg', { viewBox: '0 0 64 16', class: 'spark', 'aria-hidden': 'true' }, bars);
}

function wrong(state, problem) {
  const field = problem.problem.field;
  return notice({
    level: problem.problem.level || 'error', title: problem.problem.level ? problem.problem.title : `The ${field === 'q' ? 'filter' : field} cannot be read`,
    text: problem.message, commands: problem.problem.commands,
    extra: h('p', {}, h('a', { href: link(state, { params: { [field]: null } }) }, 'Show the list without it')),
  });
}

function body(state, data) {
  if (!data.total) {
    const text = data.run.sealed ? 'The tape is sealed and holds no sequence: no request of an engine was recorded. rolltape doctor says what would be recorded here, and what not and why.' : 'The tape holds no sequence yet. A recording shows here as soon as its first request begins.';
    return notice({ level: 'info', title: 'No sequences', text });
  }
  if (!data.rows.length) {
    return notice({
      level: 'info', title: 'The filter leaves no row',
      text: `None of ${count(data.total)} sequences matches.`,
      extra: h('p', {}, h('a', { href: link(state, { params: { q: null, after: null } }) }, 'Drop the filter')),
    });
  }
  return [
    scroller('Sequences', h('table', { class: 'data list', id: 'list' },
      h('caption', { class: 'sr' }, `Sequences, sorted by ${data.sort}`),
      h('thead', {}, h('tr', {}, COLUMNS.map((column) => header(state, column, data.sort)))),
      h('tbody', {}, data.rows.map((row) => line(state, row))))),
    h('p', { class: 'pager' },
      `${count(data.start + 1)} to ${count(data.start + data.rows.length)} of ${count(data.matched)}`,
      data.start ? h('a', { href: link(state, { params: { after: null, row: null } }) }, 'First page') : null,
      data.next ? h('a', { href: link(state, { params: { after: data.next, row: null } }), id: 'next' }, 'Next page') : null),
  ];
}

function header(state, column, sort) {
  if (!column.name) return h('th', { scope: 'col', title: column.title || null }, column.text);
  const name = sort.replace(/^-/, '');
  const down = sort.startsWith('-');
  const here = name === column.name;
  // numbers are looked at from the largest on, names from a to z
  const next = here ? (down ? column.name : `-${column.name}`) : column.n ? `-${column.name}` : column.name;
  return h('th', { scope: 'col', class: column.n ? 'n' : null, 'aria-sort': here ? (down ? 'descending' : 'ascending') : null },
    h('a', { href: link(state, { params: { sort: next, after: null, row: null } }), title: column.title || null },
      column.text, here ? h('span', { class: 'arrow', 'aria-hidden': 'true' }, down ? '\u25bc' : '\u25b2') : null));
}

function line(state, row) {
  const open = link(state, { screen: 'seq', seq: row.id });
  const at = (tok, text) => h('a', { href: link(state, { screen: 'seq', seq: row.id, params: { tok } }) }, text);
  const weights = row.weight_version_min !== row.weight_version && row.weight_version_min !== null
    ? `${row.weight_version_min}\u2013${row.weight_version}` : row.weight_version ?? NONE;
  const press = (event) => {
    if (event.target.closest('a') || String(getSelection())) return;
    go(open);
  };
  return h('tr', { on: { click: press } },
    h('th', { scope: 'row', class: 'mono' }, h('a', { href: open, 'data-row': row.id, on: { focus: () => remember(row.id) } }, row.id)),
    h('td', {}, spark(row.spark)),
    h('td', { class: 'mono group', title: row.group }, row.group ?? NONE),
    h('td', {}, row.finish ?? NONE),
    num(count(row.prompt_len)), num(count(row.response_len)), num(weights),
    num(short(row.mean_abs)),
    num(short(row.p99_abs)),
    num(row.max_at === null ? short(row.max_abs) : at(row.max_at, short(row.max_abs))),
    num(row.first_over === null ? NONE : at(row.first_over, String(row.first_over))),
    num(percent(row.disagree_share)), num(percent(row.tokens_any_share)),
    h('td', { class: 'flag left' }, leftOut(row)));
}

function leftOut(row) {
  if (!row.in_report) return 'not in the report';
  if (row.masked === null) return 'could not be compared';
  return [[row.masked, 'masked'], [row.missing, 'missing'], [row.non_finite, 'not finite']]
    .filter(([n]) => n).map(([n, word]) => `${count(n)} ${word}`).join(', ');
}

function remember(id) {
  replace(link(current(), { params: { row: id } }), { quiet: true });
}

function keys(main) {
  const links = () => [...main.querySelectorAll('a[data-row]')];
  const move = (to) => () => {
    const all = links();
    const here = all.indexOf(document.activeElement);
    const next = all[Math.min(Math.max(to(here, all.length), 0), all.length - 1)];
    if (next) next.focus();
  };
  return {
    j: move((i) => i + 1),
    k: move((i) => (i < 0 ? 0 : i - 1)),
    'g g': move(() => 0),
    G: move((_, n) => n - 1),
    '/': () => byId('filter') && byId('filter').focus(),
  };
}
