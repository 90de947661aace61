// In an exported folder: gives the page the answers that were saved, in place of a server.
// The page is otherwise the same; it never learns the difference.

import { decode } from './safetensors.js';

const real = window.fetch.bind(window);
const root = new URL('.', document.baseURI);
let manifest = null;

/** What an answer is looked up by; `_key` in viewer/export.py makes the same. */
export function keyOf(path, params) {
  const given = Object.entries(params).filter(([, v]) => v !== null && v !== undefined).sort(([x], [y]) => (x < y ? -1 : 1));
  return path + (given.length ? `?${given.map(([k, v]) => `${k}=${v}`).join('&')}` : '');
}

/** The rows that words keep, sorted; null where the filter needs a server. */
export function listed(rows, { sort, q }) {
  const words = (q || '').toLowerCase().split(/\s+/).filter(Boolean);
  if (words.some((word) => /[<>=:!"()]/.test(word))) return null;
  const kept = rows.filter((row) => words.every((word) => [row.id, row.group, row.finish].some((text) => String(text ?? '').toLowerCase().includes(word))));
  if (!sort) return kept;
  const [name, sign] = sort.startsWith('-') ? [sort.slice(1), -1] : [sort, 1];
  const absent = (row) => row[name] === null || row[name] === undefined || row[name] === 'NaN';
  const compare = (x, y) => (x[name] < y[name] ? -sign : x[name] > y[name] ? sign : 0);
  return [...kept.filter((row) => !absent(row)).sort(compare), ...kept.filter(absent)];
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
    if (error instanceof Missing) return problem(404, 'Not in this folder', error.message);
    throw error;
  }
};

class Missing extends Error {}

async function saved(bundle, key, init) {
  // the newest report is the one that an address without `rep` means
  const file = bundle.files[key];
  if (!file) throw new Missing('This folder holds chosen sequences only. Start `rolltape view` on the tape for everything else.');
  return real(new URL(file, root), { signal: init.signal });
}

async function answerOf(bundle, path, params, init) {
  const { rep, a, b } = params;
  const token = path.match(/^(.*\/tokens)\/(\d+)$/);
  if (token) {
    const position = Number(token[2]);
    const start = position - (position % bundle.chunk);
    const details = await (await saved(bundle, keyOf(`${token[1]}/${start}`, { rep }), init)).json();
    if (!details[position]) throw new Missing(`There is no position ${position}.`);
    return json(details[position]);
  }
  if (/\/seqs$/.test(path)) {
    const page = await (await saved(bundle, keyOf(path, { rep }), init)).json();
    const rows = listed(page.rows, params);
    if (!rows) return problem(400, 'bad parameter', 'q: conditions need the viewer; words filter here', 'q');
    return json({ ...page, sort: params.sort || page.sort, rows, matched: rows.length });
  }
  const over = path.match(/^(.*\/seqs\/([^/]+))\/(sides\/)?over$/);
  if (over) return json(await walk(bundle, over[1], Boolean(over[3]), params, init));
  if (/\/tokens$/.test(path)) return saved(bundle, keyOf(path, { rep, start: params.start, end: params.end }), init);
  if (/\/sides(\/info)?$/.test(path)) return saved(bundle, keyOf(path, { a, b, start: params.start, end: params.end }), init);
  return saved(bundle, keyOf(path, { rep }), init);
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

function problem(status, title, detail, field) {
  return new Response(JSON.stringify({ title, status, detail, ...(field ? { field } : {}) }), { status, headers: { 'content-type': 'application/problem+json' } });
}
