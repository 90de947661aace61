// What the server says in words: damage, states, what to do about them.

import { h } from './dom.js';
import { copy } from './clipboard.js';
import { current, link } from './route.js';

const LABEL = { error: 'Problem', warn: 'Note', info: 'Note' };

/** A line for a shell, to be copied. */
export function command(line) {
  return h('div', { class: 'command' }, h('code', {}, line),
    h('button', { type: 'button', on: { click: () => copy(line, 'Command copied') } }, 'Copy'));
}

/** @param {{level: string, title: string, text: string, commands: string[]}} item */
export function notice(item) {
  return h(
    'section',
    { class: `notice ${item.level}`, role: item.level === 'error' ? 'alert' : null },
    h('h2', {}, h('span', { class: 'sr' }, `${LABEL[item.level]}: `), item.title),
    item.text ? h('p', {}, item.text) : null,
    (item.commands || []).map(command),
    (item.links || []).map(({ text, run, rep }) => h('p', {}, h('a', { href: link(current(), { screen: 'overview', run, seq: null, params: { rep } }) }, text))),
    item.screen ? h('p', {}, h('a', { href: link(current(), { screen: item.screen, seq: null }) }, `See ${item.screen}`)) : null,
    item.extra || null,
  );
}

/** All notices of a page; on pages other than the overview the merely informing ones are short. */
export function notices(items, { brief = false } = {}) {
  const full = items.filter((item) => !brief || item.level !== 'info');
  const rest = items.filter((item) => brief && item.level === 'info');
  return h(
    'div',
    { class: 'notices' },
    full.map(notice),
    rest.length ? h('p', { class: 'hint' }, rest.map((item) => `${item.title}.`).join(' ')) : null,
  );
}
