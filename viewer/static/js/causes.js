// Findings and causes: hypotheses, the evidence for and against each, and what would test it.

import { getJson, runPath, scope } from './api.js';
import { copy } from './clipboard.js';
import { byId, h, num, put, svg } from './dom.js';
import { NONE, count, percent, plural, short } from './format.js';
import { absent } from './held.js';
import { notice, notices } from './notices.js';
import { current, link, replace } from './route.js';
import { scroller } from './scroll.js';

const MARK = { supported: '\u25cf', inconclusive: '\u25d0', not_tested: '\u25cb', not_testable: '\u2013', refuted: '\u2715' };
const SAYS = { for: ['+', 'for'], against: ['\u2212', 'against'], note: ['\u00b7', 'note'] };

export async function open({ state, main, signal }) {
  const data = await getJson(runPath(state, 'causes'), scope(state), signal);
  if (signal.aborted) return {};
  const rows = data.rows.map((row) => section(row, data, state));
  put(main,
    h('h1', {}, 'Findings and causes'),
    notices(data.notices, { brief: true }),
    lead(data, state),
    data.unused.length ? h('details', {}, h('summary', {}, `${plural(data.unused.length, 'pair')} of replays not used`),
      h('ul', {}, data.unused.map((text) => h('li', {}, text)))) : null,
    rows,
    h('details', { id: 'method' }, h('summary', {}, 'How states are decided'), h('p', {}, data.method),
      h('p', {}, 'A fact that settles a hypothesis (a digest, token ids, one rank on both sides) counts as an experiment does. Notes never decide. If pieces of evidence disagree, the state is inconclusive.')),
    replays(data, state));
  const page = {
    update(next) {
      if (next.screen !== 'causes' || next.run !== state.run || next.params.get('rep') !== state.params.get('rep')) return false;
      choose(next);
      return true;
    },
    keys: { j: () => walk(1), k: () => walk(-1) },
    close() {},
  };
  choose(state);
  return page;
}

function choose(state) {
  const chosen = byId(`cause-${state.params.get('cause')}`);
  if (!chosen) return;
  chosen.open = true;
  chosen.scrollIntoView({ block: 'nearest' });
  chosen.querySelector('summary').focus();
}

function walk(step) {
  const all = [...document.querySelectorAll('details.cause')];
  const at = all.findIndex((d) => d.contains(document.activeElement));
  const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
  if (!next) return;
  next.querySelector('summary').focus();
  replace(link(current(), { params: { cause: next.id.slice(6) } }), { quiet: true });
}

function lead(data, state) {
  const run = data.run;
  if (!data.gap) return notice({ level: 'info', title: 'Nothing was compared yet', text: 'There is no report of this tape, so there is no gap to explain. What the tape says by itself stands below; the commands under a hypothesis make the rest.' });
  const report = run.reports.find((r) => r.id === data.report);
  const found = data.rows.filter((r) => r.state === 'supported').length;
  return h('p', { class: 'lead' },
    `${plural(found, 'hypothesis', 'hypotheses')} supported, ${count(data.rows.filter((r) => r.state === 'not_tested').length)} not tested. `,
    h('span', { class: 'hint' }, 'Facts are those of ',
      h('a', { href: link(state, { screen: 'overview', params: { rep: data.report } }) }, report ? report.name : 'this report'),
      `: ${data.gap.verdict}, mean |\u0394| ${short(data.gap.mean_abs)} nat over ${count(data.gap.tokens_compared)} tokens. Experiments use every report of the tape.`));
}

function section(row, data, state) {
  const here = state.params.get('cause') === row.id;
  const open = here || row.state === 'supported' || row.state === 'inconclusive';
  const toggle = (event) => {
    const id = event.target.open ? row.id : null;
    if (event.target.open || current().params.get('cause') === row.id) replace(link(current(), { params: { cause: id } }), { quiet: true });
  };
  const element = h('details', { class: `cause c-${row.state}`, id: `cause-${row.id}`, open: open || null },
    h('summary', {}, badge(row.state, data), h('strong', {}, row.title), ' ', h('span', { class: 'why' }, `${row.why}.`)),
    body(row, data, state));
  element.addEventListener('click', (event) => {
    // the address follows a choice of the reader, not the page that opens itself
    if (event.target.closest('summary')) element.addEventListener('toggle', toggle, { once: true });
  });
  return element;
}

