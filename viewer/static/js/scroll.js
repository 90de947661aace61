// A part of a page that scrolls by itself: where there is more to a side, its edge says so. While it
// scrolls it has a name and can be reached with Tab; then the arrow keys are its own.

import { h } from './dom.js';

const sizes = new ResizeObserver((entries) => new Set(entries.map((e) => e.target.closest('.edged'))).forEach(mark));
const contents = new MutationObserver((changes) => new Set(changes.map((c) => c.target)).forEach(watch));

/**
 * @param {string} name of what is in it
 * @param {...(Node|Array)} content
 */
export function scroller(name, ...content) {
  const inner = h('div', { class: 'scroll' }, ...content);
  inner.dataset.name = name;
  return edged(inner);
}

/**
 * The same around an element that has a name of its own, and whose content may be replaced.
 * @param {HTMLElement} inner
 * @param {string} [kind] class of the frame
 */
export function edged(inner, kind = '') {
  inner.classList.add('edged');
  inner.addEventListener('scroll', () => mark(inner), { passive: true });
  watch(inner);
  contents.observe(inner, { childList: true });
  const edge = (side, sign) => h('span', { class: `edge ${side}`, 'aria-hidden': 'true' }, sign);
  return h('div', { class: `scrollbox ${kind}`.trim() }, inner, edge('before', '\u2039'), edge('after', '\u203a'), edge('above', '\u25b4'), edge('below', '\u25be'));
}

function watch(inner) {
  for (const part of [inner, ...inner.children]) sizes.observe(part);
}

function mark(inner) {
  if (!inner) return;
  const { scrollLeft: left, clientWidth: width, scrollWidth: wide, scrollTop: top, clientHeight: height, scrollHeight: tall, dataset } = inner;
  const scrolls = wide > width + 1 || tall > height + 1;
  if (dataset.name) {
    for (const [name, value] of [['tabindex', '0'], ['role', 'region'], ['aria-label', dataset.name]]) {
      if (scrolls) inner.setAttribute(name, value);
      else inner.removeAttribute(name);
    }
  }
  const more = { before: left > 1, after: left + width < wide - 1, above: top > 1, below: top + height < tall - 1 };
  for (const [side, there] of Object.entries(more)) inner.parentNode.classList.toggle(`more-${side}`, there);
}
