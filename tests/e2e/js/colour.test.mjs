import assert from 'node:assert/strict';
import test from 'node:test';
import { PRESETS, contrast, fromOklch, ink, luminance, paint, symlog, unsymlog } from '../../../viewer/static/js/colour.js';

const SIZES = [1e-9, 1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.3, 1, 5];

test('the scale is symmetric, grows with the difference, and ends at the full scale', () => {
  for (const { value: scale } of PRESETS) {
    let last = 0;
    for (const size of SIZES) {
      const t = symlog(size, scale);
      assert.equal(symlog(-size, scale), -t);
      assert.ok(t >= last && t <= 1);
      last = t;
    }
    assert.equal(symlog(scale, scale), 1);
    assert.equal(symlog(1000 * scale, scale), 1);
  }
});

test('symlog can be undone', () => {
  for (const t of [-1, -0.5, -0.01, 0, 0.2, 0.99, 1]) {
    assert.ok(Math.abs(symlog(unsymlog(t, 0.1), 0.1) - t) < 1e-12);
  }
});

test('clipping begins over the full scale', () => {
  assert.equal(paint(0.1, 0.1, 'light').clipped, false);
  assert.equal(paint(0.1000001, 0.1, 'light').clipped, true);
  assert.equal(paint(-0.2, 0.1, 'light').clipped, true);
});

test('every colour can be read on: 4.5:1 or more', () => {
  for (const theme of ['light', 'dark']) {
    for (const { value: scale } of PRESETS) {
      for (const size of SIZES) {
        for (const delta of [size, -size]) {
          const look = paint(delta, scale, theme);
          assert.ok(contrast(look.ground, look.ink) >= 4.5, `${theme} ${scale} ${delta}`);
        }
      }
    }
  }
  for (let r = 0; r < 256; r += 15) for (let g = 0; g < 256; g += 15) for (let b = 0; b < 256; b += 15) {
    assert.ok(contrast([r, g, b], ink([r, g, b])) >= 4.5);
  }
});

test('the two signs differ in blue against red, not in lightness alone', () => {
  for (const theme of ['light', 'dark']) {
    const [low, high] = [paint(-1, 0.1, theme).ground, paint(1, 0.1, theme).ground];
    assert.ok(low[2] > low[0] + 60, 'A higher is blue');
    assert.ok(high[0] > high[2] + 60, 'B higher is orange');
  }
});

test('size is told by the underline as well', () => {
  const widths = SIZES.map((size) => paint(size, 0.1, 'light').thickness);
  assert.deepEqual(widths, [...widths].sort());
  assert.equal(widths[0], 1);
  assert.equal(widths[widths.length - 1], 4);
});

test('OKLCh conversion meets known colours', () => {
  assert.deepEqual(fromOklch(1, 0, 0), [255, 255, 255]);
  assert.deepEqual(fromOklch(0, 0, 0), [0, 0, 0]);
  assert.deepEqual(fromOklch(0.627955, 0.257683, 29.2339), [255, 0, 0]);
  assert.ok(Math.abs(luminance([255, 255, 255]) - 1) < 1e-9);
});
