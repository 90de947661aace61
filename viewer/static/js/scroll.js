// A part of a page that scrolls by itself: where there is more to a side, its edge says so. While it
// scrolls it has a name and can be reached with Tab; then the arrow keys are its own.

import { h } from './dom.js';

const sizes = new ResizeObserver((entries) => new Set(entries.map((e) => e.target.closest('.scroll'))).forEach(mark));

/**
 * @param {string} name of what is in it
 * @param {...(Node|Array)} content
 */
export function scroller(name, ...content) {
  const inner = h('div', { class: 'scroll', on: { scroll: () => mark(inner) } }, ...content);
  inner.dataset.name = name;
  for (const part of [inner, ...inner.children]) sizes.observe(part);
  const edge = (side, sign) => h('span', { class: `edge ${side}`, 'aria-hidden': 'true' }, sign);
  return h('div', { class: 'scrollbox' }, inner, edge('before', '\u2039'), edge('after', '\u203a'));
}

function mark(inner) {
  if (!inner) return;
  const { scrollLeft: left, clientWidth: width, scrollWidth: all } = inner;
  const scrolls = all > width + 1 || inner.scrollHeight > inner.clientHeight + 1;
  for (const [name, value] of [['tabindex', '0'], ['role', 'region'], ['aria-label', inner.dataset.name]]) {
    if (scrolls) inner.setAttribute(name, value);
    else inner.removeAttribute(name);
  }
  inner.parentNode.classList.toggle('more-before', left > 1);
  inner.parentNode.classList.toggle('more-after', left + width < all - 1);
}
