// Numbers as text. The server writes non-finite numbers as strings and missing ones as null.

export const NONE = '\u2013';

/** Whole number with thousands marks. */
export function count(value) {
  return value === null || value === undefined ? NONE : Number(value).toLocaleString('en-US');
}

/** About three digits: 0.0123, 1.29, 3.1e-7, NaN, -inf. */
export function short(value) {
  if (value === null || value === undefined) return NONE;
  const x = Number(value);
  if (Number.isNaN(x)) return 'NaN';
  if (!Number.isFinite(x)) return x > 0 ? 'inf' : '-inf';
  if (x === 0) return '0';
  const size = Math.abs(x);
  if (size < 1e-4 || size >= 1e6) return x.toExponential(1).replace('e+', 'e');
  return size >= 1000 ? Math.round(x).toLocaleString('en-US') : String(Number(x.toPrecision(3)));
}

/** With its sign, a true minus. */
export function signed(value) {
  if (value === null || value === undefined) return NONE;
  const text = short(value);
  return text.startsWith('-') ? `\u2212${text.slice(1)}` : Number(value) > 0 ? `+${text}` : text;
}

/** Share in percent; never rounds something to nothing or nearly all to all. */
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const value = 100 * Number(share);
  if (value === 0 || value === 100) return `${value} %`;
  if (value > 99.9) return '>99.9 %';
  return value < 1e-3 ? '<0.001 %' : `${Number(value.toPrecision(3))} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let x = Number(value);
  let unit = 0;
  while (x >= 1000 && unit < units.length - 1) {
    x /= 1000;
    unit += 1;
  }
  return `${unit ? Number(x.toPrecision(3)) : x} ${units[unit]}`;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
