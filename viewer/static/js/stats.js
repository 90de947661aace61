// What the strip can be coloured by.

import { DEFAULT_PRESET, PRESETS, paint, paintAmount } from './colour.js';

const amounts = (...values) => values.map((value) => ({ text: String(value), value }));

/**
 * `value(data, i)` is null where the token has none. `columns` are arrays that the window must have
 * besides the usual ones; a tape that lacks them has no such statistic.
 */
export const STATS = [
  { name: 'dlp', text: '\u0394 logprob', unit: 'nat', signed: true, presets: PRESETS, columns: [], value: (data, i) => data.delta(i) },
  {
    name: 'ratio', text: 'ratio \u2212 1', unit: 'e^\u0394 \u2212 1', signed: true, presets: PRESETS, columns: [],
    value: (data, i) => (data.delta(i) === null ? null : Math.expm1(data.delta(i))),
  },
  {
    name: 'dp', text: '\u0394 probability', unit: 'p_B \u2212 p_A', signed: true, presets: PRESETS, columns: [],
    value: (data, i) => (data.delta(i) === null ? null : Math.exp(data.b(i)) - Math.exp(data.a(i))),
  },
  stored('entropy', 'entropy A', 'nat, of the stored top-k and the rest', 'entropy_a', amounts(0.1, 1, 3, 10)),
  stored('rank', 'rank A', '0 is the most probable token', 'rank_a', amounts(10, 100), true),
  stored('kl', 'KL of top-k', 'nat, A against B over what both stored', 'kl', PRESETS),
  stored('overlap', 'top-k overlap', 'share of A\u2019s stored tokens that B stored too', 'topk_overlap', amounts(1)),
];

function stored(name, text, unit, column, presets, log = false) {
  return { name, text, unit, signed: false, presets, columns: [column], log, value: (data, i) => data.extra(column, i) };
}

export function statOf(name) {
  return STATS.find((stat) => stat.name === name) || STATS[0];
}

/** Index of the preset with that text, else the one to begin with. */
export function presetOf(stat, text) {
  const found = stat.presets.findIndex((p) => p.text === text);
  if (found >= 0) return found;
  return stat.presets === PRESETS ? DEFAULT_PRESET : stat.presets.length - 1;
}

/** {ground, ink, thickness, clipped} of a value. */
export function look(stat, value, scale, theme) {
  return stat.signed ? paint(value, scale, theme) : paintAmount(value, scale, theme, stat.log);
}
