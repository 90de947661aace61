import assert from 'node:assert/strict';
import test from 'node:test';
import { best, fit, tokenIn } from '../../../viewer/static/js/palette_data.js';

test('letters fit in their order only', () => {
  assert.equal(fit('xyz', 'Overview'), null);
  assert.equal(fit('wv', 'Overview'), null);
  assert.notEqual(fit('ovw', 'Overview'), null);
});

test('a whole word, then beginnings of words, then scattered letters', () => {
  const names = ['a timeline of b', 'Timeline', 'stim-element', 'Tokens, inner metal'];
  assert.deepEqual(best('time', names.map((text) => ({ text }))).map((e) => e.text), ['Timeline', 'a timeline of b', 'Tokens, inner metal', 'stim-element']);
});

test('nothing typed keeps the order', () => {
  const entries = ['b', 'a', 'c'].map((text) => ({ text }));
  assert.deepEqual(best('', entries), entries);
  assert.equal(best('', entries, 2).length, 2);
});

test('the hint is searched as well', () => {
  assert.deepEqual(best('rollout', [{ text: 'a', hint: 'tape, rollout' }, { text: 'b', hint: 'trainer' }]).map((e) => e.text), ['a']);
});

test('a position, said in several ways', () => {
  for (const typed of ['71', ' 71 ', 'token 71', 'go to 71', 'go to token 71', 'position 71', ':71']) assert.equal(tokenIn(typed), 71, typed);
  for (const typed of ['', 'seven', '-1', '71x', '1f0c29ab.0-71', '12345678901']) assert.equal(tokenIn(typed), null, typed);
});
