// What the screens with a map of layers by tokens share: whose page it is, and when it is closed.

import { onTheme } from './theme.js';
import { current } from './route.js';

/**
 * A screen with a `grid` (heat_grid.js) over one sequence; it has `follow(state)`, `draw()` and
 * `canDraw()`, whether there is something to draw yet.
 */
export class GridPage {
  constructor(state, info, path, signal) {
    this.base = { screen: state.screen, run: state.run, seq: state.seq, rep: state.params.get('rep') };
    this.info = info;
    this.path = path;
    this.signal = signal;
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

  /** The room has changed: bins and labels are made anew, once it stands still. */
  resized() {
    clearTimeout(this.late);
    this.late = setTimeout(() => this.view && this.follow(current()), 100);
  }
}
