// Starts the page, chooses the screen for each address, hands on the keys.

import { ServerGone, getJson, getTag, runPath, scope, traffic } from './api.js';
import { byId, h, put } from './dom.js';
import { reader } from './keys.js';
import { notice } from './notices.js';
import { current, format, link, onChange, replace } from './route.js';
import { copyLink, drawHeader, drawRail, drawStatus, drawTabs, unsay, setHidden, showHelp } from './shell.js';
import { toggle } from './theme.js';

// a screen is fetched when it is first looked at
const SCREENS = {
  home: () => import('./home.js'),
  overview: () => import('./overview.js'),
  seqs: () => import('./list.js'),
  seq: () => import('./sequence.js'),
  timeline: () => import('./timeline.js'),
  weights: () => import('./weights.js'),
  layers: () => import('./layers.js'),
  routing: () => import('./routing.js'),
  causes: () => import('./causes.js'),
  sides: () => import('./sides.js'),
  basket: () => import('./basket.js'),
};
const SHOWN = Object.keys(SCREENS);
const POLL_MS = 3000;

const main = byId('main');
let screen = null; // {update(state): boolean, keys, close()} of the one that is open
let abort = new AbortController();
let runs = { runs: [], failures: [] };
let followed = null; // what the poll has seen last

async function show(state) {
  if (screen && screen.update && screen.update(state)) {
    decorate(state);
    return;
  }
  abort.abort();
  abort = new AbortController();
  const { signal } = abort;
  if (screen && screen.close) screen.close();
  screen = null;
  setHidden(0);
  main.setAttribute('aria-busy', 'true');
  try {
    runs = await getJson('api/runs', {}, signal);
    state = named(state);
    decorate(state);
    const load = SCREENS[state.screen];
    if (!load) throw new Error(`no such page: ${location.hash}`);
    const { open } = await load();
    const opened = await open({ state, main, runs, signal });
    if (signal.aborted) {
      if (opened.close) opened.close();
      return;
    }
    screen = opened;
    followed = null;
    await opened.ready;
  } catch (error) {
    if (error.name !== 'AbortError' && !signal.aborted) showError(error, state);
  } finally {
    if (!signal.aborted) main.removeAttribute('aria-busy');
  }
}

// A run with several reports names the one that is shown in its address: a link that is passed on must
// not change its meaning when another report is added.
function named(state) {
  const run = runs.runs.find((r) => r.id === state.run);
  if (!run || run.reports.length < 2 || state.params.get('rep')) return state;
  replace(link(state, { params: { rep: run.report } }), { quiet: true });
  return current();
}

function decorate(state) {
  const run = runs.runs.find((r) => r.id === state.run);
  drawHeader(state, run);
  drawRail(state, runs);
  drawTabs(state, SHOWN);
  document.title = [state.seq, run && run.name, 'rolltape'].filter(Boolean).join(' \u00b7 ');
}

function showError(error, state) {
  if (error instanceof ServerGone) {
    showGone();
    return;
  }
  if (!error.problem) console.error(error);
  const title = error.problem ? error.problem.title : 'This page could not be shown';
  const up = state.seq ? 'seqs' : state.run && state.screen !== 'overview' ? 'overview' : 'home';
  const back = link(state, { screen: up, seq: null, ...(up === 'home' ? { run: null } : {}), params: { sort: null, q: null } });
  const { level, commands } = error.problem || {};
  put(main, notice({ level: level || 'error', title, text: error.message, commands, extra: h('p', {}, h('a', { href: back }, 'Back')) }));
}

function showGone() {
  if (byId('gone')) return;
  const banner = notice({
    level: 'error',
    title: 'The server does not answer',
    text: 'Start `rolltape view` again with the same --port, or forward the port again. This page tries every 3 seconds.',
    extra: h('button', { type: 'button', on: { click: retry } }, 'Retry now'),
  });
  banner.id = 'gone';
  main.prepend(banner);
}

async function retry() {
  try {
    await getJson('api/runs');
  } catch {
    return; // the banner stays, the status line says why
  }
  const banner = byId('gone');
  if (banner) banner.remove();
  if (!screen) show(current());
}

// A tape that is still being written: overview and list follow it; the strip says that it grew.
async function poll() {
  if (traffic.gone) {
    showGone();
    await retry();
    return;
  }
  const state = current();
  if (runs.follow && screen) await look(state);
  const run = runs.runs.find((r) => r.id === state.run);
  if (!run || run.sealed !== false || !screen) return;
  try {
    const tag = await getTag(runPath(state), scope(state), abort.signal);
    const grown = followed !== null && tag !== followed;
    followed = tag;
    if (grown && screen && screen.grown) screen.grown(() => reopen());
    else if (grown) reopen();
  } catch (error) {
    if (error instanceof ServerGone) showGone();
    else if (error.name !== 'AbortError') drawStatus();
  }
}

// With --follow tapes and reports appear later: the list on the left, and the list of runs, follow.
async function look(state) {
  try {
    const found = await getJson('api/runs', {}, abort.signal);
    const names = (answer) => JSON.stringify(answer.runs.map((r) => [r.id, r.reports.map((p) => p.id)]));
    if (names(found) === names(runs)) return;
    const of = (answer) => JSON.stringify(answer.runs.filter((r) => r.id === state.run));
    const here = of(found) !== of(runs);
    runs = found;
    decorate(state);
    if (state.screen === 'home' || (here && !screen.grown)) reopen();
    else if (here) screen.grown(() => reopen());
  } catch (error) {
    if (error instanceof ServerGone) showGone();
    else if (error.name !== 'AbortError') drawStatus();
  }
}

function reopen() {
  if (screen && screen.close) screen.close();
  screen = null;
  show(current());
}

async function starHere() {
  const here = current(); // as it was when the key was pressed
  (await import('./basket.js')).starHere(here, runs);
}

async function palette() {
  (await import('./palette.js')).openPalette(current(), runs, SHOWN);
}

const read = reader();
addEventListener('keydown', (event) => {
  if (byId('dialog').open) return;
  if (event.key === 'k' && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
    event.preventDefault();
    palette();
    return;
  }
  const key = read(event);
  if (key === null) return;
  if (key === 'Enter' && event.target.closest('a, button, summary, [role=slider]')) return;
  const actions = { c: copyLink, t: toggle, s: starHere, '?': showHelp, ...(screen && screen.keys) };
  const [name, number] = key.startsWith('go ') ? ['go', Number(key.slice(3))] : [key];
  if (actions[name]) {
    event.preventDefault();
    unsay();
    actions[name](number);
  }
});

byId('skip').addEventListener('click', (event) => {
  event.preventDefault(); // the fragment belongs to the route
  main.focus();
});

byId('top').addEventListener('palette', palette);

addEventListener('unhandledrejection', (event) => {
  if (event.reason && event.reason.name === 'AbortError') event.preventDefault();
  else if (event.reason instanceof ServerGone) {
    event.preventDefault();
    showGone();
  }
});

onChange(show);
setInterval(poll, POLL_MS);
drawStatus();
if (location.hash === '') history.replaceState(null, '', format({ screen: 'home' }));
show(current());
