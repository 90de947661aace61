// Texts of single tokens, fetched in blocks when they are first looked at.

import { getArrays } from './api.js';
import { readWindow } from './strip.js';

const BLOCK = 256;

export function makeTexts(path, params, signal, n) {
  const blocks = new Map();
  const block = (position) => Math.floor(position / BLOCK);
  return {
    async load(position) {
      const at = block(position);
      if (blocks.has(at)) return;
      const cols = 'ids,flags,text_offsets,text_bytes';
      const answer = await getArrays(path('tokens'), { ...params, start: at * BLOCK, end: Math.min(n, (at + 1) * BLOCK), cols }, signal);
      if (blocks.size > 64) blocks.clear();
      blocks.set(at, readWindow(answer));
    },
    /** The text in quotation marks, the id where there is none, or an empty string before it is loaded. */
    get(position) {
      const found = blocks.get(block(position));
      if (!found || position < found.start || position >= found.end) return '';
      const { text, bare } = found.text(position - found.start);
      return bare ? `id ${text}` : `\u201c${text}\u201d`;
    },
  };
}
