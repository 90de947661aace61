import assert from 'node:assert/strict';
import test from 'node:test';

globalThis.localStorage = { getItem: () => null, setItem: () => {} };
const { reader } = await import('../../../viewer/static/js/keys.js');

const press = (key, more = {}) => ({ key, target: null, ...more });
const typed = (read, ...keys) => keys.map((key) => read(press(key)));

test('g g, and g with digits and Enter', () => {
  assert.deepEqual(typed(reader(() => 0), 'g', 'g'), [null, 'g g']);
  assert.deepEqual(typed(reader(() => 0), 'g', '1', '1', '8', '0', 'Enter'), [null, null, null, null, null, 'go 1180']);
});

test('what begins with g and goes on with another key is that key', () => {
  assert.deepEqual(typed(reader(() => 0), 'g', 'j'), [null, 'j']);
  assert.deepEqual(typed(reader(() => 0), 'g', '4', 'Escape', 'Enter'), [null, null, 'Escape', 'Enter']);
  assert.deepEqual(typed(reader(() => 0), '4', 'g', '5', 'g', 'g'), ['4', null, null, null, 'g g']);
});

test('a g from long ago is forgotten', () => {
  let time = 0;
  const read = reader(() => time);
  assert.equal(read(press('g')), null);
  time = 900;
  assert.equal(read(press('5')), '5');
});

const field = (more) => {
  const made = { closest: () => made, ...more };
  return made;
};

test('keys belong to what text is typed into, and those that move something to it', () => {
  const read = reader(() => 0);
  const at = (key, target) => read(press(key, { target }));
  const scrolls = field({ classList: { contains: (name) => name === 'scroll' } });
  assert.equal(at('ArrowRight', { closest: () => scrolls }), 'ArrowRight'); // a link within
  assert.equal(at('j', field({ type: 'text' })), null);
  assert.equal(at('j', field({ type: 'select-one' })), null);
  assert.equal(at('j', field({ type: 'radio' })), 'j');
  assert.equal(at('ArrowRight', field({ type: 'radio' })), null);
  assert.equal(at('ArrowRight', scrolls), null);
  assert.equal(at('j', scrolls), 'j');
});

test('keys with a modifier belong to the browser', () => {
  const read = reader(() => 0);
  assert.equal(read(press('c', { ctrlKey: true })), null);
  assert.equal(read(press('f', { metaKey: true })), null);
});
