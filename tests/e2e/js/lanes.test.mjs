import assert from 'node:assert/strict';
import test from 'node:test';
import { clamp, describe, describeBin, engineName, entry, hit, inside, ns, pan, place, spanAt, tickText, ticks, toAbsolute, toOffset, zoom } from '../../../viewer/static/js/lanes.js';

const ORIGIN = '1700000000123456789';

test('a time in an address comes back to the nanosecond', () => {
  for (const offset of [0, 1, 999, 4e15]) assert.equal(toOffset(toAbsolute(offset, ORIGIN), ORIGIN), offset);
  assert.equal(toOffset('1700000000123456790', ORIGIN), 1);
  assert.equal(toOffset('5', ORIGIN) < 0, true);
  for (const text of [null, undefined, '', '-1', '1e9', 'x', '99999999999999999999']) assert.equal(toOffset(text, ORIGIN), null);
});

test('a view stays inside the recording and is never empty', () => {
  assert.deepEqual(clamp(-5, 5, 100), [0, 10]);
  assert.deepEqual(clamp(95, 115, 100), [80, 100]);
  assert.deepEqual(clamp(-50, 500, 100), [0, 100]);
  assert.deepEqual(clamp(40, 40, 100, 10), [40, 50]);
  assert.deepEqual(clamp(40, 20, 100, 10), [40, 50]);
});

test('zooming keeps the moment under the cursor where it is', () => {
  const [a, b] = zoom([0, 100], 0.5, 20, 1000);
  assert.deepEqual([a, b], [10, 60]);
  assert.equal((20 - a) / (b - a), 20 / 100);
  assert.deepEqual(zoom([10, 60], 100, 20, 1000), [0, 1000]);
  assert.deepEqual(zoom([0, 100], 1e-9, 50, 1000, 10), [45, 55]);
});

test('panning stops at the ends', () => {
  assert.deepEqual(pan([10, 20], 0.5, 100), [15, 25]);
  assert.deepEqual(pan([10, 20], -5, 100), [0, 10]);
  assert.deepEqual(pan([10, 20], 50, 100), [90, 100]);
});

test('ticks are round, inside the view and about as many as asked for', () => {
  for (const [t0, t1] of [[0, 286e6], [3e9, 3.0004e9], [0, 7], [1.2e12, 9.9e12]]) {
    const found = ticks(t0, t1, 6);
    assert.equal(found.length >= 2 && found.length <= 8, true, String(found));
    assert.equal(found.every((t) => t >= t0 && t <= t1), true);
    const step = found[1] - found[0];
    assert.match(String(step), /^[125]0*$/);
  }
});

test('durations and places on the axis are read in their unit', () => {
  assert.equal(ns(14.2e6), '14.2 ms');
  assert.equal(ns(0), '0 ns');
  assert.equal(ns(999), '999 ns');
  assert.equal(ns(2.5e3), '2.5 \u00b5s');
  assert.equal(ns(61e9), '61 s');
  assert.equal(ns(null), '\u2013');
  assert.equal(tickText(1181.5e9, 0.5e9, 'time', ORIGIN), '1,181.5 s');
  assert.equal(tickText(1181.000002e9, 1e3, 'time', ORIGIN), '1,181.000002 s');
  assert.equal(tickText(7, 1, 'step', '100'), '107');
});

const LANES = [{ engine: 'a', kind: 'prefill', steps: 1 }, { engine: 'a', kind: 'decode', steps: 2 }, { engine: 'b', kind: 'decode', steps: 1 }];

test('lanes lie under the heading of their engine and do not overlap', () => {
  const { rows, height } = place(LANES, { head: 10, lane: 20, gap: 5 });
  assert.deepEqual(rows.map((r) => [r.lane, r.engine, r.y, r.h]), [
    [null, 'a', 0, 10], [0, 'a', 10, 20], [1, 'a', 30, 20], [null, 'b', 55, 10], [2, 'b', 65, 20]]);
  assert.equal(height, 85);
  assert.deepEqual(place([]), { rows: [], height: 0 });
});

const DATA = {
  lanes: LANES,
  flags: ['prefill', 'decode', 'verify', 'recompute', 'cached', 'chunk'],
  names: { graph: ['full:2'], attention: ['F'], experts: [], cache: [] },
  spans: {
    lane: [0, 1, 1, 2], step: [0, 1, 1204, 0], t: [0, 10, 20, 5], duration: [10, 10, null, 3],
    rows: [2, 32, null, 1], tokens: [9, 32, null, 1], padded_tokens: [0, 0, null, 0],
    graph: [null, 0, null, null], attention: [0, 0, 0, null], experts: [null, null, null, null], cache: [null, null, null, null],
    flags: [33, 10, 0, 2],
  },
};

test('a span is found by time and lane, one without a duration nearby', () => {
  const { spans } = DATA;
  assert.equal(hit(spans, 5, 0), 0);
  assert.equal(hit(spans, 5, 1), null);
  assert.equal(hit(spans, 10, 1), 1);
  assert.equal(hit(spans, 10, 0, 0), 0); // where it ends
  assert.equal(hit(spans, 22, 1), null);
  assert.equal(hit(spans, 22, 1, 3), 2);
  assert.equal(hit(spans, 6, 2), 3);
});

test('a step is said in words', () => {
  assert.equal(describe(spanAt(DATA, 0), 'time'), 'step 0, prefill, 2 rows, eager, 10 ns, unfinished prefill');
  assert.equal(describe(spanAt(DATA, 1), 'time'), 'step 1, decode, 32 rows, graph full:2, 10 ns, recomputed after a preemption');
  assert.equal(describe(spanAt(DATA, 2), 'time'), 'step 1,204, decode, rows not recorded, eager, duration not known');
  assert.equal(describe(spanAt(DATA, 3), 'step'), 'step 0, decode, 1 row, eager');
  assert.equal(spanAt({ ...DATA, spans: { ...DATA.spans, flags: null } }, 0).marks, null);
});

test('a bin is said in words', () => {
  const data = { lanes: LANES, bins: { lanes: [{ share: [125], rows: [null], steps: [0] }, { share: [1000], rows: [32], steps: [1200] }] } };
  assert.equal(describeBin(data, 0, 0), 'prefill: 12.5 % of the time, 0 steps begin, most rows \u2013');
  assert.equal(describeBin(data, 1, 0), 'decode: 100 % of the time, 1,200 steps begin, most rows 32');
});

test('engines are told apart by as much of the id as it takes', () => {
  const engines = [{ id: 'aaaaaaaabbbb' }, { id: 'cccccccc1' }, { id: 'cccccccc2' }];
  assert.equal(engineName('aaaaaaaabbbb', engines), 'aaaaaaaa');
  assert.equal(engineName('cccccccc1', engines), 'cccccccc1');
});

test('walking begins with what is in view, else with the nearest in its direction', () => {
  const spans = { t: [0, 10, 20, 50, 60], duration: [10, 10, 10, 10, null] };
  const at = (view, back) => entry(spans, view, back);
  assert.deepEqual([at([5, 25], false), at([5, 25], true)], [1, 2]); // those that begin there
  assert.deepEqual([at([12, 18], false), at([12, 18], true)], [1, 1]); // within a step
  assert.deepEqual([at([32, 40], false), at([32, 40], true)], [3, 2]); // within a gap
  assert.deepEqual([at([70, 80], false), at([70, 80], true)], [-1, 4]);
  assert.equal(entry(spans, [5, 25], false, (i) => i !== 1), 2);
  assert.deepEqual([0, 1, 2, 3].map((i) => inside(spans, i, [10, 20])), [false, true, false, false]);
});
