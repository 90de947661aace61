// How the difference moves from one weight version to the next, or over time: the numbers, and a
// chart of them on a log axis.

import { h, num, svg } from './dom.js';
import { NONE, count, percent, short } from './format.js';
import { scroller } from './scroll.js';

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [620, 190, 48, 86, 12, 30];
const SERIES = [
  { name: 'max_abs', text: 'max', mark: (x, y) => svg('path', { d: `M${x} ${y - 4}l4 7h-8z` }) },
  { name: 'p99_abs', text: 'p99', mark: (x, y) => svg('rect', { x: x - 3, y: y - 3, width: 6, height: 6 }) },
  { name: 'mean_abs', text: 'mean', mark: (x, y) => svg('circle', { cx: x, cy: y, r: 3.2 }) },
];

/**
 * @param {{by_version: Object[], by_time: Object[]}} drift rows with tokens, mean_abs, p99_abs, max_abs,
 *   k3, outside, worst_ratio and `version`, or `t0_ns` and `t1_ns`
 */
export function drift({ by_version: versions = [], by_time: times = [] }) {
  const byVersion = versions.length > 1 || !times.length;
  const rows = byVersion ? versions : times;
  if (!rows.length) return null;
  const name = (row) => (byVersion ? (row.version === null ? 'unknown' : String(row.version)) : clock(row.t0_ns, times[0].t0_ns));
  const first = byVersion ? 'weight version' : 'time from the start';
  const table = scroller('Drift', h('table', { class: 'data wraphead' },
    h('thead', {}, h('tr', {}, [first, 'tokens', 'mean |\u2060\u0394|', 'p99', 'max', 'k3', 'ratio outside 0.8 to 1.2', 'worst ratio'].map((t) => h('th', { scope: 'col', class: 'n' }, t)))),
    h('tbody', {}, rows.map((row) => h('tr', {},
      h('th', { scope: 'row', class: 'n' }, name(row), row.label ? h('span', { class: 'hint' }, ` ${row.label}`) : null),
      num(count(row.tokens)), num(short(row.mean_abs)), num(short(row.p99_abs)), num(short(row.max_abs)), num(short(row.k3)),
      num(percent(row.outside)), num(short(row.worst_ratio)))))));
  if (rows.length < 2) return h('div', {}, table, h('p', { class: 'hint' }, 'One weight version: there is no drift to see.'));
  return h('div', {}, chart(rows, name, first), rows.length > 12 ? h('details', {}, h('summary', {}, 'Numbers'), table) : table);
}

function chart(rows, name, first) {
  const values = rows.flatMap((row) => SERIES.map((s) => Number(row[s.name]))).filter((v) => v > 0 && Number.isFinite(v));
  if (!values.length) return null;
  const low = Math.floor(Math.log10(Math.min(...values)));
  const high = Math.max(Math.ceil(Math.log10(Math.max(...values))), low + 1);
  const floor = HEIGHT - BOTTOM;
  const x = (i) => LEFT + (i / Math.max(1, rows.length - 1)) * (WIDTH - LEFT - RIGHT);
  const y = (v) => (v > 0 ? floor - ((Math.log10(v) - low) / (high - low)) * (floor - TOP) : floor);
  const ticks = [];
  for (let power = low; power <= high; power += 1) {
    ticks.push(
      svg('line', { x1: LEFT, x2: WIDTH - RIGHT, y1: y(10 ** power), y2: y(10 ** power), class: 'grid' }),
      svg('text', { x: LEFT - 4, y: y(10 ** power) + 4, class: 'tick end' }, power >= -2 && power <= 2 ? String(10 ** power) : `1e${power}`),
    );
  }
  const lines = SERIES.map((series, order) => {
    const points = rows.map((row, i) => [x(i), y(Number(row[series.name])), row[series.name]]).filter(([, , v]) => v !== null && Number.isFinite(Number(v)));
    if (!points.length) return null;
    const [, end] = points[points.length - 1];
    return svg('g', { class: `series s${order}` },
      svg('polyline', { points: points.map(([px, py]) => `${px},${py}`).join(' ') }),
      rows.length > 40 ? null : points.map(([px, py]) => series.mark(px, py)),
      svg('text', { x: WIDTH - RIGHT + 8, y: end + 4, class: 'tick' }, series.text));
  });
  const every = Math.ceil(rows.length / 8);
  return svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: 'chart', role: 'img', 'aria-label': `|delta| by ${first}: mean, 99th percentile and maximum; the table has the numbers` },
    ticks, lines,
    rows.map((row, i) => (i % every ? null : svg('text', { x: x(i), y: floor + 14, class: 'tick mid' }, name(row)))),
    svg('line', { x1: LEFT, x2: WIDTH - RIGHT, y1: floor, y2: floor, class: 'axis' }),
    svg('text', { x: WIDTH - RIGHT, y: HEIGHT - 2, class: 'tick end' }, `${first}; |\u0394| in nat, log axis`));
}

function clock(t, start) {
  if (t === null || t === undefined) return NONE;
  const seconds = Math.max(0, (Number(t) - Number(start)) / 1e9);
  return seconds < 120 ? `${short(seconds)} s` : `${short(seconds / 60)} min`;
}
