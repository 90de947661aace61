// An exported folder says so, and with which command the viewer itself shows what is not in it.

import { notice } from './notices.js';

const meta = document.querySelector('meta[name=rolltape-folder]');

/** Null where a server answers. */
export const COMMAND = meta && meta.content;

/** What a folder leaves out on purpose; null where a server answers. */
export function leftOut(title, text) {
  return COMMAND && notice({ level: 'info', title, text: `${text} All of it is shown by`, commands: [COMMAND] });
}
