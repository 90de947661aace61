// Copying text, also where the page is not a secure context (plain http on another host).

import { byId, h, put } from './dom.js';
import { say } from './shell.js';

export async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
    say(done);
  } catch {
    const box = h('input', { type: 'text', readonly: true, value: text, 'aria-label': 'To copy', class: 'wide' });
    const dialog = byId('dialog');
    put(
      dialog,
      h('h2', {}, 'Copy this'),
      h('p', {}, 'The browser does not let this page write to the clipboard.'),
      box,
      h('form', { method: 'dialog' }, h('button', {}, 'Close')),
    );
    dialog.showModal();
    box.select();
  }
}
