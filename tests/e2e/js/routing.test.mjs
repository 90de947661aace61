import assert from 'node:assert/strict';
import test from 'node:test';
import { FLIP, MOST, STATES, WINDOW, layerRows, marginsOf, nextFlip, squeeze, totals, windowOf } from '../../../viewer/static/js/routing_math.js';

const counts = { decisions: [10, 20], flips: [1, 3], order_only: [2, 0], near_tie: [1, 1], margin_unknown: [0, 1], not_near_tie: [0, 1], missing_a: [0, 5], missing_b: [4, 0] };
const arrays = {
  layers: Uint32Array.from([3, 7]),
  ...Object.fromEntries(Object.entries(counts).map(([name, values]) => [name, Uint32Array.from(values)])),
  jaccard: Float32Array.from([0.5, 1]), top1: Float32Array.from([NaN, NaN]), weight_l1: Float32Array.from([NaN, 0.25]), load_tv: Float32Array.from([0, 0.5]), eps: Float32Array.from([NaN, 0.125]),
  margins: Uint32Array.from([1, 2, 3, 0, 1, 0, 4, 5, 6, 1, 1, 1]),
};

test('what is not known is null and never a number', () => {
  const rows = layerRows(arrays);
  assert.deepEqual(rows.map((row) => row.top1), [null, null]);
  assert.deepEqual(rows.map((row) => row.eps), [null, 0.125]);
  assert.deepEqual(rows.map((row) => row.layer), [3, 7]);
});

test('totals add up over the layers', () => {
  assert.deepEqual(totals(layerRows(arrays)), Object.fromEntries(Object.entries(counts).map(([name, [a, b]]) => [name, a + b])));
});

test('margins of one layer and of all', () => {
  assert.deepEqual(marginsOf(arrays, 3, 1), { agree: [4, 5, 6], flips: [1, 1, 1] });
  assert.deepEqual(marginsOf(arrays, 3, -1), { agree: [5, 7, 9], flips: [1, 2, 1] });
});

test('the next flip is in any layer, forwards and back', () => {
  const n = 6;
  const map = Uint8Array.from([3, 3, 7, 3, 3, 3, 3, 4, 3, 3, 5, 3]);
  assert.deepEqual(nextFlip(map, n, 2, -1, false), { at: 2, row: 0 });
  assert.deepEqual(nextFlip(map, n, 2, 2, false), { at: 4, row: 1 });
  assert.equal(nextFlip(map, n, 2, 4, false), null);
  assert.deepEqual(nextFlip(map, n, 2, n, true), { at: 4, row: 1 });
});

test('no flip is lost when there are more positions than pixels', () => {
  const n = 1000;
  for (let at = 0; at < n; at += 37) {
    const map = new Uint8Array(2 * n).fill(3);
    map[n + at] = 7;
    const { codes, starts } = squeeze(map, n, 2, 64);
    assert.equal(starts.length, 64);
    assert.equal(codes.filter((code) => code >= FLIP).length, 1);
    const bin = codes.indexOf(7) - 64;
    assert.ok(starts[bin] <= at && (bin === 63 || starts[bin + 1] > at));
  }
  const whole = Uint8Array.from([3, 4, 5]);
  assert.equal(squeeze(whole, 3, 1, 64).codes, whole);
});

test('windows are ones that the server answers', () => {
  assert.deepEqual(windowOf(null, null, null, 100), [0, 100]);
  assert.deepEqual(windowOf(null, null, 5000, 6000), [2 * WINDOW, 6000]);
  assert.deepEqual(windowOf(100, 300, null, 6000), [100, 300]);
  assert.deepEqual(windowOf(300, 100, null, 6000), [300, 300 + WINDOW]);
  const [from, to] = windowOf(0, 60000, null, 60000);
  assert.equal(to - from, MOST);
  assert.deepEqual(windowOf(99999, null, null, 100), [99, 100]);
  assert.deepEqual(windowOf(null, null, null, 0), [0, 0]);
});

test('flips are the last states, so that a bin shows them', () => {
  assert.ok(STATES.slice(FLIP).every(([, words]) => words.startsWith('flip')));
  assert.ok(STATES.slice(0, FLIP).every(([, words]) => !words.startsWith('flip')));
});
