// The legend of the token strip: every state, and the scale.

import { css, paint, unsymlog } from './colour.js';
import { h } from './dom.js';
import { short } from './format.js';

const STATES = [
  ['compared equal', 'bitwise equal'],
  ['masked', 'masked'],
  ['missing_a', 'missing in A'],
  ['missing_b', 'missing in B'],
  ['non_finite', 'NaN or infinite'],
  ['not_scored', 'not scored'],
  ['not_diffed', 'not compared'],
  ['compared flip', 'routing differs'],
  ['split', 'part of a character'],
];

export function legend(scale, theme) {
  const steps = [-1, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1].map((t) => {
    const look = paint(unsymlog(t, scale), scale, theme);
    const style = { 'background-color': css(look.ground), color: css(look.ink), 'border-bottom-width': `${look.thickness}px` };
    const value = unsymlog(t, scale);
    return h('span', { class: 't compared swatch', style }, Math.abs(t) === 1 ? `${t < 0 ? '\u2264\u2212' : '\u2265'}${short(Math.abs(value))}` : short(value).replace('-', '\u2212'));
  });
  const equal = h('span', { class: 't compared equal swatch' }, '0');
  return h('div', { class: 'legend', 'aria-label': 'Legend' },
    h('span', { class: 'scale' }, h('span', { class: 'hint' }, 'A higher '), steps.slice(0, 4), equal, steps.slice(4), h('span', { class: 'hint' }, ' B higher, nat')),
    h('ul', { class: 'states' }, STATES.map(([name, text]) =>
      h('li', {}, h('span', { class: `t swatch ${name}`, 'aria-hidden': 'true' }, name === 'split' ? '\\xe2' : 'abc'), ' ', text))));
}
