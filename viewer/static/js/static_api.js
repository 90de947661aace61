// In an exported folder: gives the page the answers that were saved, in place of a server.
// The page is otherwise the same; js/folder.js tells it what to say of what was left out.

import { binned, chosen, listed, siteRows, windowOf } from './folder_data.js';
import { decode, encode } from './safetensors.js';

const real = window.fetch.bind(window);
const root = new URL('.', document.baseURI);
let manifest = null;

/** What an answer is looked up by; `_key` in viewer/export.py makes the same. */
export function keyOf(path, params) {
  const given = Object.entries(params).filter(([, v]) => v !== null && v !== undefined).sort(([x], [y]) => (x < y ? -1 : 1));
  return path + (given.length ? `?${given.map(([k, v]) => `${k}=${v}`).join('&')}` : '');
}

window.fetch = async (input, init = {}) => {
  const url = new URL(input, document.baseURI);
  const path = url.pathname.slice(root.pathname.length);
  if (url.origin !== root.origin || !path.startsWith('api/')) return real(input, init);
  if (!manifest) manifest = real(new URL('bundle.json', root)).then((answer) => answer.json());
  const params = Object.fromEntries(url.searchParams);
  try {
    return await answerOf(await manifest, path, params, init);
  } catch (error) {
    if (error instanceof Missing) return leftOut(404, 'Not in this folder', error.message);
    throw error;
  }
};

class Missing extends Error {}

const command = () => document.querySelector('meta[name=rolltape-folder]').content;

async function saved(bundle, key, init, missing) {
  const file = bundle.files[key];
  if (!file) {
    throw new Missing(`${missing || 'This folder holds chosen sequences only.'} All of it is shown by`);
  }
  const answer = await real(new URL(file, root), { signal: init.signal });
  if (!file.endsWith('.problem.json')) return answer;
  const told = await answer.json();
  return problem(told.status, told);
}

const OUTSIDE = {
  tokens: 'There is no such position.',
  routing: 'There is no such position.',
  steps: 'Of single steps this folder has those that drew a token of its sequences.',
};

async function answerOf(bundle, path, params, init) {
  const { rep, a, b } = params;
  const ask = (key, missing) => saved(bundle, key, init, missing);
  const one = path.match(/^(.*\/(tokens|routing|steps\/[^/]+))\/(\d+)$/);
  if (one) {
    const number = Number(one[3]);
    const outside = OUTSIDE[one[2].split('/')[0]];
    const details = await (await ask(keyOf(`${one[1]}/${number - (number % bundle.chunk)}`, { rep }), outside)).json();
    return details[number] ? json(details[number]) : ask(null, outside);
  }
  const sites = path.match(/^(.*)\/layers\/(\d+)$/);
  if (sites) {
    const [tile] = await tiles(bundle, `${sites[1]}/site-values`, { rep, start: sites[2], end: Number(sites[2]) + 1 }, init);
    return json(siteRows(tile, Number(sites[2])));
  }
  const last = path.slice(path.lastIndexOf('/') + 1);
  if (last === 'seqs') {
    const page = await (await ask(keyOf(path, { rep }))).json();
    const rows = listed(page.rows, params);
    if (!rows) return leftOut(400, 'This folder filters by words alone', 'Conditions, and, or, not and parentheses need the viewer:', { field: 'q' });
    return json({ ...page, sort: params.sort || page.sort, rows, matched: rows.length });
  }
  const over = path.match(/^(.*\/seqs\/([^/]+))\/(sides\/)?over$/);
  if (over) return json(await walk(bundle, over[1], Boolean(over[3]), params, init));
  if (last === 'tokens') {
    // a part of a window is answered with all of it, which says where it begins
    const [, , run, , seq] = path.split('/').map(decodeURIComponent);
    const start = params.start - (params.start % bundle.window);
    return ask(keyOf(path, { rep, start, end: Math.min(start + bundle.window, bundle.lengths[run]?.[seq]) }));
  }
  if (/\/sides(\/info)?$/.test(path)) return ask(keyOf(path, { a, b, start: params.start, end: params.end }));
  if (last === 'heat') return heat(bundle, path, params, init);
  if (last === 'front') return ask(keyOf(path, { rep, threshold: params.threshold }));
  if (last === 'routing') return ask(keyOf(path, { rep, start: params.start, end: params.end, bins: params.bins, layers: params.layers }), 'Routing is here in windows of 2,048 positions.');
  if (last === 'tactics') return json(chosen(await (await ask(keyOf(path, { rep }))).json(), params));
  if (last === 'timeline') {
    const [t0, t1] = windowOf(bundle.timeline[path.split('/')[2]] || [], params.t0, params.t1) || [];
    return ask(keyOf(path, { rep, t0, t1 }));
  }
  if (last === 'weights' && params.version) {
    const parts = await (await ask(keyOf(`${path}/versions`, { rep }))).json();
    const part = parts.find(({ digests }) => digests.versions.includes(Number(params.version)));
    return json({ ...await (await ask(keyOf(path, { rep }))).json(), ...part });
  }
  return ask(keyOf(path, { rep }));
}

