// URL <-> state, and nothing else touches the address.
//
//   #/                              runs
//   #/run/{run}                     overview
//   #/run/{run}/seqs?sort=&q=       sequence list
//   #/run/{run}/timeline, /weights, /causes
//   #/run/{run}/seq/{seq}?tok=      token strip
//   #/run/{run}/seq/{seq}/layers, /routing, /sides
//   #/basket                        what was starred
//
// A state is {screen, run, seq, params}. Parameters that a screen does not know are kept.

/** Screens of a run, and of a sequence, besides its first one. */
export const OF_RUN = ['seqs', 'timeline', 'weights', 'causes'];
export const OF_SEQUENCE = ['layers', 'routing', 'sides'];

/** Parameters that mean something on one screen only; they do not follow to another one. */
const OWN = {
  seqs: ['after', 'row'],
  seq: ['at', 'win', 'mask'],
  timeline: ['t0', 't1', 'step', 'lane'],
  weights: ['version'],
  causes: ['cause'],
  layers: ['metric', 'full', 'thr', 'open', 'from', 'to'],
  routing: ['from', 'to', 'eps'],
  sides: ['a', 'b', 'show'],
};
/** Those that follow through the screens of one sequence. */
const SHARED = ['tok', 'layer'];

/** @param {string} hash @returns {{screen: string, run: ?string, seq: ?string, params: URLSearchParams}} */
export function parse(hash) {
  const [path, query = ''] = split(hash.replace(/^#/, ''), '?');
  const params = new URLSearchParams(query);
  const parts = path.split('/').filter(Boolean).map(decode);
  const state = { screen: 'unknown', run: null, seq: null, params };
  const [head, run, kind, seq, part] = parts;
  if (!parts.length) state.screen = 'home';
  else if (head === 'basket' && parts.length === 1) state.screen = 'basket';
  else if (head === 'run' && parts.length >= 2) {
    state.run = run;
    if (parts.length === 2) state.screen = 'overview';
    else if (parts.length === 3 && OF_RUN.includes(kind)) state.screen = kind;
    else if (kind === 'seq' && parts.length === 4) [state.screen, state.seq] = ['seq', seq];
    else if (kind === 'seq' && parts.length === 5 && OF_SEQUENCE.includes(part)) [state.screen, state.seq] = [part, seq];
  }
  return state;
}

/** The address of a state; the inverse of `parse`. */
export function format({ screen, run, seq, params }) {
  let path = '#/';
  if (screen === 'basket') path = '#/basket';
  if (screen === 'overview') path = `#/run/${encode(run)}`;
  if (OF_RUN.includes(screen)) path = `#/run/${encode(run)}/${screen}`;
  if (screen === 'seq') path = `#/run/${encode(run)}/seq/${encode(seq)}`;
  if (OF_SEQUENCE.includes(screen)) path = `#/run/${encode(run)}/seq/${encode(seq)}/${screen}`;
  const query = params ? params.toString() : '';
  return query ? `${path}?${query}` : path;
}

/**
 * The address of another view: `state` with changes.
 * @param {object} state
 * @param {{screen?: string, run?: string, seq?: string, params?: Object<string, ?(string|number)>}} changes
 *   a parameter that is null is removed.
 */
export function link(state, changes) {
  const next = { ...state, ...changes, params: new URLSearchParams(state.params) };
  const elsewhere = next.seq !== state.seq || next.run !== state.run;
  if (elsewhere || next.screen !== state.screen) {
    for (const [screen, names] of Object.entries(OWN)) {
      if (screen !== next.screen || elsewhere) names.forEach((name) => next.params.delete(name));
    }
  }
  if (elsewhere || !isOfSequence(next.screen)) SHARED.forEach((name) => next.params.delete(name));
  if (next.run !== state.run) ['rep', 'q', 'sort'].forEach((name) => next.params.delete(name));
  for (const [name, value] of Object.entries(changes.params || {})) {
    if (value === null || value === undefined || value === '') next.params.delete(name);
    else next.params.set(name, String(value));
  }
  return format(next);
}

function isOfSequence(screen) {
  return screen === 'seq' || OF_SEQUENCE.includes(screen);
}

/** A whole number that is not negative, or null. */
export function integer(text) {
  return text !== null && text !== undefined && /^\d{1,9}$/.test(text) ? Number(text) : null;
}

export function current() {
  return parse(location.hash);
}

const listeners = [];

/** Calls `listener(state)` whenever the view changes. */
export function onChange(listener) {
  if (!listeners.length) addEventListener('hashchange', () => notify());
  listeners.push(listener);
}

function notify() {
  listeners.forEach((listener) => listener(current()));
}

/** Shows another view and adds it to the history. */
export function go(hash) {
  if (hash === location.hash) return;
  history.pushState(null, '', hash);
  notify();
}

/** Shows another view in place of this one in the history. */
export function replace(hash, { quiet = false } = {}) {
  if (hash === location.hash) return;
  history.replaceState(null, '', hash);
  if (!quiet) notify();
}

function split(text, mark) {
  const at = text.indexOf(mark);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

function encode(part) {
  return encodeURIComponent(part).replace(/%3A/gi, ':');
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a lone % is not an escape
  }
}
