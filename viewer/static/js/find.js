// Finding text across tokens, window by window.

import { WINDOW } from './strip.js';

/**
 * The first token at or after `from`, then from the start, in which a match of the text begins.
 * @param {string} wanted as it is shown; case does not matter
 * @param {(start: number) => Promise<object>} load the window that begins there, as `readWindow` gives it
 * @returns {Promise<?number>}
 */
export async function findText(wanted, from, n, load) {
  const windows = Math.ceil(n / WINDOW);
  const first = Math.floor(Math.min(from, n - 1) / WINDOW);
  for (let step = 0; step <= windows; step += 1) {
    const data = await load(((first + step) % windows) * WINDOW);
    const least = step === 0 ? from : step === windows ? 0 : data.start;
    const found = findIn(data, wanted, least);
    if (found !== null) return found;
  }
  return null;
}

/** The same in one window; a match may go on over any number of tokens of it. */
export function findIn(data, wanted, least) {
  const needle = wanted.toLowerCase();
  const starts = [];
  let text = '';
  for (let i = 0; i < data.end - data.start; i += 1) {
    starts.push(text.length);
    text += data.text(i).text.toLowerCase();
  }
  for (let at = text.indexOf(needle); at >= 0; at = text.indexOf(needle, at + 1)) {
    const position = data.start + starts.findLastIndex((begin) => begin <= at);
    if (position >= least) return position;
  }
  return null;
}
