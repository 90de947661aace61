// The window of two replays, as three strips: each replay against the tape, and one against the other.

export const VIEWS = ['a', 'b', 'diff'];
/** Elsewhere A is the tape and B a replay of it; these are two replays. `a` and `b` in the address. */
export const NAMES = { a: 'R1', b: 'R2', diff: 'R1 \u2212 R2' };
const ARRAY = { a: 'delta_a', b: 'delta_b', diff: 'difference' };

/**
 * @param {Object} tokens the window's token ids and text, from `readWindow`
 * @param {{arrays: Object, metadata: Object}} answer of `.../sides`
 * @returns {Object<string, Object>} for each of `VIEWS` what `drawStrip` and `paintStrip` read
 */
export function readSides(tokens, { arrays, metadata }) {
  const states = metadata.states.split(',');
  const bits = Object.fromEntries(metadata.flags.split(',').map((name, bit) => [name, 1 << bit]));
  const bit = (i, name) => Boolean(arrays.flags[i] & bits[name]);
  const of = {
    a: (i) => states[arrays.state_a[i]],
    b: (i) => states[arrays.state_b[i]],
    // what keeps the two from being compared
    diff: (i) => (of.a(i) === 'compared' ? of.b(i) : of.a(i)),
  };
  return Object.fromEntries(VIEWS.map((view) => {
    const values = arrays[ARRAY[view]];
    const delta = (i) => (bit(i, ARRAY[view]) ? values[i] : null);
    // float32 logprobs that differ never have a difference of 0
    const equal = (i) => (view === 'diff' ? bit(i, 'equal') : delta(i) === 0);
    return [view, { ...tokens, delta, flips: () => null, state: of[view], has: (i, name) => (name === 'equal' ? equal(i) : tokens.has(i, name)) }];
  }));
}
