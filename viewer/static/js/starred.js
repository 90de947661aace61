// Where starred items are kept: the file of `--notes`, else this browser.

import { ApiError } from './api.js';
import { cleaned, idOf, merge } from './basket_data.js';
import { say } from './shell.js';

const NAME = 'rolltape.basket';
const listeners = [];
let items = [];
let tag = null;
let file = null; // name of the file of notes; null: this browser keeps them
let loaded = null;
let writing = Promise.resolve();

/** What is starred, in the reader's order. */
export function starred() {
  return items;
}

export function isStarred(item) {
  return items.some((other) => idOf(other) === idOf(item));
}

/** Name of the file that keeps them, or null. */
export function notesFile() {
  return file;
}

/** Calls `fn(items)` whenever they change; returns how to stop. */
export function onStar(fn) {
  listeners.push(fn);
  return () => listeners.splice(listeners.indexOf(fn), 1);
}

/** Reads what was kept; once, unless asked again. */
export function load({ again = false } = {}) {
  if (!loaded || again) loaded = read();
  return loaded;
}

/** Adds an item, or takes it away; resolves to whether it is starred now. */
export async function star(item) {
  await load();
  const on = !isStarred(item);
  await save(on ? [...items, cleaned({ at: new Date().toISOString(), ...item })] : items.filter((other) => idOf(other) !== idOf(item)));
  return on;
}

/** Keeps these instead. */
export function save(next) {
  const before = items;
  items = next;
  tell();
  // one after the other: each needs the tag of the one before
  writing = writing.catch(() => {}).then(() => write(before));
  return writing;
}

function tell() {
  [...listeners].forEach((fn) => fn(items));
}

async function read() {
  const answer = await fetch('api/notes');
  if (!answer.ok) throw new ApiError(answer.status, await answer.json());
  const found = await answer.json();
  file = found.file;
  tag = answer.headers.get('etag');
  items = file === null ? kept() : found.items;
  tell();
}

function kept() {
  try {
    return (JSON.parse(localStorage.getItem(NAME)) || []).map(cleaned).filter(Boolean);
  } catch {
    return []; // another program's, or cut off
  }
}

async function write(before) {
  if (file === null) {
    localStorage.setItem(NAME, JSON.stringify(items));
    return;
  }
  let answer = await put();
  const merged = answer.status === 409;
  if (merged) {
    // somebody else wrote: what this page added or removed is done again on what is there now
    const mine = items;
    await read();
    const gone = new Set(before.map(idOf).filter((id) => !mine.some((item) => idOf(item) === id)));
    items = merge(mine, items.filter((item) => !gone.has(idOf(item))));
    tell();
    answer = await put();
  }
  if (!answer.ok) {
    const problem = await answer.json();
    items = before;
    tell();
    say(`not saved: ${problem.detail}`);
    throw new ApiError(answer.status, problem);
  }
  tag = answer.headers.get('etag');
  if (merged) say(`${file} was changed by somebody else; both are merged`);
}

function put() {
  return fetch('api/notes', {
    method: 'PUT',
    headers: { 'content-type': 'application/json', 'if-match': tag, 'x-rolltape-write': '1' },
    body: JSON.stringify({ items }),
  });
}
