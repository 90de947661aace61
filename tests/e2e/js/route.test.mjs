import assert from 'node:assert/strict';
import test from 'node:test';
import { format, integer, link, parse } from '../../../viewer/static/js/route.js';

test('every screen has an address that comes back', () => {
  for (const hash of [
    '#/',
    '#/run/abc',
    '#/run/abc/seqs?sort=-max_abs&q=finish%3Dlength',
    '#/run/abc/seq/1f0c29ab.0-3.1?tok=1180&scale=1e-1',
    '#/run/abc/seq/a:b_c-d.0',
    '#/run/abc/timeline?t0=5&t1=9',
    '#/run/abc/weights',
    '#/run/abc/causes?cause=routing',
    '#/run/abc/seq/s.0-1/layers?metric=rel_l2&tok=4',
    '#/run/abc/seq/s.0-1/routing?layer=17',
    '#/run/abc/seq/s.0-1/sides?a=r1&b=r2',
    '#/basket',
  ]) {
    assert.equal(format(parse(hash)), hash);
  }
});

test('an empty address is home and a strange one is unknown', () => {
  assert.equal(parse('').screen, 'home');
  assert.equal(parse('#').screen, 'home');
  assert.equal(parse('#/run').screen, 'unknown');
  assert.equal(parse('#/run/a/other').screen, 'unknown');
  assert.equal(parse('#/run/a/seq/b/c').screen, 'unknown');
});

test('a lone percent sign does not break the page', () => {
  assert.equal(parse('#/run/a/seq/%').seq, '%');
});

test('unknown parameters are kept when something is chosen', () => {
  const state = parse('#/run/a/seq/s?scale=1e-2&note=mine&tok=5&at=1');
  const hash = link(state, { params: { tok: 9, at: null } });
  assert.equal(hash, '#/run/a/seq/s?scale=1e-2&note=mine&tok=9');
});

test('what belongs to one sequence does not follow to the next', () => {
  const state = parse('#/run/a/seq/s?tok=5&win=4096&at=9&mask=hide&scale=1e-2&sort=id&rep=r&x=1');
  assert.equal(link(state, { seq: 't' }), '#/run/a/seq/t?scale=1e-2&sort=id&rep=r&x=1');
});

test('the token follows through the screens of its sequence, what is of one screen does not', () => {
  const strip = parse('#/run/a/seq/s?tok=5&win=0&scale=1e-2');
  const layers = parse(link(strip, { screen: 'layers', params: { metric: 'ulp' } }));
  assert.equal(format(layers), '#/run/a/seq/s/layers?tok=5&scale=1e-2&metric=ulp');
  assert.equal(link(layers, { screen: 'seq' }), '#/run/a/seq/s?tok=5&scale=1e-2');
  assert.equal(link(layers, { screen: 'seqs', seq: null }), '#/run/a/seqs?scale=1e-2');
});

test('the list keeps its order on the way to a sequence and back', () => {
  const list = parse('#/run/a/seqs?sort=-k3&q=stop&after=xyz&row=s');
  const sequence = parse(link(list, { screen: 'seq', seq: 's', params: { tok: 3 } }));
  assert.equal(format(sequence), '#/run/a/seq/s?sort=-k3&q=stop&tok=3');
  assert.equal(link(sequence, { screen: 'seqs', seq: null }), '#/run/a/seqs?sort=-k3&q=stop');
});

test('another run has other reports and other sequences', () => {
  const state = parse('#/run/a/seqs?rep=r&sort=id&q=x&keep=1');
  assert.equal(link(state, { run: 'b', screen: 'overview' }), '#/run/b?keep=1');
});

test('positions are whole numbers', () => {
  assert.equal(integer('71'), 71);
  for (const text of ['', '-1', '1.5', '1e3', 'x', null, undefined, '99999999999']) assert.equal(integer(text), null);
});
