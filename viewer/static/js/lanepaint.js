// The lanes as a picture: axis, weight versions, steps or bins, events, the map above, the legend.

import { h } from './dom.js';
import { count } from './format.js';
import { KINDS, MARKS, engineName, place, tickText, ticks } from './lanes.js';
import { cleared, colour } from './theme.js';

export const LEFT = 118; // room of the names of the lanes
export const TOP = 46; // axis and marks
const MAP = 34;
const COLOURS = { prefill: 'tl-prefill', mixed: 'tl-mixed', decode: 'tl-decode', verify: 'tl-verify', recompute: 'tl-recompute', score: 'tl-score', unknown: 'strong' };
export const MARK_LETTERS = { update: 'U', sleep: 'Z', wake: 'W', abort: 'A', preempt: 'E', gap: 'G', hook_error: 'H', finding: 'F' };

/**
 * Draws on `canvas` and `map` what `data` has of `view`; the page that extends it owns all four.
 * `at` is what the cursor is on.
 */
export class Picture {
  constructor(whole) {
    this.whole = whole;
    this.data = whole;
    this.view = [0, whole.extent];
    this.at = null;
    this.layout = place(whole.lanes);
    this.lines = new Map(this.layout.rows.map((row) => [row.lane, row]));
    this.swatches = [];
  }

  pen(canvas, height) {
    const width = canvas.clientWidth || 600;
    const pen = cleared(canvas, width, height);
    pen.font = '11px system-ui, sans-serif';
    pen.textBaseline = 'middle';
    return [pen, width];
  }

