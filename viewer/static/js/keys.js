// Single keys. None acts while an input has focus, with a modifier, or when they are turned off.

export const HELP = [
  ['Everywhere', [
    ['c', 'copy the link to exactly this view'],
    ['t', 'light or dark'],
    ['?', 'this help'],
    ['Esc', 'close, or let go of the pinned token'],
  ]],
  ['Sequence list', [
    ['j / k', 'next, previous row'],
    ['Enter', 'open the row'],
    ['g g / G', 'first, last row of the page'],
    ['/', 'to the filter'],
  ]],
  ['Token strip', [
    ['j / k, \u2192 / \u2190', 'next, previous token'],
    ['n / N', 'next, previous token over the scale, or not finite'],
    ['1 2 3 4', 'scale 1e-3, 1e-2, 1e-1, 1 nat'],
    ['[ / ]', 'previous, next window of 4,096 positions'],
    ['g g / G', 'first, last token'],
    ['J / K', 'next, previous sequence of the list'],
    ['Enter', 'pin the token under the pointer, or the first in view'],
    ['m', 'hide or show masked tokens'],
  ]],
];

const OFF = 'rolltape.keys';

export function enabled() {
  return localStorage.getItem(OFF) !== 'off';
}

export function setEnabled(on) {
  localStorage.setItem(OFF, on ? 'on' : 'off');
}

/** Whether a key press belongs to the element that has the focus. */
export function isTyping(target) {
  return Boolean(target && target.closest && target.closest('input, textarea, select, [contenteditable]'));
}

/**
 * Turns key presses into names: the key, or `g g`.
 * @returns {(event: KeyboardEvent) => ?string}
 */
export function reader(now = () => performance.now()) {
  let pending = -Infinity;
  return (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return null;
    if (isTyping(event.target)) return null;
    if (event.key !== 'Escape' && !enabled()) return null;
    if (event.key === 'g') {
      const twice = now() - pending < 800;
      pending = twice ? -Infinity : now();
      return twice ? 'g g' : null;
    }
    pending = -Infinity;
    return event.key;
  };
}
