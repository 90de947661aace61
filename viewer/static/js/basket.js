// The triage basket: what was starred, with notes, for an issue.

import { fromText, idOf, merge, moved, titleOf, toMarkdown } from './basket_data.js';
import { copy } from './clipboard.js';
import { h, put } from './dom.js';
import { plural } from './format.js';
import { notice } from './notices.js';
import { current, integer, parse } from './route.js';
import { say } from './shell.js';
import { isStarred, load, notesFile, onStar, save, star, starred } from './starred.js';

export { isStarred, onStar, star, starred };

/** What the page shows, as an item: its pinned token, else the sequence, else the run. */
export function hereItem(state = current(), runs = { runs: [] }) {
  if (!state.run) return null;
  const run = runs.runs.find((r) => r.id === state.run);
  const tok = state.seq ? integer(state.params.get('tok')) : null;
  return {
    run: state.run, hash: location.hash, ...(run ? { name: run.name } : {}), ...(state.seq ? { seq: state.seq } : {}),
    ...(tok === null ? {} : { tok }), ...(state.params.get('rep') ? { rep: state.params.get('rep') } : {}),
  };
}

/** The key `s`: stars what is pinned, or takes the star away. */
export async function starHere(state, runs) {
  const item = hereItem(state, runs);
  if (!item) {
    say('nothing here to star: open a sequence first');
    return;
  }
  const on = await star(item);
  say(`${on ? 'starred' : 'no longer starred'}: ${titleOf(item)}`);
}

/** A button that stars one item. */
export function starButton(item) {
  const button = h('button', { type: 'button', class: 'star', on: { click: () => star(item) } });
  const draw = () => {
    const on = isStarred(item);
    button.setAttribute('aria-pressed', String(on));
    put(button, on ? '\u2605 Starred' : '\u2606 Star');
  };
  const stop = onStar(() => (button.isConnected ? draw() : stop()));
  draw();
  load();
  return button;
}

export async function open({ main }) {
  await load({ again: true });
  const list = h('ol', { class: 'basket', id: 'basket' });
  const head = h('p', { class: 'hint' });
  const tools = h('p', { class: 'basket-tools' });
  const box = h('textarea', { id: 'import', rows: 4, class: 'wide', 'aria-label': 'Markdown or JSON of another basket' });
  const more = h('details', {}, h('summary', {}, 'Import'), h('p', { class: 'hint' }, 'Paste the Markdown or JSON of another basket, or choose a file. What is here stays; notes of the same token are joined.'),
    box, h('p', {}, h('button', { type: 'button', id: 'do-import', on: { click: () => take(box.value) } }, 'Merge'), ' ',
      h('input', { type: 'file', 'aria-label': 'File to import', accept: '.md,.json,text/*', on: { change: async (e) => { if (e.target.files[0]) await take(await e.target.files[0].text()); } } })));
  put(main, h('h1', {}, 'Basket'), head, tools, list, more);

  async function take(text) {
    const found = fromText(text, parse);
    if (!found.length) {
      say('nothing to import: no link to a token or sequence');
      return;
    }
    const before = starred().length;
    await save(merge(starred(), found));
    box.value = '';
    say(`${plural(found.length, 'item')} read, ${starred().length - before} new`);
  }

  const base = () => location.href.split('#')[0];
  const json = () => `${JSON.stringify({ items: starred() }, null, 1)}\n`;
  function draw() {
    const items = starred();
    const file = notesFile();
    put(head, `${plural(items.length, 'item')}, kept in ${file === null ? 'this browser; start the viewer with --notes FILE to keep them next to the run' : file}.`);
    put(tools, items.length ? [
      h('button', { type: 'button', id: 'copy-markdown', on: { click: () => copy(toMarkdown(starred(), base()), 'Markdown copied') } }, 'Copy as Markdown'), ' ',
      h('button', { type: 'button', id: 'save-markdown', on: { click: () => download('triage.md', toMarkdown(starred(), base()), 'text/markdown') } }, 'Download Markdown'), ' ',
      h('button', { type: 'button', on: { click: () => download('triage.json', json(), 'application/json') } }, 'Download JSON')] : null);
    // a note that is being written keeps its box
    if (list.contains(document.activeElement) && document.activeElement.tagName === 'TEXTAREA' && list.children.length === items.length) return;
    put(list, items.length ? items.map(row) : h('li', {}, notice({
      level: 'info', title: 'Nothing is starred', text: 'Press s on a sequence page, or the star beside a token: the pinned token, or the sequence, comes here with a link that reopens exactly that view.',
    })));
  }

  function row(item, i) {
    const keep = (next, focus) => save(next).then(() => {
      const at = focus === undefined ? null : list.children[focus];
      if (at) at.querySelector('a').focus();
    });
    const note = h('textarea', {
      rows: Math.max(1, (item.note || '').split('\n').length), 'aria-label': `Note on ${titleOf(item)}`, placeholder: 'note',
      on: { change: (e) => save(starred().map((other) => (idOf(other) === idOf(item) ? { ...other, note: e.target.value } : other))) },
    }, item.note || '');
    const button = (text, label, act, off = false) => h('button', { type: 'button', 'aria-label': `${label}: ${titleOf(item)}`, title: label, disabled: off || null, on: { click: act } }, text);
    return h('li', {}, h('div', { class: 'basket-row' }, h('a', { href: item.hash }, titleOf(item)),
      h('span', { class: 'basket-buttons' },
        button('\u2191', 'Move up', () => keep(moved(starred(), i, i - 1), i - 1), i === 0),
        button('\u2193', 'Move down', () => keep(moved(starred(), i, i + 1), i + 1), i === starred().length - 1),
        button('\u2715', 'Remove', () => keep(starred().filter((_, k) => k !== i), Math.max(0, i - 1))))), note);
  }

  const walk = (step) => {
    const links = [...list.querySelectorAll('a')];
    const at = links.findIndex((a) => a.closest('li').contains(document.activeElement));
    const next = links[Math.min(Math.max(at + step, 0), links.length - 1)];
    if (next) next.focus();
  };
  const stop = onStar(draw);
  draw();
  return { keys: { j: () => walk(1), k: () => walk(-1) }, close: stop };
}

function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h('a', { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
