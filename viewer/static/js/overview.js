// Run overview: the verdict in words first, then what stands behind it.

import { getJson, runPath, scope } from './api.js';
import { bars, histogram } from './charts.js';
import { h, num, put } from './dom.js';
import { drift } from './drift.js';
import { NONE, bytes, count, percent, plural, short } from './format.js';
import { notice, notices } from './notices.js';
import { link } from './route.js';
import { scroller } from './scroll.js';

export async function open({ state, main, signal }) {
  const data = await getJson(runPath(state), scope(state), signal);
  if (signal.aborted) return {};
  put(
    main,
    verdict(state, data),
    data.reason ? h('p', { class: 'hint' }, 'Why: ', data.reason, '.') : null,
    identity(data.identity),
    notices(data.notices),
    warnings(data.warnings),
    h('p', { class: 'go' }, h('a', { href: link(state, { screen: 'seqs' }), class: 'button' }, 'Sequences'),
      data.verdict ? h('span', { class: 'hint' }, ' worst first ') : null,
      data.verdict ? h('a', { href: link(state, { screen: 'causes' }), class: 'button' }, 'Causes') : null,
      data.verdict ? h('span', { class: 'hint' }, ' what was tested, and what it showed') : null),
    h('div', { class: 'columns' },
      h('div', {}, coverage(data), numbers(data), recording(data.recording)),
      h('div', {}, deltas(data), moved(data.drift), routing(data.routing))),
    provenance(data.provenance, data.run),
  );
  return {};
}

function verdict(state, data) {
  const parts = data.headline.map((piece) =>
    piece.seq
      ? h('a', { href: link(state, { screen: 'seq', seq: piece.seq, params: { tok: piece.tok } }) }, piece.text)
      : piece.text,
  );
  const [first, ...rest] = parts;
  const word = typeof first === 'string' && first.includes(':') ? first.slice(0, first.indexOf(':')) : null;
  return h('h1', { class: `headline v-${data.verdict || 'none'}` },
    word ? [h('strong', {}, word), first.slice(word.length)] : first, rest, '.');
}

function identity(messages) {
  if (!messages.length) return null;
  return notice({
    level: 'error',
    title: `Identity: ${plural(messages.length, 'problem')}`,
    text: 'What was compared is not all of it, or not the same thing on both sides. Clear this up before reading the numbers.',
    extra: list(messages),
  });
}

function warnings(messages) {
  if (!messages.length) return null;
  return notice({ level: 'warn', title: `The diff noticed ${plural(messages.length, 'thing')}`, text: '', extra: list(messages) });
}

function list(messages) {
  const items = messages.map((m) => h('li', {}, m));
  if (items.length <= 5) return h('ul', {}, items);
  return [h('ul', {}, items.slice(0, 4)), h('details', {}, h('summary', {}, `${items.length - 4} more`), h('ul', {}, items.slice(4)))];
}

function section(title, ...content) {
  return h('section', { class: 'card' }, h('h2', {}, title), content);
}

function facts(rows) {
  return h('table', { class: 'facts' }, h('tbody', {}, rows.filter(Boolean).map(([name, value, hint]) =>
    h('tr', {}, h('th', { scope: 'row' }, name), num(value, { class: String(value).length > 40 ? 'n wrap' : 'n' }), h('td', { class: 'hint' }, hint || '')))));
}

function coverage(data) {
  const { coverage: c } = data;
  const t = c.tokens;
  const whole = t ? t.compared + t.masked + t.missing + t.non_finite : 0;
  const share = (n) => (whole ? percent(n / whole) : '');
  return section(
    'Coverage',
    facts([
      c.sequences !== null ? ['sequences in the tape', count(c.sequences)] : null,
      t ? ['sequences compared', count(c.sequences_compared)] : null,
      t ? ['tokens compared', count(t.compared), share(t.compared)] : null,
      t ? ['masked', count(t.masked), share(t.masked)] : null,
      t ? ['missing on a side', count(t.missing), share(t.missing)] : null,
      t ? ['not finite', count(t.non_finite), share(t.non_finite)] : null,
      ...Object.entries(c.compared || {}).filter(([k]) => !['logprobs', 'sequences'].includes(k)).map(([k, v]) => [`${k} compared`, count(v), v ? '' : (c.not_compared || {})[k] || 'nothing to compare']),
    ]),
  );
}

