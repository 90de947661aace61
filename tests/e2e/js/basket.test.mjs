import assert from 'node:assert/strict';
import test from 'node:test';
import { cleaned, fromText, idOf, merge, moved, titleOf, toMarkdown } from '../../../viewer/static/js/basket_data.js';
import { parse } from '../../../viewer/static/js/route.js';

const token = { run: 'ab', seq: 'e.0-0.0', tok: 71, name: 'rollout', hash: '#/run/ab/seq/e.0-0.0?tok=71&rep=r', note: 'worst\nof all' };
const whole = { run: 'ab', seq: 'e.0-1.0', name: 'rollout', hash: '#/run/ab/seq/e.0-1.0' };

test('an item is what it points to, not how it is looked at', () => {
  assert.equal(idOf(token), idOf({ ...token, hash: '#/run/ab/seq/e.0-0.0/layers?tok=71', note: '' }));
  assert.notEqual(idOf(token), idOf({ ...token, tok: 72 }));
  assert.notEqual(idOf(token), idOf({ ...token, tok: undefined }));
  assert.equal(titleOf(token), 'rollout: sequence e.0-0.0, position 71');
  assert.equal(titleOf({ run: 'ab', hash: '#/run/ab' }), 'ab');
});

test('merging keeps order and both notes, and no item twice', () => {
  const theirs = [{ ...token, note: 'mine too' }, { ...whole, seq: 'e.0-2.0', hash: '#/run/ab/seq/e.0-2.0' }];
  const all = merge([whole, token], theirs);
  assert.deepEqual(all.map((i) => i.seq), ['e.0-1.0', 'e.0-0.0', 'e.0-2.0']);
  assert.equal(all[1].note, 'worst\nof all\nmine too');
  assert.deepEqual(merge(all, theirs), all);
  assert.equal(token.note, 'worst\nof all');
});

test('what is no item is left out', () => {
  assert.equal(cleaned({ run: 'ab', hash: 'javascript:alert(1)' }), null);
  assert.equal(cleaned({ run: 'ab', hash: '#/' }), null);
  assert.equal(cleaned(null), null);
  assert.deepEqual(cleaned({ ...whole, tok: 1.5, evil: 1 }), whole);
});

test('moving within the list', () => {
  assert.deepEqual(moved(['a', 'b', 'c'], 0, 2), ['b', 'c', 'a']);
  assert.deepEqual(moved(['a', 'b', 'c'], 2, 1), ['a', 'c', 'b']);
  assert.deepEqual(moved(['a', 'b'], 0, -1), ['a', 'b']);
});

test('markdown has links that reopen, and comes back', () => {
  const odd = { run: 'ab', seq: 'a(1)[2]', name: 'x', hash: '#/run/ab/seq/a(1)[2]' };
  const text = toMarkdown([token, whole, odd], 'http://127.0.0.1:8000/');
  const [first, second] = text.split('\n');
  assert.equal(first, '1. [rollout: sequence e.0-0.0, position 71](http://127.0.0.1:8000/#/run/ab/seq/e.0-0.0?tok=71&rep=r)');
  assert.equal(second, '   worst');
  assert.match(text, /\[x: sequence a\(1\)\\\[2\\\]\]/);
  const back = fromText(text, parse);
  assert.deepEqual(back.map(idOf), [token, whole, odd].map(idOf));
  assert.equal(back[0].note, token.note);
  assert.equal(back[0].name, 'rollout');
});

test('json comes back, and anything else gives nothing', () => {
  assert.deepEqual(fromText(JSON.stringify({ items: [token] }), parse), [token]);
  assert.deepEqual(fromText(JSON.stringify([token, 5]), parse), [token]);
  assert.deepEqual(fromText('hello [link](http://elsewhere/x)', parse), []);
  assert.deepEqual(fromText('{}', parse), []);
});
