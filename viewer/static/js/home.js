// The runs that are open.

import { h, put } from './dom.js';
import { notice } from './notices.js';
import { link, replace } from './route.js';
import { scroller } from './scroll.js';

export async function open({ state, main, runs }) {
  const withReport = runs.runs.filter((run) => run.reports.length);
  if (!runs.failures.length && (runs.runs.length === 1 || withReport.length === 1)) {
    // one thing to look at: go there, and leave no page behind that Back would bounce on
    replace(link(state, { screen: 'overview', run: (withReport[0] || runs.runs[0]).id }));
    return {};
  }
  put(
    main,
    h('h1', {}, 'Tapes and reports'),
    runs.failures.map((f) => notice({ level: 'error', title: 'A path could not be opened', text: f.message })),
    runs.runs.length ? table(state, runs) : empty(runs.failures.length > 0),
  );
  return {};
}

function empty(failed) {
  return notice({
    level: 'info',
    title: 'No runs',
    text: failed
      ? 'None of the paths given could be opened; see above.'
      : 'There is no tape and no report in the folders given. Record one, or name the folder that holds some.',
    commands: failed ? [] : ['rolltape record -o runs/a -- python rollout.py', 'rolltape view runs'],
  });
}

function table(state, runs) {
  const rows = runs.runs.map((run) => {
    const href = link(state, { screen: 'overview', run: run.id });
    return h(
      'tr',
      {},
      h('th', { scope: 'row' }, h('a', { href }, run.name)),
      h('td', {}, run.open ? run.role : 'tape not open'),
      h('td', {}, run.open ? (run.sealed ? 'sealed' : 'still recording') : '\u2013'),
      h('td', {}, run.reports.length
        ? run.reports.map((r) => h('div', {}, h('a', { href: link(state, { screen: 'overview', run: run.id, params: { rep: r.id } }) }, r.name), ' ', h('span', { class: `verdict v-${r.verdict}` }, r.verdict)))
        : 'no report'),
      h('td', { class: 'mono path' }, run.path || run.id),
    );
  });
  return scroller('Tapes', h('table', { class: 'data' },
    h('thead', {}, h('tr', {}, ['tape', 'role', 'state', 'reports', 'where'].map((t) => h('th', { scope: 'col' }, t)))),
    h('tbody', {}, rows)));
}
