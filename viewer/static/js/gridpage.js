// What the screens with a map of layers by tokens share: whose page it is, when it is closed, its window.

import { h, put } from './dom.js';
import { count } from './format.js';
import { pan, zoom } from './heat_math.js';
import { notice } from './notices.js';
import { current } from './route.js';
import { say } from './shell.js';
import { onTheme } from './theme.js';

/**
 * A screen with a `grid` (heat_grid.js) over one sequence; it has `follow(state)`, `draw()`, `window(from, to)`
 * and `canDraw()`, whether there is something to draw yet. Its `view` has `from`, `to` and `tok`.
 */
export class GridPage {
  constructor(state, info, path, signal) {
    this.base = { screen: state.screen, run: state.run, seq: state.seq, rep: state.params.get('rep') };
    this.info = info;
    this.path = path;
    this.signal = signal;
    this.outside = h('div', {});
    this.unthemed = onTheme(() => this.canDraw() && this.draw());
  }

  close() {
    this.unthemed();
    clearTimeout(this.late);
    if (this.grid) this.grid.close();
  }

  /** Another address of the same page: change what differs. */
  update(state) {
    const { screen, run, seq, rep } = this.base;
    const same = state.screen === screen && state.run === run && state.seq === seq && state.params.get('rep') === rep;
    if (same && this.grid) this.follow(state);
    return same;
  }

  /** What the address asks for and the sequence does not have: a position, a layer. */
  drawOutside(position, layer, layers) {
    const { n } = this.info;
    const said = (title, text) => notice({ level: 'warn', title, text });
    put(this.outside,
      position !== null && position >= n ? said(`There is no position ${count(position)}`, `The sequence has positions 0 to ${count(n - 1)}; the cursor is on the last one.`) : null,
      layer !== null ? said(`There is no layer ${layer}`, `${layers}. Choose one in the map.`) : null);
  }

  /** The window before or after. */
  beside(step) {
    const { from, to } = this.view;
    return pan(from + step * (to - from), to - from, this.info.n);
  }

  page(step) {
    const next = this.beside(step);
    if (next[0] === this.view.from) say(step < 0 ? 'this is the first window' : 'this is the last window');
    else this.window(...next);
  }

  zoomBy(factor) {
    const { from, to, tok } = this.view;
    const at = tok !== null && tok >= from && tok < to ? tok : (from + to) / 2;
    this.window(...zoom(from, to, this.info.n, factor, at));
  }

  /** The room has changed: bins and labels are made anew, once it stands still. */
  resized() {
    clearTimeout(this.late);
    this.late = setTimeout(() => this.view && this.follow(current()), 100);
  }
}
