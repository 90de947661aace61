// The server: JSON, arrays, problems, and whether it still answers.

import { decode } from './safetensors.js';

export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `HTTP ${status}`);
    this.status = status;
    this.problem = problem;
  }
}

export class ServerGone extends Error {}

/** For the status line. */
export const traffic = { pending: 0, error: '', gone: false, changed: () => {} };

export function runPath(state, ...rest) {
  return ['api/runs', state.run, ...rest].map((part, i) => (i ? encodeURIComponent(part) : part)).join('/');
}

/** Parameters that choose what a page is about. */
export function scope(state, names = ['rep']) {
  return Object.fromEntries(names.map((n) => [n, state.params.get(n)]).filter(([, v]) => v));
}

async function request(path, params, signal) {
  const query = new URLSearchParams(Object.entries(params || {}).filter(([, v]) => v !== null && v !== undefined));
  traffic.pending += 1;
  traffic.changed();
  try {
    const answer = await fetch(query.size ? `${path}?${query}` : path, { signal });
    traffic.gone = false;
    if (!answer.ok) throw new ApiError(answer.status, await problemOf(answer));
    traffic.error = '';
    return answer;
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    if (!error.problem || error.problem.level !== 'info') traffic.error = error.message;
    if (error instanceof TypeError) {
      traffic.gone = true;
      throw new ServerGone('the server does not answer');
    }
    throw error;
  } finally {
    traffic.pending -= 1;
    traffic.changed();
  }
}

async function problemOf(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text);
  } catch {
    return { title: answer.statusText, detail: text.trim() };
  }
}

export async function getJson(path, params, signal) {
  return (await request(path, params, signal)).json();
}

/** The answer's ETag: tells whether anything changed. */
export async function getTag(path, params, signal) {
  const answer = await request(path, params, signal);
  await answer.arrayBuffer();
  return answer.headers.get('etag');
}

export async function getArrays(path, params, signal) {
  return decode(await (await request(path, params, signal)).arrayBuffer());
}
