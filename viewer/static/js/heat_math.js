// Layer x token map without a page: scales, colours, rows, the front, zoom.

import { sequential } from './colour.js';

export const NONE = 0xffff; // no front at this position
const PALEST = 1e-5; // of the full scale, where a metric has no least value

const decades = (...texts) => texts.map((text) => ({ text, value: Number(text) }));

/** Full-scale presets are fixed, so that two windows and two runs can be compared. */
export const METRICS = [
  { id: 'rel_l2', text: 'rel L2', title: '|b - a| / |a| of a row', presets: decades('1e-4', '1e-3', '1e-2', '1e-1', '1'), preset: 2 },
  { id: 'max_abs', text: 'max |b - a|', title: 'largest difference in a row', presets: decades('1e-3', '1e-2', '1e-1', '1', '10'), preset: 2 },
  { id: 'cosine', text: '1 - cosine', title: 'of the two rows; of cosines the smallest', presets: decades('1e-6', '1e-4', '1e-2', '1'), preset: 2 },
  { id: 'ulp', text: 'ulp', title: 'most representable values between, in the coarser dtype', presets: decades('16', '256', '4096', '65536'), preset: 2, low: 1 },
  { id: 'equal', text: 'other bits', title: 'any bit of the row differs', presets: decades('1'), preset: 0, low: 1 },
  { id: 'non_finite', text: 'not finite', title: 'values of a row that are not finite', presets: decades('1', '10', '100'), preset: 1, low: 1 },
];

/** Relative L2 error at which the front begins; `floor` is the measured one, 0 any other bit. */
export const THRESHOLDS = ['floor', '0', '1e-7', '1e-6', '1e-5', '1e-4', '1e-3', '1e-2', '1e-1', '1'];

/** 0..1: where a value lies on the log axis that ends at the full scale; `low` is a count's least value. */
export function amount(value, full, low = full * PALEST) {
  if (value >= full) return 1;
  return Math.max(Math.log(value / low) / Math.log(full / low), 0);
}

/** The value at 0..1, the inverse of `amount` within the axis. */
export function amountValue(t, full, low = full * PALEST) {
  return low * (full / low) ** t;
}

/**
 * Colours of all codes: [256] of [r, g, b, alpha].
 * @param {ArrayLike<number>} scale value of every code, NaN for states
 * @param {Object<number, number[]>} states rgb of a state; others are drawn as patterns
 */
export function palette(scale, { full, low, theme, states }) {
  return Array.from({ length: 256 }, (_, code) => {
    if (states[code]) return [...states[code], 255];
    return Number.isNaN(scale[code]) ? [0, 0, 0, 0] : [...sequential(amount(scale[code], full, low), theme), 255];
  });
}

/** Cells over the full scale. */
export function clipped(codes, scale, full) {
  let count = 0;
  for (let i = 0; i < codes.length; i += 1) if (scale[codes[i]] > full * 1.0001) count += 1;
  return count;
}

/** {layer, part} of `layers.7.router`; layer is null for `embed`, `norm`, `logits`. */
export function siteParts(site) {
  const found = /^layers\.(\d+)\.(.+)$/.exec(site);
  return found ? { layer: Number(found[1]), part: found[2] } : { layer: null, part: site };
}

/**
 * Rows as they are shown: a layer stands for its sites until it is opened.
 * @param {string[]} sites in the order in which they run
 * @param {Set<number>|'all'} open layers
 * @returns {Array<{site: string, layer: ?number, toggle: ?string, indent: boolean, first: number, last: number}>}
 *   first and last: indices of the sites that the row stands for
 */
export function rowsOf(sites, open) {
  const rows = [];
  for (let i = 0; i < sites.length;) {
    const { layer } = siteParts(sites[i]);
    let end = i + 1;
    while (layer !== null && end < sites.length && siteParts(sites[end]).layer === layer) end += 1;
    const several = end - i > 1;
    const opened = several && (open === 'all' || open.has(layer));
    if (opened) {
      for (let k = i; k < end; k += 1) rows.push({ site: sites[k], layer, toggle: k === end - 1 ? 'open' : null, indent: k < end - 1, first: k, last: k });
    } else {
      const out = sites.findIndex((site, k) => k >= i && k < end && siteParts(site).part === 'out');
      rows.push({ site: sites[out < 0 ? end - 1 : out], layer, toggle: several ? 'closed' : null, indent: false, first: i, last: end - 1 });
    }
    i = end;
  }
  return rows;
}

/** What `sites=` of the request says for these rows: patterns where they are enough. */
export function patternsOf(rows, sites) {
  if (rows.length === sites.length) return '*';
  const closed = rows.filter((row) => row.toggle === 'closed');
  const usual = closed.every((row) => row.site.endsWith('.out'));
  const opened = new Set(rows.filter((row) => row.toggle === 'open').map((row) => row.layer));
  const others = rows.filter((row) => row.toggle === null && !row.indent && !row.site.endsWith('.out')).map((row) => row.site);
  const parts = usual ? ['layers.*.out'] : rows.filter((row) => !opened.has(row.layer) && row.layer !== null).map((row) => row.site);
  return [...parts, ...[...opened].map((layer) => `layers.${layer}.*`), ...others].join(',');
}

/** Row that shows a site. */
export function rowOfSite(rows, index) {
  return rows.findIndex((row) => index >= row.first && index <= row.last);
}

/** Row of what stands in the address: a layer number or a site; -1 for neither. */
export function rowOfText(rows, text) {
  if (text === null) return -1;
  if (!/^\d+$/.test(text)) {
    const exact = rows.findIndex((row) => row.site === text);
    return exact >= 0 ? exact : rows.findIndex((row) => row.layer !== null && row.layer === siteParts(text).layer);
  }
  return rows.findLastIndex((row) => row.layer === Number(text));
}

/** What stands in the address for a row: the number of a closed layer, else the site. */
export function textOfRow(row) {
  return row.layer !== null && (row.toggle === 'closed' || row.site.endsWith('.out')) ? String(row.layer) : row.site;
}

/** Per bin the first site of the front in it; `starts` are positions counted from 0. */
export function binFront(front, starts, to) {
  const out = new Uint16Array(starts.length).fill(NONE);
  for (let i = 0; i < starts.length; i += 1) {
    const end = i + 1 < starts.length ? starts[i + 1] : to;
    for (let p = starts[i]; p < end; p += 1) if (front[p] < out[i]) out[i] = front[p];
  }
  return out;
}

/** The next position, or the one before, where there is a front and the position before it has another one; -1 none. */
export function nextChange(front, from, back) {
  const step = back ? -1 : 1;
  for (let p = from + step; p >= 0 && p < front.length; p += step) {
    if (front[p] !== NONE && (p === 0 || front[p - 1] !== front[p])) return p;
  }
  return -1;
}

/** A window [from, to) made narrower or wider by a factor around a position. */
export function zoom(from, to, n, factor, at) {
  const width = Math.min(n, Math.max(Math.min(n, 16), Math.round((to - from) * factor)));
  const share = to > from ? (at - from) / (to - from) : 0.5;
  return pan(Math.round(at - share * width), width, n);
}

/** A window of a width, moved to lie within 0..n. */
export function pan(from, width, n) {
  const start = Math.min(Math.max(from, 0), Math.max(0, n - width));
  return [start, Math.min(n, start + width)];
}

/** Index of the bin that holds a position. */
export function binAt(starts, position) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= position) low = middle;
    else high = middle - 1;
  }
  return low;
}
