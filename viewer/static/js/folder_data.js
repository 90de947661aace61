// What an exported folder works out from its files: lists, choices, bins, windows. Nothing here asks for any.

/** The rows that words keep, sorted; null where the filter needs a server. */
export function listed(rows, { sort, q }) {
  const typed = (q || '').split(/\s+/).filter(Boolean);
  if (typed.some((word) => /[<>=:!"()]/.test(word) || ['and', 'or', 'not'].includes(word))) return null;
  const words = typed.map((word) => word.toLowerCase());
  const kept = rows.filter((row) => words.every((word) => [row.id, row.group, row.finish].some((text) => String(text ?? '').toLowerCase().includes(word))));
  if (!sort) return kept;
  const [name, sign] = sort.startsWith('-') ? [sort.slice(1), -1] : [sort, 1];
  const absent = (row) => row[name] === null || row[name] === undefined || row[name] === 'NaN';
  const compare = (x, y) => (x[name] < y[name] ? -sign : x[name] > y[name] ? sign : 0);
  return [...kept.filter((row) => !absent(row)).sort(compare), ...kept.filter(absent)];
}

/** A page of the kernel choices that words keep, by the rule of viewer/tactics.py. */
export function chosen(data, { q, after }, limit = 100) {
  const words = (q || '').toLowerCase().split(/\s+/).filter(Boolean);
  const told = ({ tuner, op, key, graph, a, b }) => [tuner, op, key, graph, ...[...a, ...b].flatMap((x) => [x.implementation, x.tactic, x.source])].filter(Boolean).join('\n').toLowerCase();
  const kept = data.rows.filter((row) => words.every((word) => (word === 'differs' ? row.differs === true : told(row).includes(word))));
  const start = Number(after || 0);
  return { ...data, rows: kept.slice(start, start + limit), start, matched: kept.length, next: start + limit < kept.length ? String(start + limit) : null };
}

const NOT_FINITE = 3; // of the states the one that comes before any value

/**
 * A tile of the map of layers out of tiles of one position a cell.
 * @param {Array<{arrays: Object, metadata: Object}>} tiles that cover it, in order
 * @param {{start: number, end: number, bins: ?number, sites: string}} asked as in the request
 * @returns {{arrays: Object, metadata: Object}} what the server would answer
 */
export function binned(tiles, { start, end, bins, sites }) {
  const patterns = sites.split(',').map((p) => new RegExp(`^${p.trim().replace(/[.+?^${}()|[\]\\]/g, '\\$&').replaceAll('*', '.*')}$`));
  const every = JSON.parse(tiles[0].metadata.rows);
  const rows = every.flatMap((site, row) => (patterns.some((p) => p.test(site)) ? [row] : []));
  const n = end - start;
  const count = Math.min(n, bins ?? 4096);
  const codes = new Uint8Array(rows.length * count);
  const starts = Uint32Array.from({ length: count }, (_, i) => start + Math.floor((i * n) / count));
  const rank = (code) => (code === NOT_FINITE ? 256 : code);
  for (const { arrays, metadata } of tiles) {
    const [from, to] = [Number(metadata.start), Number(metadata.end)];
    let bin = 0;
    for (let p = Math.max(from, start); p < Math.min(to, end); p += 1) {
      while (bin + 1 < count && starts[bin + 1] <= p) bin += 1;
      rows.forEach((row, i) => {
        const code = arrays.codes[row * (to - from) + p - from];
        if (rank(code) > rank(codes[i * count + bin])) codes[i * count + bin] = code;
      });
    }
  }
  const metadata = { ...tiles[0].metadata, start: String(start), end: String(end), rows: JSON.stringify(rows.map((row) => every[row])) };
  return { arrays: { codes, starts, scale: tiles[0].arrays.scale }, metadata };
}

/** The fewest digits that give the same float32. */
export function floatText(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? null : value > 0 ? 'inf' : '-inf';
  const digits = [1, 2, 3, 4, 5, 6, 7, 8, 9].find((d) => Math.fround(Number(value.toPrecision(d))) === value);
  return String(Number(value.toPrecision(digits || 9)));
}

/**
 * Every measure of every site at a position.
 * @param {{arrays: Object, metadata: Object}} tile answer of `.../site-values`
 * @returns {Object} the answer of `.../layers/{position}`
 */
export function siteRows({ arrays, metadata }, position) {
  const wide = Number(metadata.end) - Number(metadata.start);
  const sites = JSON.parse(metadata.sites);
  const rows = sites.map((site, i) => {
    const at = i * wide + position - Number(metadata.start);
    const flag = (bit) => Boolean(arrays.flags[at] & (1 << bit));
    const whole = (name) => (arrays[name][at] < 0n ? null : String(arrays[name][at]));
    return {
      site, there: flag(0), equal: flag(1), sketched: flag(2),
      ...Object.fromEntries(['rel_l2', 'max_abs', 'cosine'].map((name) => [name, floatText(arrays[name][at])])),
      ulp: whole('ulp'), non_finite: whole('non_finite'),
    };
  });
  return { position, rows: rows.filter((row) => row.there) };
}

/** The window with every step that holds [t0, t1), as text; null where there is none. */
export function windowOf(windows, t0, t1) {
  if (t0 === undefined || t1 === undefined) return null;
  return windows.find(([from, to]) => BigInt(from) <= BigInt(t0) && BigInt(t1) <= BigInt(to)) || null;
}
