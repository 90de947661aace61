// Elements without markup strings: what a model or a tape says only ever becomes text.

import { absent } from './held.js';

/**
 * @param {string} tag
 * @param {Object} [props] `class`, attributes, `on` {event: handler}, `style` {property: value}
 * @param {...(Node|string|number|null|Array)} children
 */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') {
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    } else if (name === 'style') {
      for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    } else if (name === 'href' && absent(String(value))) {
      element.setAttribute('title', 'not in this folder'); // the text alone: it leads nowhere
    } else {
      element.setAttribute(name, value === true ? '' : String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export function put(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
}

/** Like `put`, and what had the focus by its id has it again. */
export function redraw(parent, ...children) {
  const { id } = parent.contains(document.activeElement) ? document.activeElement : {};
  put(parent, ...children);
  const again = id && document.getElementById(id);
  if (again) again.focus({ preventScroll: true });
}

/** A number cell. */
export function num(text, props = {}) {
  return h('td', { class: 'n', ...props }, text);
}

export function byId(id) {
  return document.getElementById(id);
}
