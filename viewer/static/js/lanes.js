// The timeline without a page: times, views, which span lies where, and words for it.

import { NONE, count, plural } from './format.js';

/** How a kind looks: its letter, and the pattern that tells it apart without colour. */
export const KINDS = {
  prefill: { letter: 'P', pattern: 'solid' },
  mixed: { letter: 'M', pattern: 'cross' },
  decode: { letter: 'D', pattern: 'plain' },
  verify: { letter: 'V', pattern: 'up' },
  recompute: { letter: 'R', pattern: 'dots' },
  score: { letter: 'S', pattern: 'rows' },
  unknown: { letter: '?', pattern: 'plain' },
};

/** Marks of what a step has besides: a row of that kind is in it. */
export const MARKS = { recompute: ['R', 'recomputed after a preemption'], cached: ['C', 'prefix from the cache'], chunk: ['\u2026', 'unfinished prefill'], verify: ['V', 'drafts verified'] };

/** Absolute ns as text -> offset from the origin, or null. */
export function toOffset(text, origin) {
  return text !== null && text !== undefined && /^\d{1,19}$/.test(text) ? Number(BigInt(text) - BigInt(origin)) : null;
}

/** Offset -> absolute ns as text, for the address. */
export function toAbsolute(offset, origin) {
  return String(BigInt(origin) + BigInt(Math.round(offset)));
}

/** A view [t0, t1] kept inside [0, extent], at least `least` wide. */
export function clamp(t0, t1, extent, least = 1) {
  const width = Math.min(Math.max(t1 - t0, least), extent);
  const start = Math.min(Math.max(t0, 0), extent - width);
  return [start, start + width];
}

/** The view scaled around `at`; factor < 1 is closer. */
export function zoom([t0, t1], factor, at, extent, least = 1) {
  const width = Math.min(Math.max((t1 - t0) * factor, least), extent);
  const share = (at - t0) / (t1 - t0);
  return clamp(at - share * width, at + (1 - share) * width, extent, least);
}

export function pan([t0, t1], share, extent) {
  const move = (t1 - t0) * share;
  return clamp(t0 + move, t1 + move, extent);
}

/** About `n` round ticks inside a view. */
export function ticks(t0, t1, n = 6) {
  const raw = (t1 - t0) / n;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(1, [1, 2, 5, 10].find((m) => m * power >= raw) * power);
  const out = [];
  for (let t = Math.ceil(t0 / step) * step; t <= t1; t += step) out.push(t);
  return out;
}

/** A duration or an offset in ns as text; `step` is how fine it must be. */
export function ns(value, step = Math.abs(value)) {
  if (value === null || value === undefined) return NONE;
  const [unit, size] = [['s', 1e9], ['ms', 1e6], ['\u00b5s', 1e3], ['ns', 1]].find(([, s]) => Math.abs(value) >= s) || ['ns', 1];
  const digits = Math.min(9, Math.max(0, Math.ceil(Math.log10(size / Math.max(1, step))) + (step === Math.abs(value) ? 2 : 0)));
  return `${Number((value / size).toFixed(digits)).toLocaleString('en-US', { maximumFractionDigits: 9 })} ${unit}`;
}

/** What stands on the axis at an offset. */
export function tickText(t, step, axis, origin) {
  return axis === 'step' ? count(Number(origin) + t) : t === 0 ? '0' : ns(t, step);
}

/**
 * Lanes from top to bottom: a heading for each engine, then its lanes.
 * @returns {{rows: {lane: ?number, engine: string, y: number, h: number}[], height: number}}
 */
export function place(lanes, { head = 18, lane = 26, gap = 6 } = {}) {
  const rows = [];
  let y = 0;
  let engine = null;
  lanes.forEach((item, i) => {
    if (item.engine !== engine) {
      if (engine !== null) y += gap;
      engine = item.engine;
      rows.push({ lane: null, engine, y, h: head });
      y += head;
    }
    rows.push({ lane: i, engine, y, h: lane });
    y += lane;
  });
  return { rows, height: y };
}

/** Index of the span at (time, lane), or null; a span without a duration is found within `slack`. */
export function hit(spans, t, lane, slack = 0) {
  let best = null;
  let least = slack;
  for (let i = 0; i < spans.t.length; i += 1) {
    if (spans.lane[i] === lane) {
      const end = spans.t[i] + (spans.duration[i] || 0);
      if (t >= spans.t[i] && t < end) return i;
      const away = t < spans.t[i] ? spans.t[i] - t : t - end;
      if (away <= least) [best, least] = [i, away];
    }
  }
  return best;
}

/** Whether a span reaches into a view. */
export function inside(spans, i, [t0, t1]) {
  return spans.t[i] < t1 && (spans.t[i] >= t0 || spans.t[i] + (spans.duration[i] || 0) > t0);
}

/**
 * Where walking begins when the cursor is not in view: the first step that begins there, or with `back` the
 * last one; else the one that reaches into it; else the nearest behind it, or before it. -1 for none.
 * @param {(i: number) => boolean} mine which spans may be taken
 */
export function entry(spans, [t0, t1], back, mine = () => true) {
  const sign = back ? -1 : 1;
  const rank = (i) => {
    if (spans.t[i] >= t0 && spans.t[i] < t1) return 0;
    if (inside(spans, i, [t0, t1])) return 1;
    return (back ? spans.t[i] < t0 : spans.t[i] >= t1) ? 2 : 3;
  };
  let best = -1;
  for (let i = 0; i < spans.t.length; i += 1) {
    const better = best < 0 || rank(i) < rank(best) || (rank(i) === rank(best) && sign * (spans.t[i] - spans.t[best]) < 0);
    if (mine(i) && rank(i) < 3 && better) best = i;
  }
  return best;
}

/** Id of an engine as short as it can be. */
export function engineName(id, engines) {
  const short = id.slice(0, 8);
  return engines.some((e) => e.id !== id && e.id.startsWith(short)) ? id : short;
}

/** One span as an object with names instead of codes. */
export function spanAt(data, i) {
  const { spans, names, lanes, flags } = data;
  const lane = lanes[spans.lane[i]];
  const text = (name) => (spans[name][i] === null ? null : names[name][spans[name][i]]);
  return {
    engine: lane.engine, kind: lane.kind, step: spans.step[i], t: spans.t[i], duration: spans.duration[i],
    rows: spans.rows[i], tokens: spans.tokens[i], padded: spans.padded_tokens[i],
    graph: text('graph'), attention: text('attention'), experts: text('experts'), cache: text('cache'),
    marks: spans.flags ? flags.filter((_, bit) => spans.flags[i] & (1 << bit)) : null,
  };
}

/** "step 1,204, decode, 32 rows, graph 32, 14.2 ms" */
export function describe(span, axis) {
  return [
    `step ${count(span.step)}`, span.kind,
    span.rows === null ? 'rows not recorded' : plural(span.rows, 'row'),
    span.graph === null ? 'eager' : `graph ${span.graph}`,
    axis === 'step' ? null : span.duration === null ? 'duration not known' : ns(span.duration),
    ...(span.marks || []).filter((m) => MARKS[m] && m !== span.kind).map((m) => MARKS[m][1]),
  ].filter(Boolean).join(', ');
}

/** A bin of a lane in words. */
export function describeBin(data, lane, i) {
  const { share, rows, steps } = data.bins.lanes[lane];
  return `${data.lanes[lane].kind}: ${share[i] / 10} % of the time, ${plural(steps[i], 'step')} begin, most rows ${rows[i] ?? NONE}`;
}