  draw(drag = null) {
    if (!this.canvas || !this.canvas.isConnected) return;
    const { data, view, whole } = this;
    const tints = {};
    this.tint = (name) => { tints[name] = tints[name] || colour(name); return tints[name]; };
    const height = TOP + this.layout.height + 4;
    const [pen, width] = this.pen(this.canvas, height);
    const x = (t) => LEFT + ((t - view[0]) / (view[1] - view[0])) * (width - LEFT);
    this.drawAxis(pen, x, width, height);
    const patterns = makePatterns(pen, this.tint);
    for (const row of this.layout.rows) {
      pen.fillStyle = this.tint(row.lane === null ? 'text' : 'dim');
      const engine = whole.engines.find((e) => e.id === row.engine);
      if (row.lane === null) {
        pen.font = '600 11px system-ui, sans-serif';
        pen.fillText(headline(engine, whole.engines), 0, TOP + row.y + row.h / 2);
        pen.font = '11px system-ui, sans-serif';
      } else {
        const { kind, steps } = whole.lanes[row.lane];
        pen.fillText(`${KINDS[kind].letter}  ${kind}`, 8, TOP + row.y + row.h / 2);
        pen.textAlign = 'right';
        pen.fillText(count(steps), LEFT - 8, TOP + row.y + row.h / 2);
        pen.textAlign = 'left';
        pen.fillStyle = this.tint('surface');
        pen.fillRect(LEFT, TOP + row.y + 1, width - LEFT, row.h - 2);
      }
    }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height);
    pen.clip();
    if (data.spans) this.drawSpans(pen, x, patterns);
    else if (data.bins) this.drawBins(pen, x, patterns);
    this.drawMarks(pen, x, height);
    if (drag) {
      pen.globalAlpha = 0.25;
      pen.fillStyle = this.tint('focus');
      pen.fillRect(x(drag.from), 0, x(drag.to) - x(drag.from), height);
      pen.globalAlpha = 1;
    }
    pen.restore();
    this.drawMap();
    this.drawNote();
    this.drawReadout();
  }

  drawAxis(pen, x, width, height) {
    const { whole, view } = this;
    const found = ticks(...view, Math.max(2, Math.floor((width - LEFT) / 110)));
    const step = found.length > 1 ? found[1] - found[0] : view[1] - view[0];
    for (const t of found) {
      pen.fillStyle = this.tint('line');
      pen.fillRect(x(t), 14, 1, height);
      pen.fillStyle = this.tint('dim');
      pen.fillText(tickText(t, step, whole.axis, whole.origin), x(t) + 3, 7);
    }
    pen.fillStyle = this.tint('dim');
    pen.fillText(whole.axis === 'time' ? 'time from start' : 'step number', 0, 7);
    this.drawVersions(pen, x, width);
  }

  // The versions of the weights as bands; of several engines the first.
  drawVersions(pen, x, width) {
    const { versions } = this.data;
    if (!versions.length) return;
    pen.fillStyle = this.tint('dim');
    pen.fillText('weights', 0, 21);
    const engine = versions[0].engine;
    versions.filter((v) => v.engine === engine).forEach((v) => {
      const [a, b] = [Math.max(LEFT, x(v.t)), v.until === null ? width : Math.min(width, x(v.until))];
      if (b <= LEFT || a >= width) return;
      pen.fillStyle = this.tint(v.state === 'dirty' ? 'bad' : v.version % 2 ? 'strong' : 'line');
      pen.fillRect(a, 15, Math.max(1, b - a - 1), 12);
      if (b - a > 18) {
        pen.save();
        pen.beginPath();
        pen.rect(a, 14, b - a - 1, 14);
        pen.clip();
        pen.fillStyle = this.tint(v.state === 'dirty' ? 'ground' : 'text');
        pen.fillText(v.state === 'dirty' ? 'dirty' : `v${v.version}${v.label ? ` ${v.label}` : ''}`, a + 3, 21);
        pen.restore();
      }
    });
  }

  drawSpans(pen, x, patterns) {
    const { spans, lanes, flags } = this.data;
    const bit = Object.fromEntries(flags.map((name, i) => [name, 1 << i]));
    const top = Math.max(1, ...spans.rows.map((r) => r || 0));
    for (const i of this.inView()) {
      const end = spans.t[i] + (spans.duration[i] || 0);
      const row = this.lines.get(spans.lane[i]);
      const { kind } = lanes[spans.lane[i]];
      const left = x(spans.t[i]);
      const wide = Math.max(1, x(end) - left - (x(end) - left > 3 ? 1 : 0));
      const full = row.h - 4;
      // as high as it has rows, at least a third
      const tall = spans.rows[i] === null ? full : full * (0.34 + 0.66 * (spans.rows[i] / top));
      const y = TOP + row.y + 2 + full - tall;
      pen.fillStyle = this.tint(COLOURS[kind]);
      pen.fillRect(left, y, wide, tall);
      if (wide > 6 && patterns[KINDS[kind].pattern]) {
        pen.fillStyle = patterns[KINDS[kind].pattern];
        pen.fillRect(left, y, wide, tall);
      }
      const own = spans.flags ? Object.keys(MARKS).filter((m) => m !== kind && spans.flags[i] & bit[m]) : [];
      if (own.length && wide > 9) label(pen, this.tint, own.map((m) => MARKS[m][0]).join(''), left + 2, TOP + row.y + row.h / 2, wide);
      else if (wide > 26) label(pen, this.tint, `${KINDS[kind].letter} ${spans.rows[i] ?? ''}`, left + 2, TOP + row.y + row.h / 2, wide);
      if (own.length) {
        pen.fillStyle = this.tint('flip');
        pen.fillRect(left, TOP + row.y + 1, Math.max(2, wide), 2);
      }
      if (this.at && this.at.span === i) {
        pen.strokeStyle = this.tint('focus');
        pen.lineWidth = 2;
        pen.strokeRect(left - 1, TOP + row.y + 1, Math.max(4, wide + 2), row.h - 2);
      }
    }
  }

  drawBins(pen, x, patterns) {
    const { bins, lanes, window } = this.data;
    bins.lanes.forEach((lane, l) => {
      const row = this.lines.get(l);
      const { kind } = lanes[l];
      const pattern = patterns[KINDS[kind].pattern];
      lane.share.forEach((share, i) => {
        if (!share && !lane.steps[i]) return;
        const left = x(bins.edges[i] + window[0]);
        const wide = Math.max(1, x(bins.edges[i + 1] + window[0]) - left);
        const tall = Math.max(1, ((row.h - 4) * share) / 1000);
        pen.fillStyle = this.tint(COLOURS[kind]);
        pen.fillRect(left, TOP + row.y + row.h - 2 - tall, wide, tall);
        if (pattern) {
          pen.fillStyle = pattern;
          pen.fillRect(left, TOP + row.y + row.h - 2 - tall, wide, tall);
        }
      });
    });
  }

  drawMarks(pen, x, height) {
    const bad = ['gap', 'hook_error', 'finding'];
    const shown = this.data.events.filter((e) => e.t !== null && x(e.t) >= LEFT && x(e.t) <= this.canvas.clientWidth);
    // a line through the lanes for each of a few; many would hide them
    const foot = shown.length > 40 ? 13 : height;
    let last = -99;
    for (const event of shown) {
      const at = x(event.t);
      pen.fillStyle = this.tint(bad.includes(event.kind) ? 'bad' : 'missing');
      pen.fillRect(at, 30, 1, foot);
      if (at - last > 11) {
        pen.fillRect(at - 5, 30, 11, 13);
        pen.fillStyle = this.tint('ground');
        pen.textAlign = 'center';
        pen.fillText(MARK_LETTERS[event.kind] || '?', at + 0.5, 37);
        pen.textAlign = 'left';
        last = at;
      }
    }
  }

  drawMap() {
    const { whole, view } = this;
    const [pen, width] = this.pen(this.map, MAP);
    const kinds = Object.keys(whole.map);
    const bins = kinds.length ? whole.map[kinds[0]].length : 0;
    const wide = (width - LEFT) / Math.max(1, bins);
    pen.fillStyle = this.tint('dim');
    pen.fillText('whole recording', 0, MAP / 2);
    for (let i = 0; i < bins; i += 1) {
      let y = MAP - 4;
      for (const kind of kinds) {
        const tall = (whole.map[kind][i] / 1000) * (MAP - 8);
        pen.fillStyle = this.tint(COLOURS[kind]);
        pen.fillRect(LEFT + i * wide, y - tall, Math.ceil(wide), tall);
        y -= tall;
      }
    }
    const x = (t) => LEFT + (t / whole.extent) * (width - LEFT);
    pen.strokeStyle = this.tint('focus');
    pen.lineWidth = 2;
    pen.strokeRect(x(view[0]) + 1, 1, Math.max(3, x(view[1]) - x(view[0]) - 2), MAP - 2);
  }

  legend() {
    const swatch = (kind) => {
      const canvas = h('canvas', { class: 'swatch', width: 28, height: 14, 'aria-hidden': 'true' });
      const paint = () => {
        const pen = canvas.getContext('2d');
        pen.fillStyle = colour(COLOURS[kind]);
        pen.fillRect(0, 0, 28, 14);
        const pattern = makePatterns(pen)[KINDS[kind].pattern];
        if (pattern) {
          pen.fillStyle = pattern;
          pen.fillRect(0, 0, 28, 14);
        }
      };
      paint();
      this.swatches.push(paint);
      return canvas;
    };
    const kinds = [...new Set(this.whole.lanes.map((l) => l.kind))];
    const marks = Object.entries(MARKS).map(([, [letter, words]]) => h('li', {}, h('b', {}, letter), ` ${words}`));
    const events = Object.keys(this.whole.events_total).map((kind) => h('li', {}, h('b', {}, MARK_LETTERS[kind]), ` ${kind === 'preempt' ? 'preempt (evicted)' : kind.replace('_', ' ')}`));
    const words = { verify: 'verify: decode with more tokens than rows', unknown: 'kind not recorded' };
    return h('div', { class: 'legend tl-legend', id: 'legend' },
      h('ul', { class: 'states' }, kinds.map((kind) => h('li', {}, swatch(kind), ` ${KINDS[kind].letter} ${words[kind] || kind}`))),
      h('ul', { class: 'states' }, marks),
      events.length && this.whole.axis === 'time' ? h('ul', { class: 'states' }, events) : null,
      this.explain);
  }
}