function badge(state, data) {
  return h('span', { class: 'badge' }, h('span', { 'aria-hidden': 'true' }, `${MARK[state]} `), data.state_words[state]);
}

function body(row, data, state) {
  return h('div', { class: 'causebody' },
    h('p', { class: 'hint' }, row.question),
    row.effects.length ? effects(row.effects, data, state) : null,
    row.evidence.length ? h('ul', { class: 'evidence' }, row.evidence.map((e) => evidence(e, state))) : row.effects.length ? null : h('p', { class: 'hint' }, 'No evidence either way.'),
    row.commands.length ? commands(row.commands) : null);
}

function evidence(e, state) {
  const [sign, word] = SAYS[e.says];
  return h('li', { class: `e-${e.says}` },
    h('span', { class: 'sign', title: word }, h('span', { 'aria-hidden': 'true' }, sign), h('span', { class: 'sr' }, `${word}: `)),
    h('span', {}, e.text, e.links.map((l) => [' ', h('a', { href: token(l, state) }, l.text)]),
      h('span', { class: 'hint' }, ` ${e.source}${e.decisive ? ', settles it' : ''}`)));
}

function token(l, state, rep = null) {
  return link(state, { screen: 'seq', seq: l.seq, params: { tok: l.tok ?? null, ...(rep ? { rep } : {}) } });
}

/** Before and after of each controlled pair. */
function effects(list, data, state) {
  const report = (side) => h('a', { href: link(state, { screen: 'overview', params: { rep: side.rep } }) }, side.name);
  const heads = ['changed', 'before', 'after', 'sequences', 'tokens', 'mean |\u0394|, nat', 'k3', `goes of ${data.measure}`, '95 %', 'says'];
  return scroller('Before and after', h('table', { class: 'data effects' },
    h('thead', {}, h('tr', {}, heads.map((t, i) => h('th', { scope: 'col', class: i > 2 && i < 8 ? 'n' : null }, t)))),
    h('tbody', {}, list.map((e) => {
      const n = e.numbers || {};
      return [h('tr', {},
        h('th', { scope: 'row', class: 'mono' }, e.switch),
        h('td', {}, h('span', { class: 'mono' }, e.kind === 'size' ? e.before.mode : e.before.value), h('br'), report(e.before)),
        h('td', {}, h('span', { class: 'mono' }, e.after.value), h('br'), report(e.after)),
        num(count(n.sequences)), num(count(n.tokens)),
        num(`${short(n.mean_before)} \u2192 ${short(n.mean_after)}`),
        num([`${short(n.k3_before)} \u2192 ${short(n.k3_after)}`, n.k3_before > 0 && Number.isFinite(n.k3_after) && e.kind === 'gap' ? [h('br'), h('span', { class: 'hint' }, goes('k3', 1 - n.k3_after / n.k3_before))] : null]),
        num(n.share === undefined ? NONE : `${e.kind === 'size' ? 'at most ' : ''}${signedPercent(n.share)}`),
        h('td', {}, n.low === undefined ? NONE : [whisker(n), `${signedPercent(n.low)} to ${signedPercent(n.high)}`]),
        h('td', {}, data.state_words[e.state])),
      h('tr', { class: 'sub' }, h('td', { colspan: heads.length }, e.kind === 'size' ? sizeText : null, e.numbers === null ? `${e.why}. ` : null,
        e.top.length ? ['Most of it: ', e.top.map((t, i) => [i ? ', ' : '', h('a', { href: token(t, state, e.before.rep) }, t.seq)]), '. '] : null,
        firstBeside(e, state),
        n.left_out ? ` ${plural(n.left_out, 'sequence')} left out: other tokens compared.` : null)),
      e.here ? h('tr', { class: 'sub' }, h('td', { colspan: heads.length }, hereText(e, data))) : null];
    }))));
}

function firstBeside(e, state) {
  const href = e.top.length ? link(state, { screen: 'sides', seq: e.top[0].seq, params: { a: e.before.rep, b: e.after.rep } }) : null;
  return href === null || absent(href) ? null : h('a', { href }, 'The first one side by side');
}

const sizeText = 'Before: the gap to the trainer; after: what the switch does to the engine itself. ';

