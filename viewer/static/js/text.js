// How the bytes of a token are shown: never as they could fool the eye or the page.

const strict = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });
// format characters (bidi overrides, zero-width), line separators, private and unassigned ones
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/gu;
const LINE_END = '\u23ce';
const LITERAL = /\u23ce/g; // the sign itself must not look like a line end
const ODD_SPACE = /(?! )\p{Zs}/gu;

/**
 * @param {Uint8Array|number[]} bytes
 * @returns {{text: string, flow: string, split: boolean}} `flow`: the same, with the line breaks
 *   that it marks; `split`: not UTF-8 on its own.
 */
export function tokenText(bytes) {
  const array = Uint8Array.from(bytes);
  let text;
  try {
    text = strict.decode(array);
  } catch {
    const escaped = Array.from(array, escapeByte).join('');
    return { text: escaped, flow: escaped, split: true };
  }
  const shown = visible(text);
  return { text: shown, flow: shown.replaceAll(LINE_END, `${LINE_END}\n`), split: false };
}

/** A text in which everything can be seen. */
export function visible(text) {
  let out = text
    .replace(LITERAL, (c) => `\\u{${c.codePointAt(0).toString(16)}}`)
    .replace(/\n/g, LINE_END)
    .replace(/\t/g, '\u21e5')
    .replace(UNSEEN, (c) => `\\u{${c.codePointAt(0).toString(16)}}`)
    .replace(ODD_SPACE, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
  if (/^ +$/.test(out)) out = out.replace(/ /g, '\u00b7');
  return /^\p{M}/u.test(out) ? `\u25cc${out}` : out; // a lone accent must not join its neighbour
}

function escapeByte(byte) {
  return byte >= 0x20 && byte < 0x7f
    ? String.fromCharCode(byte)
    : `\\x${byte.toString(16).padStart(2, '0')}`;
}
