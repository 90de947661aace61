import assert from 'node:assert/strict';
import test from 'node:test';
import {
  METRICS, NONE, THRESHOLDS, amount, amountValue, binAt, binFront, clipped, nextChange, palette, pan, patternsOf,
  rowOfSite, rowOfText, rowsOf, siteParts, textOfRow, zoom,
} from '../../../viewer/static/js/heat_math.js';

const SITES = ['embed', 'layers.0.attn', 'layers.0.out', 'layers.1.attn', 'layers.1.router', 'layers.1.out', 'layers.2.out', 'layers.10.attn', 'norm', 'logits'];
const names = (rows) => rows.map((row) => row.site);

test('the colour axis grows with the value, ends at the full scale, and can be undone', () => {
  for (const metric of METRICS) {
    for (const { value: full } of metric.presets) {
      let last = -1;
      for (const value of [1e-12, 1e-8, 1e-5, 1e-3, 0.02, 1, 3, 100, 1e6]) {
        const t = amount(value, full, metric.low);
        assert.ok(t >= last && t >= 0 && t <= 1, `${metric.id} ${full} ${value}`);
        last = t;
      }
      assert.equal(amount(full, full, metric.low), 1);
      if (full !== metric.low) for (const t of [0, 0.3, 1]) assert.ok(Math.abs(amount(amountValue(t, full, metric.low), full, metric.low) - t) < 1e-9);
    }
  }
});

test('states have colours of their own or none, and values those of the axis', () => {
  const scale = new Float32Array(256).fill(NaN);
  for (let code = 4; code < 256; code += 1) scale[code] = 1e-9 * 10 ** ((code - 4) / 21);
  const colours = palette(scale, { full: 1e-2, theme: 'light', states: { 1: [255, 255, 255], 3: [138, 20, 118] } });
  assert.equal(colours.length, 256);
  assert.deepEqual(colours[0], [0, 0, 0, 0]);
  assert.deepEqual(colours[1], [255, 255, 255, 255]);
  assert.deepEqual(colours[3], [138, 20, 118, 255]);
  assert.ok(colours[4][0] > colours[255][0], 'more is darker in the light');
  assert.equal(clipped(Uint8Array.from([0, 1, 3, 4, 255]), scale, 1e-2), 1);
});

test('a closed layer stands for its sites, an open one shows them all', () => {
  const closed = rowsOf(SITES, new Set());
  assert.deepEqual(names(closed), ['embed', 'layers.0.out', 'layers.1.out', 'layers.2.out', 'layers.10.attn', 'norm', 'logits']);
  assert.deepEqual(closed.map((row) => row.toggle), [null, 'closed', 'closed', null, null, null, null]);
  const open = rowsOf(SITES, new Set([1]));
  assert.deepEqual(names(open), ['embed', 'layers.0.out', 'layers.1.attn', 'layers.1.router', 'layers.1.out', 'layers.2.out', 'layers.10.attn', 'norm', 'logits']);
  assert.deepEqual(names(rowsOf(SITES, 'all')), SITES);
  for (const rows of [closed, open]) {
    SITES.forEach((site, i) => {
      const row = rows[rowOfSite(rows, i)];
      assert.ok(row.site === site || row.layer === siteParts(site).layer, site);
    });
  }
});

test('the patterns asked for match the rows that are shown', () => {
  const fits = (patterns, site) => patterns.split(',').some((p) => new RegExp(`^${p.replaceAll('.', '\\.').replaceAll('*', '.*')}$`).test(site));
  for (const open of [new Set(), new Set([0]), new Set([1]), new Set([0, 1]), 'all']) {
    const rows = rowsOf(SITES, open);
    const patterns = patternsOf(rows, SITES);
    for (const row of rows) assert.ok(fits(patterns, row.site), `${row.site} by ${patterns}`);
  }
  const odd = ['layers.0.attn', 'layers.0.router', 'layers.1.out'];
  const rows = rowsOf(odd, new Set());
  assert.deepEqual(names(rows), ['layers.0.router', 'layers.1.out']);
  for (const row of rows) assert.ok(fits(patternsOf(rows, odd), row.site));
});

test('a row can be named in the address and found again', () => {
  for (const open of [new Set(), new Set([1]), 'all']) {
    const rows = rowsOf(SITES, open);
    rows.forEach((row, i) => assert.equal(rowOfText(rows, textOfRow(row)), i, row.site));
  }
  const closed = rowsOf(SITES, new Set());
  assert.equal(closed[rowOfText(closed, 'layers.1.router')].site, 'layers.1.out');
  assert.equal(rowOfText(closed, 'layers.77.out'), -1);
  assert.equal(rowOfText(closed, null), -1);
});

test('a bin has the first site of its positions', () => {
  const front = Uint16Array.from([NONE, 5, 3, NONE, 7, 7, 2, NONE]);
  assert.deepEqual([...binFront(front, Uint32Array.from([0, 3, 6]), 8)], [3, 7, 2]);
  assert.deepEqual([...binFront(front, Uint32Array.from([4, 5]), 6)], [7, 7]);
  assert.deepEqual([...binFront(front, Uint32Array.from([3]), 4)], [NONE]);
});

test('n goes to where the front begins or changes, and back', () => {
  const front = Uint16Array.from([NONE, 5, 5, 3, NONE, NONE, 3, 3]);
  const walk = [];
  for (let p = nextChange(front, -1, false); p >= 0; p = nextChange(front, p, false)) walk.push(p);
  assert.deepEqual(walk, [1, 3, 6]);
  const back = [];
  for (let p = nextChange(front, 8, true); p >= 0; p = nextChange(front, p, true)) back.push(p);
  assert.deepEqual(back, [6, 3, 1]);
  assert.equal(nextChange(Uint16Array.from([4]), -1, false), 0);
});

test('windows stay within the sequence', () => {
  for (const n of [1, 10, 157, 32768]) {
    for (const factor of [0.5, 2]) {
      for (const at of [0, n / 2, n - 1]) {
        const [from, to] = zoom(Math.floor(n / 4), Math.ceil(n / 2), n, factor, at);
        assert.ok(from >= 0 && from < to && to <= n, `${n} ${factor} ${at}: ${from} ${to}`);
      }
    }
  }
  assert.deepEqual(pan(-5, 10, 100), [0, 10]);
  assert.deepEqual(pan(95, 10, 100), [90, 100]);
  assert.deepEqual(pan(0, 200, 100), [0, 100]);
});

test('the bin of a position is the last one that begins at or before it', () => {
  const starts = Uint32Array.from([10, 12, 15, 19]);
  assert.deepEqual([10, 11, 12, 14, 15, 18, 19, 400].map((p) => binAt(starts, p)), [0, 0, 1, 1, 2, 2, 3, 3]);
});

test('thresholds stand in ascending order', () => {
  const numbers = THRESHOLDS.filter((t) => t !== 'floor').map(Number);
  assert.deepEqual(numbers, [...numbers].sort((a, b) => a - b));
});