function headline(engine, engines) {
  return [engineName(engine.id, engines), engine.role, engine.adapter, engine.replica === null ? null : `replica ${engine.replica}`,
    engine.processes.length ? engine.processes.slice(0, 3).join(', ') + (engine.processes.length > 3 ? ` and ${engine.processes.length - 3} more` : '') : null].filter(Boolean).join(' \u00b7 ');
}

function label(pen, tint, text, x, y, room) {
  const { width } = pen.measureText(text);
  if (width + 4 > room) return;
  pen.fillStyle = tint('ground');
  pen.fillRect(x - 1, y - 7, width + 3, 14);
  pen.fillStyle = tint('text');
  pen.fillText(text, x, y);
}

/** Small tiles over the colour: kinds are told apart in grey, too. */
function makePatterns(pen, tint = colour) {
  const make = (paint) => {
    const tile = h('canvas', { width: 8, height: 8 });
    const ink = tile.getContext('2d');
    ink.strokeStyle = ink.fillStyle = tint('ground');
    ink.lineWidth = 1.4;
    paint(ink);
    return pen.createPattern(tile, 'repeat');
  };
  const line = (ink, ...points) => {
    ink.beginPath();
    points.forEach(([x, y], i) => (i % 2 ? ink.lineTo(x, y) : ink.moveTo(x, y)));
    ink.stroke();
  };
  return {
    cross: make((ink) => line(ink, [0, 8], [8, 0], [0, 0], [8, 8])),
    up: make((ink) => line(ink, [-2, 2], [2, -2], [0, 8], [8, 0], [6, 10], [10, 6])),
    dots: make((ink) => [[1, 1], [5, 5]].forEach(([x, y]) => ink.fillRect(x, y, 2, 2))),
    rows: make((ink) => line(ink, [0, 4], [8, 4])),
  };
}
