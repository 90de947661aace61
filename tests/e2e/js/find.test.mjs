import assert from 'node:assert/strict';
import test from 'node:test';
import { findIn } from '../../../viewer/static/js/find.js';

const window = (start, ...texts) => ({ start, end: start + texts.length, text: (i) => ({ text: texts[i] }) });

test('a match is the token in which it begins, also over several tokens', () => {
  const data = window(10, 'The ', 'train ', 'ar', 'riv', 'es');
  assert.equal(findIn(data, 'arrives', 0), 12);
  assert.equal(findIn(data, 'rain', 0), 11);
  assert.equal(findIn(data, 'THE', 0), 10);
  assert.equal(findIn(data, 'bus', 0), null);
});

test('the search goes on from a position', () => {
  const data = window(0, 'a', 'b', 'a', 'b');
  assert.equal(findIn(data, 'ab', 0), 0);
  assert.equal(findIn(data, 'ab', 1), 2);
  assert.equal(findIn(data, 'ab', 3), null);
});
