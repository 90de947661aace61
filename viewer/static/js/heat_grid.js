// A map of rows by positions on a canvas: cells of one byte, a cell cursor, zoom by drag.

import { h } from './dom.js';
import { cleared, colour } from './theme.js';

const GUTTER = 132;
const TICKS = 7; // marks of tokens, above the cells
const AXIS = 18;
const TALL = 560;
const FONT = '11px ui-monospace, "DejaVu Sans Mono", monospace';

/**
 * @param {{label: string, describedBy: string, tall?: number,
 *   move: (row: number, position: number, click: boolean) => void, open: (position: number) => void,
 *   hover: (row: ?number, position: ?number) => void, zoom: (from: number, to: number) => void,
 *   toggle?: (row: number) => void, resized: () => void}} on
 */
export function makeGrid(on) {
  const canvas = h('canvas', { class: 'grid', tabindex: 0, role: 'application', 'aria-roledescription': 'map of layers and tokens', 'aria-label': on.label, 'aria-describedby': on.describedBy });
  const root = h('div', { class: 'gridbox' }, canvas);
  let view = null; // {rows, codes, bins, starts, from, to, colours, hatched, line, ticks, cursor}
  let image = null;
  let drag = null;
  let wide = 0;

  const plot = () => Math.max(64, Math.floor(canvas.clientWidth || 700) - GUTTER - 2);
  const rowHeight = () => Math.min(20, Math.max(4, Math.floor((on.tall || TALL) / Math.max(1, view.rows.length))));
  const x = (position) => GUTTER + ((position - view.from) / Math.max(1, view.to - view.from)) * plot();
  const binX = (bin) => (bin < view.bins ? x(view.starts[bin]) : x(view.to));

  function draw() {
    if (!view) return;
    const ratio = devicePixelRatio || 1;
    const [tall, width] = [rowHeight(), GUTTER + plot() + 2];
    const rows = view.rows.length;
    const height = TICKS + rows * tall + AXIS;
    const pen = cleared(canvas, width, height);
    pen.imageSmoothingEnabled = false;
    const place = [GUTTER, TICKS, plot(), rows * tall];
    if (view.bins && rows) {
      image = image || paint(view);
      pen.drawImage(image.cells, ...place);
      const size = [...place, ratio].join(' ');
      if (image.size !== size) {
        image.patterns = image.masks.map(([code, mask]) => patterned(mask, view.hatched[code], place, ratio));
        image.size = size;
      }
      for (const pattern of image.patterns) pen.drawImage(pattern, ...place);
    }
    drawLabels(pen, tall);
    drawAxis(pen, height);
    if (view.line) drawLine(pen, tall);
    drawCursor(pen, tall, height);
    pen.strokeStyle = colour('strong');
    pen.strokeRect(GUTTER - 0.5, TICKS - 0.5, plot() + 1, rows * tall + 1);
    if (drag && drag.moved) {
      pen.fillStyle = colour('focus');
      pen.globalAlpha = 0.25;
      pen.fillRect(Math.min(drag.from, drag.to), TICKS, Math.abs(drag.to - drag.from), rows * tall);
      pen.globalAlpha = 1;
    }
  }

  function drawLabels(pen, tall) {
    pen.font = FONT;
    pen.textBaseline = 'middle';
    const every = Math.ceil(12 / tall);
    view.rows.forEach((row, i) => {
      const here = view.cursor && view.cursor.row === i;
      if (!here && i % every) return;
      if (!here && view.cursor && Math.abs(view.cursor.row - i) * tall < 12) return;
      const mark = row.toggle === 'open' ? '\u25be ' : row.toggle === 'closed' ? '\u25b8 ' : row.indent ? '  \u2502' : '';
      pen.fillStyle = colour(here ? 'text' : 'dim');
      const text = mark + row.label;
      pen.fillText(text.length > 19 ? `${text.slice(0, 18)}\u2026` : text, 2, TICKS + (i + 0.5) * tall);
    });
  }

  function drawAxis(pen, height) {
    pen.fillStyle = colour('dim');
    pen.textBaseline = 'alphabetic';
    const span = view.to - view.from;
    const rough = (span / plot()) * 90;
    const unit = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
    const step = Math.max(1, [1, 2, 5, 10].map((k) => k * unit).find((k) => k >= rough));
    for (let p = Math.ceil(view.from / step) * step; p < view.to; p += step) {
      pen.fillRect(x(p), height - AXIS, 1, 4);
      const text = p.toLocaleString('en-US');
      if (x(p) + pen.measureText(text).width < GUTTER + plot()) pen.fillText(text, x(p) + 2, height - 4);
    }
    if (view.prompt > view.from && view.prompt < view.to) {
      pen.fillStyle = colour('text');
      pen.fillRect(x(view.prompt) - 0.5, TICKS, 1, height - AXIS - TICKS + 6);
    }
    if (!view.ticks) return;
    pen.fillStyle = colour('over');
    for (let i = 0; i < view.bins; i += 1) if (view.ticks[i]) pen.fillRect(binX(i), 0, Math.max(1, binX(i + 1) - binX(i)), TICKS - 2);
  }

  // The front stands on the upper edge of its rows, with a halo so that it shows on any colour.
  function drawLine(pen, tall) {
    const path = new Path2D();
    let last = -1;
    for (let i = 0; i < view.bins; i += 1) {
      const row = view.line[i];
      if (row >= 0) {
        const y = TICKS + row * tall;
        if (last < 0) path.moveTo(binX(i), y);
        else path.lineTo(binX(i), y);
        path.lineTo(binX(i + 1), y);
      }
      last = row;
    }
    for (const [name, width] of [['ground', 5], ['text', 2]]) {
      pen.strokeStyle = colour(name);
      pen.lineWidth = width;
      pen.stroke(path);
    }
    pen.lineWidth = 1;
  }

  function drawCursor(pen, tall, height) {
    const { cursor } = view;
    if (!cursor || cursor.position < view.from || cursor.position >= view.to || !view.bins) return;
    const bin = binOf(cursor.position);
    const [left, right] = [binX(bin), binX(bin + 1)];
    pen.fillStyle = colour('focus');
    pen.fillRect((left + right) / 2 - 1, 0, 2, TICKS - 1);
    pen.fillRect((left + right) / 2 - 1, height - AXIS, 2, 5);
    const [w, t] = [Math.max(7, right - left + 2), Math.max(7, tall + 2)];
    const box = [(left + right - w) / 2, TICKS + (cursor.row + 0.5) * tall - t / 2, w, t];
    pen.lineWidth = 4;
    pen.strokeStyle = colour('ground');
    pen.strokeRect(...box);
    pen.lineWidth = 2;
    pen.strokeStyle = colour('focus');
    pen.strokeRect(...box);
    pen.lineWidth = 1;
  }

  function binOf(position) {
    let bin = Math.min(view.bins - 1, Math.floor(((position - view.from) * view.bins) / (view.to - view.from)));
    while (bin + 1 < view.bins && view.starts[bin + 1] <= position) bin += 1;
    while (bin > 0 && view.starts[bin] > position) bin -= 1;
    return bin;
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    const share = (left - GUTTER) / plot();
    const row = Math.floor((top - TICKS) / rowHeight());
    const inside = view && view.bins > 0 && share >= 0 && share < 1;
    const position = inside ? Math.min(view.to - 1, Math.floor(view.from + share * (view.to - view.from))) : null;
    return { left, row: view && row >= 0 && row < view.rows.length ? row : null, position: position === null ? null : view.starts[binOf(position)], gutter: left < GUTTER };
  }

  canvas.addEventListener('pointerdown', (event) => {
    const here = at(event);
    if (event.button !== 0 || !view) return;
    if (here.gutter && here.row !== null && view.rows[here.row].toggle && on.toggle) on.toggle(here.row);
    else if (here.position !== null) {
      drag = { from: here.left, to: here.left, start: here, moved: false };
      canvas.setPointerCapture(event.pointerId);
    }
  });
  canvas.addEventListener('pointermove', (event) => {
    const here = at(event);
    if (drag) {
      drag.to = Math.min(Math.max(here.left, GUTTER), GUTTER + plot());
      drag.moved = drag.moved || Math.abs(drag.to - drag.from) > 5;
      draw();
    } else on.hover(here.row, here.row === null ? null : here.position);
  });
  canvas.addEventListener('pointerup', () => {
    if (!drag) return;
    const done = drag;
    drag = null;
    if (done.moved) {
      const share = (left) => view.from + ((left - GUTTER) / plot()) * (view.to - view.from);
      const [low, high] = [share(Math.min(done.from, done.to)), share(Math.max(done.from, done.to))];
      on.zoom(Math.floor(low), Math.max(Math.floor(low) + 1, Math.ceil(high)));
    } else if (done.start.row !== null) on.move(done.start.row, done.start.position, true);
    draw();
  });
  canvas.addEventListener('pointercancel', () => { drag = null; draw(); });
  canvas.addEventListener('pointerleave', () => { if (!drag) on.hover(null, null); });
  canvas.addEventListener('keydown', (event) => {
    if (!view || !view.bins || event.ctrlKey || event.metaKey || event.altKey) return;
    const cursor = view.cursor || { row: 0, position: view.from };
    const bin = Math.min(Math.max(binOf(Math.min(Math.max(cursor.position, view.from), view.to - 1)), 0), view.bins - 1);
    const many = event.shiftKey ? 10 : 1;
    const right = { ArrowRight: many, ArrowLeft: -many, Home: -view.bins, End: view.bins }[event.key];
    const down = { ArrowDown: many, ArrowUp: -many, PageDown: 10, PageUp: -10 }[event.key];
    if (event.key === 'Enter') on.open(cursor.position);
    else if (right) on.move(cursor.row, view.starts[Math.min(Math.max(bin + right, 0), view.bins - 1)], false);
    else if (down) on.move(Math.min(Math.max(cursor.row + down, 0), view.rows.length - 1), cursor.position, false);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  const observer = new ResizeObserver(() => {
    if (plot() === wide) return;
    wide = plot();
    draw();
    on.resized();
  });
  observer.observe(root);
  return {
    root,
    canvas,
    /** Columns that there is room for. */
    columns: plot,
    draw(next) {
      if (!view || next.codes !== view.codes || next.colours !== view.colours) image = null;
      view = next;
      draw();
    },
    close: () => observer.disconnect(),
  };
}

/** One pixel a cell, and a mask for every pattern that occurs. */
function paint({ codes, bins, rows, colours, hatched }) {
  const layer = () => h('canvas', { width: bins, height: rows.length });
  const cells = layer();
  const data = new ImageData(bins, rows.length);
  const masks = new Map();
  const inks = new Uint32Array(Uint8ClampedArray.from(colours.flat()).buffer);
  const pixels = new Uint32Array(data.data.buffer);
  for (let i = 0; i < codes.length; i += 1) {
    pixels[i] = inks[codes[i]];
    if (hatched[codes[i]]) {
      if (!masks.has(codes[i])) masks.set(codes[i], new ImageData(bins, rows.length));
      masks.get(codes[i]).data[4 * i + 3] = 255;
    }
  }
  cells.getContext('2d').putImageData(data, 0, 0);
  const made = [...masks].map(([code, mask]) => {
    const canvas = layer();
    canvas.getContext('2d').putImageData(mask, 0, 0);
    return [code, canvas];
  });
  return { cells, masks: made };
}

/** A mask filled with lines (`/`, `x`) or dots, at the size of the map. */
function patterned(mask, [kind, name], [, , width, height], ratio) {
  const canvas = h('canvas', { width: Math.max(1, Math.round(width * ratio)), height: Math.max(1, Math.round(height * ratio)) });
  const pen = canvas.getContext('2d');
  pen.imageSmoothingEnabled = false;
  pen.drawImage(mask, 0, 0, canvas.width, canvas.height);
  pen.globalCompositeOperation = 'source-in';
  pen.fillStyle = pen.createPattern(tile(kind, colour(name), ratio), 'repeat');
  pen.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

function tile(kind, ink, ratio) {
  const size = Math.round(6 * ratio);
  const canvas = h('canvas', { width: size, height: size });
  const pen = canvas.getContext('2d');
  pen.strokeStyle = ink;
  pen.fillStyle = ink;
  pen.lineWidth = ratio;
  if (kind === '.') pen.fillRect(size / 2 - ratio, size / 2 - ratio, 2 * ratio, 2 * ratio);
  for (const shift of kind === '.' ? [] : [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift, size);
    pen.lineTo(shift + size, 0);
    if (kind === 'x') {
      pen.moveTo(shift, 0);
      pen.lineTo(shift + size, size);
    }
    pen.stroke();
  }
  return canvas;
}

/** What the legend says of the line where the prompt ends; null without one. */
export function promptEnd({ prompt_len: prompt, n }) {
  return prompt > 0 && prompt < n ? h('li', {}, h('span', { class: 'cellstate promptend', 'aria-hidden': 'true' }), ' end of the prompt') : null;
}

/** [r, g, b] of a colour of the sheet, which has them as #rgb or #rrggbb. */
export function rgb(name) {
  const text = colour(name).replace('#', '');
  const long = text.length === 3 ? [...text].map((c) => c + c).join('') : text;
  return [0, 2, 4].map((i) => parseInt(long.slice(i, i + 2), 16));
}