/** The tile that is asked for, from those of one position a cell. */
async function heat(bundle, path, params, init) {
  const [start, end] = [Number(params.start), Number(params.end)];
  const { arrays, metadata } = binned(await tiles(bundle, path, { ...params, sites: '*', bins: null }, init),
    { start, end, bins: params.bins && Number(params.bins), sites: params.sites });
  return new Response(encode(arrays, metadata));
}

/** What was saved of positions start to end, in tiles. */
async function tiles(bundle, path, { start, end, ...params }, init) {
  const place = path.slice(0, path.lastIndexOf('/'));
  const { n } = await (await saved(bundle, keyOf(`${place}/layers`, { rep: params.rep }), init)).json();
  const asked = [];
  for (let at = start - (start % bundle.tile); at < end; at += bundle.tile) {
    const key = keyOf(path, { ...params, start: at, end: Math.min(at + bundle.tile, n) });
    asked.push(saved(bundle, key, init).then((answer) => answer.arrayBuffer()).then(decode));
  }
  return Promise.all(asked);
}

/** The next position over a threshold, from the windows. */
async function walk(bundle, place, sides, params, init) {
  const [, run, seq] = place.match(/^api\/runs\/([^/]+)\/seqs\/([^/]+)$/);
  const n = bundle.lengths[decodeURIComponent(run)][decodeURIComponent(seq)];
  const show = params.show || 'diff';
  const found = [];
  for (let start = 0; start < n; start += bundle.window) {
    const range = { start, end: Math.min(start + bundle.window, n) };
    const key = sides ? keyOf(`${place}/sides`, { a: params.a, b: params.b, ...range }) : keyOf(`${place}/tokens`, { rep: params.rep, ...range });
    const { arrays, metadata } = decode(await (await saved(bundle, key, init)).arrayBuffer());
    const values = arrays[sides ? { a: 'delta_a', b: 'delta_b', diff: 'difference' }[show] : 'delta'];
    const states = sides ? [show === 'b' ? null : arrays.state_a, show === 'a' ? null : arrays.state_b].filter(Boolean) : [arrays.state];
    const odd = metadata.states.split(',').indexOf('non_finite');
    values.forEach((value, i) => {
      if (Math.abs(value) > Number(params.threshold) || states.some((s) => s[i] === odd)) found.push(start + i);
    });
  }
  const from = Number(params.from);
  const index = params.back === 'true' ? found.findLastIndex((p) => p < from) : found.findIndex((p) => p > from);
  return { position: index < 0 ? null : found[index], rank: index < 0 ? null : index + 1, of: found.length };
}

function json(value) {
  return new Response(JSON.stringify(value), { headers: { 'content-type': 'application/json' } });
}

/** What the folder lacks on purpose is no error; the command shows it. */
function leftOut(status, title, detail, more) {
  return problem(status, { title, status, detail, level: 'info', commands: [command()], ...more });
}

function problem(status, body) {
  return new Response(JSON.stringify(body), { status, headers: { 'content-type': 'application/problem+json' } });
}
