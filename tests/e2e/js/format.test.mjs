import assert from 'node:assert/strict';
import test from 'node:test';
import { NONE, bytes, count, percent, plural, short, signed } from '../../../viewer/static/js/format.js';
import { reader } from '../../../viewer/static/js/keys.js';

test('missing, zero and not finite are three different things', () => {
  assert.equal(short(null), NONE);
  assert.equal(short(0), '0');
  assert.equal(short('NaN'), 'NaN');
  assert.equal(short('-Infinity'), '-inf');
});

test('numbers have three digits', () => {
  assert.equal(short(1.2899998), '1.29');
  assert.equal(short(0.00509), '0.00509');
  assert.equal(short(0.0000031), '3.1e-6');
  assert.equal(short(12345.6), '12,346');
  assert.equal(signed(-0.5), '\u22120.5');
  assert.equal(signed(0.5), '+0.5');
});

test('shares never round away what is there', () => {
  assert.equal(percent(0), '0 %');
  assert.equal(percent(1), '100 %');
  assert.equal(percent(1e-9), '<0.001 %');
  assert.equal(percent(0.99999), '>99.9 %');
  assert.equal(percent(null), NONE);
});

test('counts', () => {
  assert.equal(count(1234567), '1,234,567');
  assert.equal(plural(1, 'problem'), '1 problem');
  assert.equal(plural(2, 'problem'), '2 problems');
  assert.equal(bytes(437454), '437 kB');
});

test('g g is one key, and modifiers and inputs are left alone', () => {
  globalThis.localStorage = { getItem: () => null };
  let now = 0;
  const read = reader(() => now);
  const press = (key, more = {}) => read({ key, target: { closest: () => null }, ...more });
  assert.equal(press('g'), null);
  assert.equal(press('g'), 'g g');
  assert.equal(press('g'), null);
  now = 5000;
  assert.equal(press('g'), null, 'too slow');
  assert.equal(press('j'), 'j');
  assert.equal(press('c', { ctrlKey: true }), null);
  assert.equal(press('j', { target: { closest: () => ({}) } }), null);
  globalThis.localStorage = { getItem: () => 'off' };
  assert.equal(press('j'), null);
  assert.equal(press('Escape'), 'Escape');
});
