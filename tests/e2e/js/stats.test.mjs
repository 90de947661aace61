import assert from 'node:assert/strict';
import test from 'node:test';
import { contrast, luminance, sequential } from '../../../viewer/static/js/colour.js';
import { STATS, look, presetOf, statOf } from '../../../viewer/static/js/stats.js';

const data = { delta: () => 0.5, a: () => -1, b: () => -0.5, extra: (name) => ({ rank_a: 3 })[name] ?? null };

test('ratio and probability are those of the two logprobs', () => {
  assert.ok(Math.abs(statOf('ratio').value(data, 0) - (Math.exp(0.5) - 1)) < 1e-12);
  assert.ok(Math.abs(statOf('dp').value(data, 0) - (Math.exp(-0.5) - Math.exp(-1))) < 1e-12);
});

test('a value that is not stored is none, not zero', () => {
  assert.equal(statOf('rank').value(data, 0), 3);
  assert.equal(statOf('kl').value(data, 0), null);
  assert.equal(statOf('dp').value({ ...data, delta: () => null }, 0), null);
});

test('a name that is not known is the first statistic', () => {
  assert.equal(statOf('nonsense').name, 'dlp');
  assert.equal(presetOf(statOf('dlp'), '1e-2'), 1);
  assert.equal(statOf('entropy').presets[presetOf(statOf('entropy'), '1e-2')].value, 10);
});

test('the sequential scale goes one way, and can be read on', () => {
  for (const theme of ['light', 'dark']) {
    const steps = Array.from({ length: 33 }, (_, i) => luminance(sequential(i / 32, theme)));
    const order = [...steps].sort((x, y) => (theme === 'light' ? y - x : x - y));
    assert.deepEqual(steps, order);
    for (const stat of STATS) {
      for (const value of [0, 0.1, 0.7, 3, 1e9]) {
        const { ground, ink } = look(stat, value, stat.presets[0].value, theme);
        assert.ok(contrast(ground, ink) >= 4.5, `${stat.name} ${value} ${theme}`);
      }
    }
  }
});
