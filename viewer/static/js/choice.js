// A list to choose from, on a page with single keys: once something is chosen the focus goes back to
// the page. Walking through the closed list with the arrows is not over with the first step; Escape is.

import { h } from './dom.js';

/**
 * @param {string} id
 * @param {Array<[string, string, ?Object]>} options value, text and attributes
 * @param {?string} chosen value
 * @param {(value: string) => void} change
 * @param {() => void} leave gives the focus to what the keys are for
 */
export function choice(id, options, chosen, change, leave) {
  let walking = false;
  const pressed = (event) => {
    // Alt, Enter and the space bar open the list
    walking = !event.altKey && !['Enter', ' ', 'Tab', 'Escape'].includes(event.key);
    if (event.key === 'Escape') leave();
  };
  const changed = ({ target }) => {
    if (!walking) leave();
    change(target.value);
  };
  return h('select', { id, on: { keydown: pressed, pointerdown: () => { walking = false; }, change: changed } },
    options.map(([value, text, more]) => h('option', { value, selected: value === chosen, ...more }, text)));
}
