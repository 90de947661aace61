// What stands around every screen: header, run list, status line, help.

import { traffic } from './api.js';
import { copy } from './clipboard.js';
import { byId, h, put } from './dom.js';
import { count } from './format.js';
import { HELP, enabled, setEnabled } from './keys.js';
import { link } from './route.js';
import { toggle } from './theme.js';

let hidden = 0;
let note = '';

/** Says something once: in the status line and to a screen reader. */
export function say(text) {
  note = text;
  byId('live').textContent = text;
  drawStatus();
}

/** What was said is over: the reader went on. */
export function unsay() {
  note = '';
  drawStatus();
}

/** For screen readers only. */
export function whisper(text) {
  byId('live').textContent = text;
}

/** Rows that the filter hides, for the status line. */
export function setHidden(rows) {
  hidden = rows;
  drawStatus();
}

export function copyLink() {
  return copy(location.href, 'Link copied');
}

export function drawHeader(state, run) {
  const name = run ? run.name : state.run;
  const crumbs = [h('a', { href: link(state, { screen: 'home', run: null, seq: null }) }, 'rolltape')];
  if (state.run) {
    crumbs.push(h('a', { href: link(state, { screen: 'overview', seq: null }) }, name));
  }
  if (state.screen === 'basket') crumbs.push(h('span', { 'aria-current': 'page' }, 'basket'));
  if (state.seq) {
    crumbs.push(h('a', { href: link(state, { screen: 'seqs', seq: null }) }, 'sequences'));
    crumbs.push(h('span', { class: 'mono' }, state.seq));
  }
  put(
    byId('top'),
    h('nav', { 'aria-label': 'Breadcrumb' }, h('ol', { class: 'crumbs' }, crumbs.map((c) => h('li', {}, c)))),
    h(
      'div',
      { class: 'tools' },
      h('a', { class: 'button', id: 'basket-link', href: link(state, { screen: 'basket', run: null, seq: null }) }, 'Basket'),
      h('button', { type: 'button', id: 'goto', title: 'Ctrl K', on: { click: () => byId('top').dispatchEvent(new Event('palette')) } }, 'Go to'),
      h('button', { type: 'button', id: 'copy', on: { click: copyLink } }, 'Copy link'),
      h('button', { type: 'button', id: 'theme', on: { click: toggle } }, 'Light / dark'),
      h('button', { type: 'button', id: 'keys', on: { click: showHelp } }, 'Keys ?'),
    ),
  );
}

const RUN_TABS = [['overview', 'Overview'], ['seqs', 'Sequences'], ['timeline', 'Timeline'], ['weights', 'Weights'], ['causes', 'Causes']];
const SEQUENCE_TABS = [['seq', 'Tokens'], ['layers', 'Layers'], ['routing', 'Routing'], ['sides', 'Side by side']];

/** The other screens of the run, or of the sequence. */
export function drawTabs(state, screens) {
  const rows = state.seq ? SEQUENCE_TABS : state.run ? RUN_TABS : [];
  const shown = rows.filter(([screen]) => screens.includes(screen));
  const tab = ([screen, text]) => h('li', {}, h('a', { href: link(state, { screen, seq: state.seq }), 'aria-current': state.screen === screen ? 'page' : null }, text));
  put(byId('tabs'), shown.length > 1 ? h('ul', {}, shown.map(tab)) : null);
}

export function drawRail(state, answer) {
  const items = answer.runs.map((run) => {
    const here = run.id === state.run;
    return h(
      'li',
      { class: here ? 'here' : null },
      h('a', { href: link(state, { screen: 'overview', run: run.id, seq: null }), 'aria-current': here && state.screen === 'overview' ? 'page' : null, title: run.path || 'tape not open' },
        run.name),
      h('span', { class: 'kind' }, run.open ? run.role : 'report only'),
      run.reports.length
        ? h('ul', {}, run.reports.map((report) => {
          const shown = here && report.id === (state.params.get('rep') || run.report);
          return h('li', {},
            h('a', { href: link(state, { screen: 'overview', run: run.id, seq: null, params: { rep: report.id } }), 'aria-current': shown ? 'true' : null, title: report.b ? `against ${report.b}` : null },
              report.name),
            ' ', h('span', { class: `verdict v-${report.verdict}` }, report.verdict));
        }))
        : h('p', { class: 'kind' }, run.parent ? `replays ${run.parent}` : 'no report'),
    );
  });
  put(byId('rail'), h('h2', {}, 'Tapes'), h('ul', { class: 'runs' }, items));
}

export function drawStatus() {
  const parts = [
    traffic.pending ? `${traffic.pending} request${traffic.pending > 1 ? 's' : ''} under way` : 'ready',
    hidden ? `${count(hidden)} rows hidden by the filter` : null,
    note || null,
  ].filter(Boolean);
  put(
    byId('status'),
    h('span', {}, parts.join(' \u00b7 ')),
    traffic.error ? h('span', { class: 'err' }, `last error: ${traffic.error}`) : null,
  );
}

export function showHelp() {
  const dialog = byId('dialog');
  const box = h('input', { type: 'checkbox', id: 'single', checked: enabled() || null, on: { change: (e) => setEnabled(e.target.checked) } });
  put(
    dialog,
    // a dialog gives the focus to its first control, here the last thing to read
    h('h2', { id: 'help-title', tabindex: -1, autofocus: true }, 'Keys'),
    h('div', { class: 'help' }, HELP.map(([title, rows]) =>
      h('table', {}, h('caption', {}, title), h('tbody', {}, rows.map(([key, what]) =>
        h('tr', {}, h('th', { scope: 'row' }, h('kbd', {}, key)), h('td', {}, what))))))),
    h('p', {}, box, ' ', h('label', { for: 'single' }, 'single keys act (Esc always does)')),
    h('form', { method: 'dialog' }, h('button', {}, 'Close')),
  );
  dialog.setAttribute('aria-labelledby', 'help-title');
  dialog.showModal();
}

traffic.changed = drawStatus;
