// The whole sequence as one canvas: per bucket the largest |delta|, and what must not be missed.

import { symlog } from './colour.js';
import { h } from './dom.js';
import { signed, short } from './format.js';
import { cleared, colour } from './theme.js';

const HEIGHT = 44;

/**
 * @param {{starts: number[], max_abs: (number|null)[], state: string[]}} map
 * @param {number} n positions of the sequence
 * @param {(position: number) => void} jump
 */
export function makeMinimap(map, n, jump) {
  const canvas = h('canvas', {
    class: 'minimap', height: HEIGHT, tabindex: 0, role: 'slider', 'aria-label': 'Sequence map; arrows move, Enter goes there',
    'aria-valuemin': 0, 'aria-valuemax': Math.max(0, n - 1),
  });
  let cursor = 0;
  let view = { start: 0, end: n, pinned: null, scale: 0.1 };
  const count = map.starts.length;

  function draw() {
    const width = canvas.clientWidth || 600;
    const pen = cleared(canvas, width, HEIGHT);
    const floor = HEIGHT - 8;
    for (let i = 0; i < count; i += 1) {
      const left = Math.floor((i * width) / count);
      const right = Math.max(left + 1, Math.floor(((i + 1) * width) / count));
      const peak = map.max_abs[i];
      if (map.state[i] === 'non_finite') {
        pen.fillStyle = colour('nonfinite');
        pen.fillRect(left, 0, Math.max(2, right - left), floor);
      } else if (peak !== null && Number(peak) > 0) {
        pen.fillStyle = colour(Number(peak) > view.scale ? 'over' : 'bar');
        const tall = Math.max(2, symlog(Number(peak), view.scale) * floor);
        pen.fillRect(left, floor - tall, right - left, tall);
      } else if (map.state[i] !== 'compared') {
        pen.fillStyle = colour(map.state[i].startsWith('missing') ? 'missing' : 'strong');
        pen.fillRect(left, floor - 2, right - left, 2);
      }
    }
    const x = (position) => (position / Math.max(1, n)) * width;
    pen.fillStyle = colour('dim');
    pen.fillRect(x(view.start), HEIGHT - 4, Math.max(3, x(view.end) - x(view.start)), 4);
    if (view.pinned !== null) {
      pen.fillStyle = colour('focus');
      pen.fillRect(x(view.pinned) - 1, 0, 3, HEIGHT);
    }
    if (document.activeElement === canvas && count) {
      pen.strokeStyle = colour('focus');
      pen.strokeRect(x(map.starts[cursor]) + 0.5, 0.5, Math.max(3, width / count), floor);
    }
    canvas.setAttribute('aria-valuenow', map.starts[cursor] ?? 0);
    canvas.setAttribute('aria-valuetext', count ? `position ${map.starts[cursor]}, largest difference ${short(map.max_abs[cursor])}, ${map.state[cursor].replace('_', ' ')}` : 'empty');
  }

  const bucketAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 0.999999);
    return Math.floor(share * count);
  };
  canvas.addEventListener('click', (event) => {
    if (count) jump(map.starts[bucketAt(event)]);
  });
  canvas.addEventListener('mousemove', (event) => {
    if (!count) return;
    const i = bucketAt(event);
    canvas.title = `from position ${map.starts[i]}: max |\u0394| ${signed(map.max_abs[i])}`;
  });
  canvas.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 32, PageUp: -32, Home: -count, End: count }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !count) return;
    if (step) cursor = Math.min(Math.max(cursor + step, 0), count - 1);
    else if (event.key === 'Enter') jump(map.starts[cursor]);
    else return;
    event.preventDefault();
    event.stopPropagation();
    draw();
  });
  canvas.addEventListener('focus', draw);
  canvas.addEventListener('blur', draw);
  const observer = new ResizeObserver(draw);
  observer.observe(canvas);
  return {
    canvas,
    set(next) {
      view = { ...view, ...next };
      if (view.pinned !== null && count) cursor = Math.max(0, map.starts.findLastIndex((s) => s <= view.pinned));
      draw();
    },
    close: () => observer.disconnect(),
  };
}
