// What is starred, as data: identity, order, merging, Markdown and back. Nothing here touches the page.

/** Two items are the same when they point to the same thing. */
export function idOf({ run, seq = null, tok = null }) {
  return JSON.stringify([run, seq, tok]);
}

/** What an item points to, in words. */
export function titleOf({ name, run, seq, tok }) {
  const place = [seq ? `sequence ${seq}` : null, tok !== undefined && tok !== null ? `position ${tok}` : null].filter(Boolean).join(', ');
  return [name || run, place].filter(Boolean).join(': ');
}

/** An item with only what items have; null if it points nowhere. */
export function cleaned(item) {
  if (!item || typeof item !== 'object' || typeof item.run !== 'string' || typeof item.hash !== 'string' || !item.hash.startsWith('#/run/')) return null;
  const out = { run: item.run, hash: item.hash };
  for (const name of ['seq', 'rep', 'name', 'note', 'at']) if (typeof item[name] === 'string') out[name] = item[name];
  if (Number.isInteger(item.tok) && item.tok >= 0) out.tok = item.tok;
  return out;
}

/** `mine`, then what only `theirs` has; a note that only they have, or that differs, is kept as well. */
export function merge(mine, theirs) {
  const out = mine.map((item) => ({ ...item }));
  const at = new Map(out.map((item, i) => [idOf(item), i]));
  for (const given of theirs) {
    const item = cleaned(given);
    if (!item) continue;
    const i = at.get(idOf(item));
    if (i === undefined) {
      at.set(idOf(item), out.length);
      out.push(item);
    } else if (item.note && !(out[i].note || '').includes(item.note)) {
      out[i].note = [out[i].note, item.note].filter(Boolean).join('\n');
    }
  }
  return out;
}

/** The same list with the item at `from` moved to `to`. */
export function moved(items, from, to) {
  const out = [...items];
  if (to < 0 || to >= out.length) return out;
  out.splice(to, 0, ...out.splice(from, 1));
  return out;
}

/** For an issue: a numbered list of links with the notes under them. */
export function toMarkdown(items, base) {
  const lines = items.map((item, i) => {
    const link = `${i + 1}. [${titleOf(item).replace(/[[\]\\]/g, '\\$&')}](${base}${item.hash.replace(/[()\s]/g, (c) => `%${c.charCodeAt(0).toString(16).padStart(2, '0')}`)})`;
    const note = (item.note || '').split('\n').filter(Boolean).map((line) => `   ${line}`);
    return [link, ...note].join('\n');
  });
  return `${lines.join('\n')}\n`;
}

/** Items of a JSON file or of Markdown as `toMarkdown` writes it; `parse` reads an address. */
export function fromText(text, parse) {
  try {
    const value = JSON.parse(text);
    return (Array.isArray(value) ? value : value.items || []).map(cleaned).filter(Boolean);
  } catch {
    return fromMarkdown(text, parse);
  }
}

function fromMarkdown(text, parse) {
  const found = [];
  for (const line of text.split(/\r?\n/)) {
    const link = line.match(/\[((?:\\.|[^\]\\])*)\]\([^)\s]*?(#\/run\/[^)\s]+)\)/);
    if (link) {
      const { run, seq, params } = parse(link[2]);
      const tok = params.get('tok');
      const name = link[1].replace(/\\(.)/g, '$1').split(': ')[0];
      const item = cleaned({ run, hash: link[2], name, ...(seq ? { seq } : {}), ...(tok !== null && /^\d+$/.test(tok) ? { tok: Number(tok) } : {}) });
      if (item) found.push(item);
    } else if (found.length && /^\s+\S/.test(line)) {
      const last = found[found.length - 1];
      last.note = [last.note, line.trim()].filter(Boolean).join('\n');
    }
  }
  return found;
}
