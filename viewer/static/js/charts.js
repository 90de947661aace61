// The two charts of the overview, as SVG; each has its numbers beside it as text.

import { h, num, svg } from './dom.js';
import { count, short } from './format.js';

const WIDTH = 620;
const HEIGHT = 210;
const LEFT = 44;
const BOTTOM = 34;
const TOP = 16;
const EQUAL = 70; // room of the bar of the equal ones, apart from the axis

/** @param {{edges: number[], counts: number[], equal: ?number, below: number, above: number}} data */
export function histogram(data, threshold) {
  const edges = data.edges.map(Number);
  const log = edges.every((e) => e > 0 && Number.isFinite(e));
  const at = edges.map((e, i) => (log ? Math.log10(e) : i));
  const x0 = LEFT + EQUAL + 12;
  const x = (i) => x0 + ((at[i] - at[0]) / (at[at.length - 1] - at[0])) * (WIDTH - x0 - 12);
  const top = Math.max(1, data.equal || 0, ...data.counts);
  const floor = HEIGHT - BOTTOM;
  // counts on a log axis: the few large ones must be seen beside the many small ones
  const high = Math.log10(top) + 0.3;
  const y = (n) => (n > 0 ? floor - ((Math.log10(n) + 0.3) / (high + 0.1)) * (floor - TOP) : floor);
  const few = data.counts.length <= 24;
  const bar = (left, right, n, name, kind) => [
    svg('rect', { x: left + 0.5, y: y(n), width: Math.max(1, right - left - 1), height: floor - y(n), class: kind }, svg('title', {}, `${name}: ${count(n)} tokens`)),
    few || kind === 'equal' ? svg('text', { x: (left + right) / 2, y: y(n) - 3, class: 'tick mid' }, n ? count(n) : '') : null,
  ];
  const every = Math.ceil(edges.length / 12);
  const ticks = [];
  for (let power = 0; 10 ** power <= top; power += 1) {
    ticks.push(
      svg('line', { x1: LEFT, x2: WIDTH - 12, y1: y(10 ** power), y2: y(10 ** power), class: 'grid' }),
      svg('text', { x: LEFT - 4, y: y(10 ** power) + 4, class: 'tick end' }, power < 4 ? count(10 ** power) : `1e${power}`),
    );
  }
  const name = (i) => `${short(edges[i])} to ${short(edges[i + 1])}`;
  const limit = log ? x0 + ((Math.log10(threshold) - at[0]) / (at[at.length - 1] - at[0])) * (WIDTH - x0 - 12) : null;
  const inside = limit !== null && limit > x0 && limit < WIDTH - 12;
  const chart = svg(
    'svg',
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: 'chart', role: 'img', 'aria-label': 'Histogram of |delta logprob|; the table below has the numbers' },
    ticks,
    data.equal === null ? null : bar(LEFT + 6, LEFT + EQUAL - 6, data.equal, 'bitwise equal', 'equal'),
    data.equal === null ? null : svg('text', { x: LEFT + EQUAL / 2, y: floor + 14, class: 'tick mid' }, 'equal'),
    data.counts.map((n, i) => bar(x(i), x(i + 1), n, name(i), edges[i] >= threshold * 0.999 ? 'over' : 'bar')),
    edges.map((e, i) => (i % every ? null : svg('text', { x: x(i), y: floor + 14, class: 'tick mid' }, tickText(e)))),
    inside ? svg('line', { x1: limit, x2: limit, y1: TOP, y2: floor, class: 'limit' }) : null,
    svg('line', { x1: x0, x2: WIDTH - 12, y1: floor, y2: floor, class: 'axis' }),
    svg('line', { x1: LEFT, x2: LEFT + EQUAL, y1: floor, y2: floor, class: 'axis' }),
    svg('text', { x: WIDTH - 12, y: HEIGHT - 4, class: 'tick end' }, `|\u0394|, nat${log ? ', log axis' : ''}; dashed: ${threshold} nat; tokens on a log axis`),
  );
  const rows = data.counts.map((n, i) => [name(i), n]).filter(([, n]) => n);
  if (data.equal !== null) rows.unshift(['bitwise equal', data.equal]);
  if (data.below) rows.push([`below ${short(edges[0])}, not equal`, data.below]);
  if (data.above) rows.push([`${short(edges[edges.length - 1])} and above`, data.above]);
  return h('figure', {}, chart, h('details', {}, h('summary', {}, 'Numbers'),
    h('table', { class: 'data narrow' },
      h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, '|\u0394|, nat'), h('th', { scope: 'col' }, 'tokens'))),
      h('tbody', {}, rows.map(([label, n]) => h('tr', {}, h('th', { scope: 'row', class: 'n' }, label), num(count(n))))))));
}

function tickText(edge) {
  const power = Math.log10(edge);
  if (Math.abs(power - Math.round(power)) < 1e-9 && (power < -1 || power > 3)) return `1e${Math.round(power)}`;
  return short(edge);
}

/** One bar of a table row. */
export function bars(share, top) {
  const width = share && top ? Math.max(1, (share / top) * 120) : 0;
  return svg('svg', { viewBox: '0 0 120 10', class: 'rowbar', 'aria-hidden': 'true' },
    svg('rect', { x: 0, y: 0, width: 120, height: 10, class: 'track' }),
    svg('rect', { x: 0, y: 0, width, height: 10, class: 'bar' }));
}
