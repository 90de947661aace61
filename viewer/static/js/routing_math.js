// Routing agreement without a page: totals, rows, the margin histogram, the next flip.

export const WINDOW = 2048;
export const MOST = 4096; // the server answers no wider window

/** Words and look of every state of the map: [name, words, pattern or null, colour of the sheet]. */
export const STATES = [
  ['missing', 'not recorded', '/', 'strong'],
  ['missing_a', 'not recorded in A', '.', 'missing'],
  ['missing_b', 'not recorded in B', 'x', 'missing'],
  ['agree', 'same experts', null, 'surface'],
  ['order_only', 'same experts, other order', null, 'equal'],
  ['near_tie', 'flip, near tie', null, 'bar'],
  ['margin_unknown', 'flip, margin not known', null, 'flip'],
  ['not_near_tie', 'flip, not explained by a tie', null, 'over'],
];
export const FLIP = 5;

/** The same where it is not known how far scores move between the sides: eps tells nothing of a flip above it. */
export const UNMOVED = STATES.map((state) => (state[0] === 'not_near_tie' ? [state[0], 'flip, above eps: not shown to be a tie', null, 'link'] : state));

const COUNTS = ['decisions', 'flips', 'order_only', 'near_tie', 'margin_unknown', 'not_near_tie', 'missing_a', 'missing_b'];
const SHARES = ['jaccard', 'top1', 'weight_l1', 'load_tv', 'eps'];

/** Per layer an object; NaN becomes null. */
export function layerRows(arrays) {
  return Array.from(arrays.layers, (layer, i) => ({
    layer,
    ...Object.fromEntries(COUNTS.map((name) => [name, arrays[name][i]])),
    ...Object.fromEntries(SHARES.map((name) => [name, Number.isNaN(arrays[name][i]) ? null : arrays[name][i]])),
  }));
}

export function totals(rows) {
  return Object.fromEntries(COUNTS.map((name) => [name, rows.reduce((sum, row) => sum + row[name], 0)]));
}

/** {agree, flips} counts by margin of one layer, or of all with -1. */
export function marginsOf(arrays, bins, index) {
  const out = { agree: new Array(bins).fill(0), flips: new Array(bins).fill(0) };
  for (let i = 0; i < arrays.layers.length; i += 1) {
    if (index >= 0 && i !== index) continue;
    for (let b = 0; b < bins; b += 1) {
      out.agree[b] += arrays.margins[(2 * i) * bins + b];
      out.flips[b] += arrays.margins[(2 * i + 1) * bins + b];
    }
  }
  return out;
}

/** {at, row} of the next column with a flip after one, or before it, in any layer; null when there is none. */
export function nextFlip(map, n, rows, from, back) {
  const step = back ? -1 : 1;
  for (let at = from + step; at >= 0 && at < n; at += step) {
    for (let row = 0; row < rows; row += 1) if (map[row * n + at] >= FLIP) return { at, row };
  }
  return null;
}

/** The map [rows, n] in as many columns as fit: of what lies in one the highest state counts. */
export function squeeze(map, n, rows, columns) {
  const bins = Math.min(n, columns);
  const starts = Uint32Array.from({ length: bins }, (_, i) => Math.floor((i * n) / bins));
  if (bins === n) return { codes: map, starts };
  const codes = new Uint8Array(rows * bins);
  for (let row = 0; row < rows; row += 1) {
    for (let bin = 0, at = 0; bin < bins; bin += 1) {
      const end = bin + 1 < bins ? starts[bin + 1] : n;
      for (let most = 0; at < end; at += 1) {
        most = Math.max(most, map[row * n + at]);
        codes[row * bins + bin] = most;
      }
    }
  }
  return { codes, starts };
}

/** The window of an address: a position, a width, both within what can be asked for; in a folder one of those that it has. */
export function windowOf(from, to, tok, n, fixed = false) {
  if (fixed) {
    const at = Math.min(from ?? tok ?? 0, Math.max(0, n - 1));
    return [at - (at % WINDOW), Math.min(n, at - (at % WINDOW) + WINDOW)];
  }
  const width = Math.min(n, Math.max(1, Math.min(MOST, from !== null && to !== null && to > from ? to - from : WINDOW)));
  const start = from ?? Math.floor((tok ?? 0) / WINDOW) * WINDOW;
  const first = Math.min(Math.max(0, start), Math.max(0, n - 1));
  return [first, Math.min(n, first + width)];
}
