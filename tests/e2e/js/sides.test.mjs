import assert from 'node:assert/strict';
import test from 'node:test';
import { readSides } from '../../../viewer/static/js/sides_data.js';

const tokens = { start: 10, end: 14, text: (i) => `t${i}`, has: (i, name) => name === 'prompt' && i === 0, state: () => 'compared', delta: () => 9 };
const answer = {
  metadata: { states: 'compared,masked,not_diffed', flags: 'delta_a,delta_b,difference,equal' },
  arrays: {
    delta_a: Float32Array.of(0.5, 0, NaN, 0.25),
    delta_b: Float32Array.of(0.25, 0, 0.125, NaN),
    difference: Float32Array.of(0.25, 0, NaN, NaN),
    state_a: Uint8Array.of(0, 0, 1, 0),
    state_b: Uint8Array.of(0, 0, 0, 2),
    flags: Uint8Array.of(0b0111, 0b1111, 0b0010, 0b0001),
  },
};

test('each strip has its own values, all have the same tokens', () => {
  const { a, b, diff } = readSides(tokens, answer);
  assert.deepEqual([0, 1, 2, 3].map(a.delta), [0.5, 0, null, 0.25]);
  assert.deepEqual([0, 1, 2, 3].map(b.delta), [0.25, 0, 0.125, null]);
  assert.deepEqual([0, 1, 2, 3].map(diff.delta), [0.25, 0, null, null]);
  assert.equal(b.text(2), 't2');
  assert.equal(diff.start, 10);
});

test('a difference has the state of the side that keeps it from being one', () => {
  const { a, b, diff } = readSides(tokens, answer);
  assert.deepEqual([0, 1, 2, 3].map(a.state), ['compared', 'compared', 'masked', 'compared']);
  assert.deepEqual([0, 1, 2, 3].map(b.state), ['compared', 'compared', 'compared', 'not_diffed']);
  assert.deepEqual([0, 1, 2, 3].map(diff.state), ['compared', 'compared', 'masked', 'not_diffed']);
});

test('equal means the same bits of what the strip compares', () => {
  const { a, diff } = readSides(tokens, answer);
  assert.deepEqual([0, 1].map((i) => a.has(i, 'equal')), [false, true]);
  assert.deepEqual([0, 1].map((i) => diff.has(i, 'equal')), [false, true]);
  assert.equal(a.has(0, 'prompt'), true);
  assert.equal(a.has(1, 'prompt'), false);
});
