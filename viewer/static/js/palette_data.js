// How well a name fits what was typed: letters in order, runs and beginnings of words count more.

/** A score, larger is better; null where it does not fit. */
export function fit(typed, text) {
  const want = typed.toLowerCase();
  const have = text.toLowerCase();
  if (!want) return 0;
  const whole = have.indexOf(want);
  if (whole >= 0) return 1000 - whole - have.length / 100 + (begins(have, whole) ? 200 : 0);
  let at = -1;
  let score = 0;
  for (const letter of want) {
    if (letter === ' ') continue;
    const next = have.indexOf(letter, at + 1);
    if (next < 0) return null;
    score += next === at + 1 ? 5 : begins(have, next) ? 3 : 0;
    score -= (next - at) / 50;
    at = next;
  }
  return score - have.length / 100;
}

function begins(text, at) {
  return at === 0 || /[\s/._:-]/.test(text[at - 1]);
}

/** The best of `entries` ({text, hint}) for what was typed, in their own order where they are equal. */
export function best(typed, entries, most = 20) {
  return entries
    .map((entry, i) => ({ entry, i, score: fit(typed, `${entry.text} ${entry.hint || ''}`) }))
    .filter((row) => row.score !== null)
    .sort((x, y) => y.score - x.score || x.i - y.i)
    .slice(0, most)
    .map((row) => row.entry);
}

/** The position in `71`, `token 71`, `go to 71` or `:71`; null for anything else. */
export function tokenIn(typed) {
  const found = typed.trim().match(/^(?:(?:go\s*to\s*)?(?:token|position)?\s*|:)(\d{1,9})$/i);
  return found ? Number(found[1]) : null;
}
