// Ctrl+K: jump to a screen, a run, a report, a sequence or a token, or do something.

import { getJson, runPath, scope } from './api.js';
import { byId, h, put } from './dom.js';
import { best, tokenIn } from './palette_data.js';
import { go, link } from './route.js';
import { copyLink, showHelp } from './shell.js';
import { toggle } from './theme.js';

const RUN = [['overview', 'Overview'], ['seqs', 'Sequences'], ['timeline', 'Timeline'], ['weights', 'Weights'], ['causes', 'Causes']];
const SEQUENCE = [['seq', 'Tokens'], ['layers', 'Layers'], ['routing', 'Routing'], ['sides', 'Side by side']];

/** What can be chosen before anything is typed; `screens` are those that exist. */
export function entries(state, runs, screens = null) {
  const has = ([screen]) => screens === null || screens.includes(screen);
  const to = (changes) => ({ hash: link(state, changes) });
  const run = runs.runs.find((r) => r.id === state.run);
  return [
    ...(state.seq ? SEQUENCE.filter(has).map(([screen, text]) => ({ text, hint: `sequence ${state.seq}`, ...to({ screen }) })) : []),
    ...(run ? RUN.filter(has).map(([screen, text]) => ({ text, hint: `run ${run.name}`, ...to({ screen, seq: null }) })) : []),
    ...runs.runs.map((r) => ({ text: r.name, hint: r.open ? `tape, ${r.role}` : 'report only', ...to({ screen: 'overview', run: r.id, seq: null }) })),
    ...runs.runs.flatMap((r) => r.reports.map((p) => ({ text: p.name, hint: `report of ${r.name}, ${p.verdict}`, ...to({ screen: 'overview', run: r.id, seq: null, params: { rep: p.id } }) }))),
    { text: 'Basket', hint: 'what is starred', ...to({ screen: 'basket', run: null, seq: null }) },
    { text: 'Copy link', hint: 'action, key c', act: copyLink },
    { text: 'Light or dark', hint: 'action, key t', act: toggle },
    ...(state.run ? [{ text: 'Star or unstar', hint: 'action, key s', act: async () => (await import('./basket.js')).starHere(state, runs) }] : []),
    { text: 'Keys', hint: 'action, key ?', act: showHelp },
  ];
}

/** Opens the dialog. @param {Object} state @param {Object} runs answer of `api/runs` @param {?string[]} screens */
export function openPalette(state, runs, screens = null) {
  const dialog = byId('dialog');
  const known = entries(state, runs, screens);
  let shown = [];
  let at = 0;
  let asked = 0;
  let found = []; // sequences by id, from the server
  const list = h('ul', { id: 'palette-list', role: 'listbox', 'aria-label': 'Places and actions' });
  const box = h('input', {
    type: 'text', id: 'palette-input', role: 'combobox', autocomplete: 'off', spellcheck: 'false', 'aria-expanded': 'true', 'aria-autocomplete': 'list',
    'aria-controls': 'palette-list', 'aria-label': 'Go to, or do', placeholder: state.seq ? 'a screen, run, sequence id, or a position' : 'a screen, run, report or sequence id',
    on: { input: () => { ask(); draw(0); }, keydown: onKey },
  });
  const count = h('p', { class: 'sr', 'aria-live': 'polite' });
  dialog.className = 'palette';
  dialog.setAttribute('aria-label', 'Go to');
  dialog.removeAttribute('aria-labelledby');
  put(dialog, box, list, count);
  dialog.addEventListener('close', () => { dialog.className = ''; dialog.removeAttribute('aria-label'); asked = -1; }, { once: true });
  dialog.showModal();
  draw(0);
  box.focus();

  function draw(next) {
    const typed = box.value.trim();
    const tok = state.seq ? tokenIn(typed) : null;
    shown = [
      ...(tok === null ? [] : [{ text: `Go to token ${tok}`, hint: `sequence ${state.seq}`, hash: link(state, { screen: 'seq', params: { tok, win: null, at: null } }) }]),
      ...best(typed, [...known, ...found]),
    ];
    at = Math.min(Math.max(next, 0), Math.max(0, shown.length - 1));
    put(list, shown.length ? shown.map((entry, i) => h('li', { id: `palette-${i}`, role: 'option', 'aria-selected': String(i === at), on: { click: () => choose(entry) } },
      entry.text, h('span', { class: 'hint' }, entry.hint))) : h('li', { role: 'option', 'aria-disabled': 'true', class: 'hint' }, 'Nothing has that name.'));
    if (shown.length) {
      box.setAttribute('aria-activedescendant', `palette-${at}`);
      byId(`palette-${at}`).scrollIntoView({ block: 'nearest' });
    } else box.removeAttribute('aria-activedescendant');
    put(count, `${shown.length} found`);
  }

  async function ask() {
    const q = box.value.trim();
    found = [];
    if (!state.run || q.length < 2 || /[\s<>=:]/.test(q)) return;
    asked += 1;
    const mine = asked;
    try {
      const page = await getJson(runPath(state, 'seqs'), { ...scope(state), q, limit: 12 });
      if (mine !== asked) return; // something else was typed meanwhile, or it is closed
      found = page.rows.map((row) => ({ text: row.id, hint: 'sequence', hash: link(state, { screen: 'seq', seq: row.id }) }));
      draw(at);
    } catch (error) {
      if (!error.problem) throw error; // a filter that cannot be read finds nothing
    }
  }

  function onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[event.key];
    if (step) draw(at + step);
    else if (event.key === 'Enter' && shown[at]) choose(shown[at]);
    else return;
    event.preventDefault();
  }

  function choose(entry) {
    dialog.close();
    if (entry.act) setTimeout(entry.act); // after the dialog has given the focus back
    else go(entry.hash);
  }
}
