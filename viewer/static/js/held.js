// What an exported folder holds, and so which links lead anywhere in it. Where a server answers, all do.

import { parse } from './route.js';

let held; // by run, null where a server answers

function folder() {
  if (held === undefined) {
    const meta = document.querySelector('meta[name=rolltape-held]');
    held = meta && readHeld(meta.content);
  }
  return held;
}

/** @param {string} text @returns {Map<string, {seqs: Set<string>, sides: Set<string>, steps: boolean}>} */
export function readHeld(text) {
  return new Map(Object.entries(JSON.parse(text)).map(([run, { seqs, sides, steps }]) => [run, { seqs: new Set(seqs), sides: new Set(sides), steps }]));
}

/** Whether an address of the page is of something that is not in it. */
export function absent(href, all = folder()) {
  if (!all || !href.startsWith('#/run/')) return false;
  const { screen, run, seq, params } = parse(href);
  const of = all.get(run);
  if (!of || (seq !== null && !of.seqs.has(seq))) return true;
  return screen === 'sides' && ['a', 'b'].some((side) => params.has(side) && !of.sides.has(params.get(side)));
}

/** Whether two replays with this report among them are put side by side. */
export function besides(run, rep) {
  const of = folder() && folder().get(run);
  return !of || of.sides.has(rep);
}

/** Whether each step of the schedule can be opened. */
export function everyStep(run) {
  const of = folder() && folder().get(run);
  return !of || of.steps;
}
