import assert from 'node:assert/strict';
import test from 'node:test';
import { absent, readHeld } from '../../../viewer/static/js/held.js';

const all = readHeld(JSON.stringify({ r: { seqs: ['e.0', 'a/b c'], sides: ['one', 'two'], steps: true } }));

test('of a folder links to other runs, sequences and pairs lead nowhere', () => {
  const there = ['#/', '#/basket', '#/run/r', '#/run/r/seqs?sort=id', '#/run/r/seq/e.0?tok=3', '#/run/r/seq/a%2Fb%20c/layers', '#/run/r/seq/e.0/sides', '#/run/r/seq/e.0/sides?a=one&b=two', 'static/x.svg'];
  const lacking = ['#/run/q', '#/run/q/timeline?step=3', '#/run/r/seq/e.1', '#/run/r/seq/e.1/sides?a=one&b=two', '#/run/r/seq/e.0/sides?a=one&b=three'];
  assert.deepEqual(there.filter((href) => absent(href, all)), []);
  assert.deepEqual(lacking.filter((href) => !absent(href, all)), []);
});

test('where a server answers every link leads somewhere', () => {
  assert.equal(absent('#/run/q/seq/e.1', null), false);
});