function numbers(data) {
  const n = data.numbers;
  if (!data.verdict) return null;
  return section(
    'Logprob difference, B \u2212 A',
    facts([
      ['logprobs', n.column || NONE, 'headline'],
      ['mean |\u0394|', short(n.mean_abs), 'nat'],
      n.p99_abs === null ? null : ['99th percentile', short(n.p99_abs), 'nat'],
      ['max |\u0394|', short(n.max_abs), 'nat'],
      n.frac_bitwise === null ? null : ['bitwise equal', percent(n.frac_bitwise), 'of tokens'],
      [`over ${data.threshold} nat`, percent(n.over_share), 'of tokens'],
      ['k1', short(n.k1), 'mean(\u2212\u0394), a KL estimate'],
      ['k3', short(n.k3), 'mean(e^\u0394 \u2212 1 \u2212 \u0394)'],
      ['ratio over 2', percent(n.frac_ratio_gt_2), 'of tokens'],
      n.ess === null ? null : ['ESS', percent(n.ess), 'effective sample size'],
      ...Object.entries(data.by_semantics || {}).map(([column, m]) => [`${column}: mean / max`, `${short(m.mean_abs)} / ${short(m.max_abs)}`, 'nat']),
    ]),
  );
}

function moved(rows) {
  const drawn = rows && drift(rows);
  return drawn ? section('Drift', drawn) : null;
}

function deltas(data) {
  if (!data.histogram) return null;
  return section('|\u0394 logprob| of compared tokens', histogram(data.histogram, data.threshold));
}

function routing(data) {
  if (!data) return null;
  const share = (row) => (row.decisions ? row.disagree / row.decisions : null);
  const top = Math.max(...data.layers.map((r) => share(r) || 0));
  return section(
    'Routing disagreement by layer',
    h('p', { class: 'hint' }, 'A decision disagrees when the two sides chose another set of experts. The bar is full at ', percent(top), '.'),
    scroller('Routing disagreement by layer', h('table', { class: 'data wraphead' },
      h('thead', {}, h('tr', {}, ['layer', 'disagree', '', 'of decisions', 'order only', 'mean flip margin', 'max'].map((t) => h('th', { scope: 'col', class: 'n' }, t)))),
      h('tbody', {}, data.layers.map((row) => h('tr', {},
        h('th', { scope: 'row', class: 'n' }, row.layer),
        num(percent(share(row))),
        h('td', { class: 'barcell' }, bars(share(row), top)),
        num(`${count(row.disagree)} / ${count(row.decisions)}`),
        num(count(row.order_only)),
        num(short(row.flip_margin_mean)),
        num(short(row.flip_margin_max))))))),
  );
}

function recording(data) {
  if (!data) return null;
  // what was run, where and when stands under provenance
  const status = Object.entries(data.status || {})
    .filter(([k, v]) => v !== null && typeof v !== 'object' && !['host', 'started'].includes(k))
    .map(([k, v]) => `${k} ${v}`).join(', ');
  return section(
    'Recording',
    facts([
      ['begun', data.created || NONE],
      ['sealed', data.sealed || 'not sealed', data.sealed ? '' : 'still recording, or it died'],
      status ? ['end of the run', status] : null,
      data.shards !== null ? ['shards', count(data.shards), bytes(data.bytes)] : null,
      data.recovered.length ? ['recovered after a kill', count(data.recovered.length), 'shards'] : null,
      data.live.length ? ['not covered by the seal', count(data.live.length), 'shards'] : null,
      ['gaps', count(data.events.gap || 0)],
      ['hook errors', count(data.events.hook_error || 0)],
      ['format', data.format],
    ]),
  );
}

function provenance(rows, run) {
  if (!rows.length) return null;
  const table = (part, caption) => scroller(caption, h('table', { class: 'data sides' },
    h('caption', { class: 'sr' }, caption),
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, ''), h('th', { scope: 'col' }, 'A'), run.report ? h('th', { scope: 'col' }, 'B') : null)),
    h('tbody', {}, part.map((row) => h('tr', { class: row.differs ? 'differs' : null },
      h('th', { scope: 'row' }, row.name, row.differs ? h('span', { class: 'flag' }, ' differs') : null),
      h('td', { class: 'mono' }, row.a ?? NONE),
      run.report ? h('td', { class: 'mono' }, row.b ?? NONE) : null)))));
  const main = rows.filter((row) => row.main);
  const rest = rows.filter((row) => !row.main);
  const differ = rest.filter((row) => row.differs).length;
  return section(
    'Provenance',
    table(main, 'engine, model, versions and switches of both sides'),
    rest.length
      ? h('details', { open: differ > 0 && rest.length < 12 },
        h('summary', {}, `${rest.length} more settings`, differ ? `, ${differ} differ` : ''),
        table(rest, 'other settings of both sides'))
      : null,
  );
}
