// Single keys. None acts while text is typed, with a modifier, or when they are turned off.

export const HELP = [
  ['Everywhere', [
    ['c', 'copy the link to exactly this view'],
    ['t', 'light or dark'],
    ['?', 'this help'],
    ['Ctrl K', 'go anywhere: screens, runs, sequences, tokens'],
    ['s', 'star what is pinned, for the basket'],
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
    ['n / N, p', 'next, previous token over the scale, or not finite'],
    ['1 to 7', 'colour by: \u0394 logprob, ratio, \u0394 probability, entropy, rank, KL, overlap'],
    ['\u2212 / =', 'finer, coarser scale'],
    ['g, a number, Enter', 'go to that position'],
    ['f', 'find text'],
    ['[ / ]', 'previous, next window of 4,096 positions'],
    ['g g / G', 'first, last token'],
    ['J / K', 'next, previous sequence of the list'],
    ['Enter', 'pin the token under the pointer, or the first in view'],
    ['m', 'hide or show masked tokens'],
  ]],
  ['Layers', [
    ['arrows', 'in the map: move the cell; with Shift by ten'],
    ['j / k', 'next, previous token'],
    ['n / N', 'next, previous token where the front changes'],
    ['1 to 6', 'measure'],
    ['- / =', 'lower, higher threshold of the front'],
    ['z / Z, 0', 'narrower, wider, the whole sequence'],
    ['[ / ]', 'previous, next window'],
    ['e / E', 'open or close the layer, all layers'],
    ['Enter', 'open the token'],
  ]],
  ['Routing', [
    ['arrows', 'in the map: move the cell'],
    ['j / k', 'next, previous token'],
    ['n / N', 'next, previous token with a flip'],
    ['- / =', 'layer before, layer after'],
    ['z / Z', 'narrower, wider'],
    ['[ / ]', 'previous, next window'],
    ['Enter', 'open the token'],
  ]],
  ['Timeline', [
    ['W / S', 'zoom in, out'],
    ['A / D', 'earlier, later'],
    ['. / ,', 'next, previous step of the engine'],
    ['arrows', 'with the focus on the lanes: step, lane'],
    ['F', 'fit the step; once more, the whole'],
    ['/', 'filter the kernel choices'],
  ]],
  ['Weights', [
    ['j / k, . / ,', 'next, previous version'],
    ['g g / G', 'first, last version'],
  ]],
  ['Side by side', [
    ['x', 'blink between the two replays'],
    ['d', 'first difference'],
    ['n / N, p', 'next, previous token over the scale'],
    ['\u2212 / =', 'finer, coarser scale'],
    ['j / k, [ / ]', 'token, window'],
  ]],
];

const OFF = 'rolltape.keys';

export function enabled() {
  return localStorage.getItem(OFF) !== 'off';
}

export function setEnabled(on) {
  localStorage.setItem(OFF, on ? 'on' : 'off');
}

/** Whether a key press belongs to the element that has the focus: text is typed there, or the key moves it. */
function isTheirs({ key, target }) {
  const field = target && target.closest && target.closest('input, textarea, select, [contenteditable], .scroll');
  if (!field) return false;
  if (field.type === 'radio' || field.type === 'checkbox') return /^(Arrow|Enter| )/.test(key);
  if (field.classList && field.classList.contains('scroll')) return field === target && /^(Arrow|Page|Home|End)/.test(key);
  return true;
}

/**
 * Turns key presses into names: the key, `g g`, or `go 1180` for g, the digits and Enter.
 * @returns {(event: KeyboardEvent) => ?string}
 */
export function reader(now = () => performance.now()) {
  let pending = -Infinity; // when g was pressed
  let digits = '';
  return (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return null;
    if (isTheirs(event)) return null;
    if (event.key !== 'Escape' && !enabled()) return null;
    const soon = now() - pending < (digits ? 5000 : 800);
    pending = -Infinity;
    const number = digits;
    digits = '';
    if (soon && /^\d$/.test(event.key)) {
      pending = now();
      digits = number + event.key;
      return null;
    }
    if (soon && number && event.key === 'Enter') return `go ${number}`;
    if (event.key === 'g') {
      if (soon && !number) return 'g g';
      pending = now();
      return null;
    }
    return event.key;
  };
}