function hereText(e, { measure }) {
  const n = e.here;
  return [h('strong', {}, 'This sequence: '), `mean |\u0394| ${short(n.mean_before)} \u2192 ${short(n.mean_after)}, k3 ${short(n.k3_before)} \u2192 ${short(n.k3_after)} over ${plural(n.tokens, 'token')}`,
    n.share === undefined ? '' : `, ${e.kind === 'size' ? `at most ${signedPercent(n.share)} of ${measure}` : goes(measure, n.share)}`];
}

function goes(measure, share) {
  return share < 0 ? `${measure} grows by ${percent(-share)}` : `${percent(share)} of ${measure} goes`;
}

function signedPercent(share) {
  if (share > 0.999) return `${Number((100 * share).toPrecision(3))} %`; // a bound may be more than all
  return share < 0 ? `\u2212${percent(-share)}` : percent(share);
}

// -50 % to 100 %, with the two limits of the rule
function whisker({ share, low, high }) {
  const x = (v) => (4 + 92 * (Math.min(Math.max(v, -0.5), 1) + 0.5) / 1.5).toFixed(1);
  return svg('svg', { class: 'whisker', viewBox: '0 0 100 12', 'aria-hidden': 'true' },
    svg('line', { class: 'axis', x1: x(0), x2: x(0), y1: 0, y2: 12 }),
    [0.05, 0.1].map((v) => svg('line', { class: 'limit', x1: x(v), x2: x(v), y1: 1, y2: 11 })),
    svg('line', { class: 'span', x1: x(low), x2: x(high), y1: 6, y2: 6 }),
    svg('circle', { cx: x(share), cy: 6, r: 3 }));
}

function commands(lines) {
  return h('div', { class: 'tests' }, h('p', {}, 'To test it: ',
    h('button', { type: 'button', on: { click: () => copy(lines.join('\n'), 'Commands copied') } }, 'Copy all')),
  lines.map((line) => h('div', { class: 'command' }, h('code', {}, line),
    h('button', { type: 'button', on: { click: () => copy(line, 'Command copied') } }, 'Copy'))));
}

function replays(data, state) {
  if (!data.replays.length) return null;
  return h('details', {}, h('summary', {}, `The replays: ${count(data.replays.length)}`),
    h('table', { class: 'data' }, h('thead', {}, h('tr', {}, ['report', 'mode', 'changed', 'verdict'].map((t) => h('th', { scope: 'col' }, t)))),
      h('tbody', {}, data.replays.map((r) => h('tr', {},
        h('th', { scope: 'row' }, h('a', { href: link(state, { screen: 'overview', params: { rep: r.rep } }) }, r.name)), h('td', {}, r.mode),
        h('td', { class: 'mono' }, Object.entries(r.changed).map(([k, v]) => `${k}=${v}`).join(' ') || 'nothing'), h('td', {}, r.verdict))))));
}

/**
 * Causes of one sequence, for another page to embed.
 * @returns {Promise<HTMLElement>}
 */
export async function causesPanel({ state, signal }) {
  const data = await getJson(runPath(state, 'seqs', state.seq, 'causes'), scope(state), signal);
  const rows = data.rows.filter((r) => r.here.length || r.effects.some((e) => e.here) || r.state === 'supported');
  return h('section', { class: 'card causes' }, h('h2', {}, 'Causes'),
    rows.length ? h('ul', { class: 'causelist' }, rows.map((row) => h('li', {},
      badge(row.state, data), ' ', h('a', { href: link(state, { screen: 'causes', seq: null, params: { cause: row.id } }) }, row.title),
      row.effects.filter((e) => e.here).map((e) => h('div', {}, h('span', { class: 'mono' }, `${e.switch} ${e.before.value} \u2192 ${e.after.value}: `), hereText(e, data),
        e.kind === 'gap' ? [' ', h('a', { href: link(state, { screen: 'sides', params: { a: e.before.rep, b: e.after.rep } }) }, 'side by side')] : null)),
      row.here.length ? h('ul', { class: 'evidence' }, row.here.map((e) => evidence(e, state))) : null)))
      : h('p', { class: 'hint' }, 'Nothing is known of this sequence alone. ', h('a', { href: link(state, { screen: 'causes', seq: null }) }, 'Causes of the run')),
    h('p', { class: 'hint' }, 'States are of the whole run.'));
}
