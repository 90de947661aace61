// Rules of accessibility, run inside of a page by tests/e2e/accessibility.py.
({
problems: () => {
  const found = [];
  const seen = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true })
    && !e.closest('.sr') && e.getClientRects().length > 0;
  const where = (e) => {
    const id = e.id ? `#${e.id}` : '';
    const name = typeof e.className === 'string' ? `.${e.className.trim().replace(/\s+/g, '.')}` : '';
    return `<${e.tagName.toLowerCase()}${id || name}> "${(e.textContent || '').trim().slice(0, 30)}"`;
  };
  const report = (rule, element, more = '') => found.push(`${rule}: ${where(element)} ${more}`.trim());
  const all = (selector) => [...document.querySelectorAll(selector)];

  const named = (e) => {
    const by = e.getAttribute('aria-labelledby');
    const text = by ? by.split(/\s+/).map((id) => document.getElementById(id)?.textContent || '').join(' ') : '';
    return Boolean((e.getAttribute('aria-label') || text || e.textContent || e.title || e.alt || '').trim());
  };
  for (const e of all('a[href], button, summary')) if (seen(e) && !named(e)) report('no name', e);
  for (const e of all('input, select, textarea')) {
    const label = e.labels && [...e.labels].some((l) => l.textContent.trim());
    if (seen(e) && !label && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')) report('no label', e);
  }
  for (const e of all('canvas, svg[role=img], [role=slider], [role=grid], [role=listbox]')) {
    if (!e.hasAttribute('aria-hidden') && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')) report('no name', e);
  }
  for (const e of all('canvas')) if (seen(e) && !e.hasAttribute('aria-hidden') && e.tabIndex < 0) report('cannot be reached by keyboard', e);
  for (const e of all('img')) if (!e.hasAttribute('alt')) report('no alt', e);
  for (const e of all('[tabindex]')) if (e.tabIndex > 0) report('positive tabindex', e);
  for (const e of all('table')) if (!e.querySelector('th')) report('table without headers', e);
  for (const e of all('th')) if (!e.getAttribute('scope')) report('header without scope', e);
  for (const e of all('[aria-describedby], [aria-labelledby], [aria-activedescendant], [aria-controls]')) {
    for (const name of ['aria-describedby', 'aria-labelledby', 'aria-activedescendant', 'aria-controls']) {
      for (const id of (e.getAttribute(name) || '').split(/\s+/).filter(Boolean)) {
        if (!document.getElementById(id)) report(`${name} of nothing`, e, id);
      }
    }
  }
  const reach = 'a[href], button, input, select, textarea, summary, [tabindex="0"]';
  for (const e of all('body *')) {
    const style = getComputedStyle(e);
    const over = (axis, room, all_) => ['auto', 'scroll'].includes(style[axis]) && all_ > room + 1;
    if (!over('overflowX', e.clientWidth, e.scrollWidth) && !over('overflowY', e.clientHeight, e.scrollHeight)) continue;
    if (!seen(e) || e.matches('textarea, dialog')) continue;
    if (e.tabIndex < 0 && !e.querySelector(reach)) report('scrolls and cannot be reached by keyboard', e);
    if (e.hasAttribute('tabindex') && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')) report('scrolls without a name', e);
    if (over('overflowX', e.clientWidth, e.scrollWidth) && !e.parentNode.querySelector(':scope > .edge')) report('scrolls sideways without a sign', e);
    if (e.matches('.scroll, .panel') && over('overflowY', e.clientHeight, e.scrollHeight) && !e.parentNode.matches('.more-above, .more-below')) report('scrolls up and down without a sign', e);
  }
  const ids = all('[id]').map((e) => e.id);
  for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) found.push(`id twice: ${id}`);
  const heads = all('h1, h2, h3, h4').filter(seen);
  if (heads.filter((e) => e.tagName === 'H1').length !== 1) found.push(`${heads.filter((e) => e.tagName === 'H1').length} h1 on the page`);
  if (!document.documentElement.lang) found.push('no lang');
  for (const name of ['main', 'header', 'nav']) if (!document.querySelector(name)) found.push(`no <${name}>`);

  const rgb = (text) => {
    const [r, g, b, a = 1] = (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
    return text.startsWith('color(') ? [r * 255, g * 255, b * 255, a] : [r, g, b, a];
  };
  const over = (top, base) => top.slice(0, 3).map((x, i) => x * top[3] + base[i] * (1 - top[3]));
  const ground = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.backgroundImage !== 'none') return null; // hatched: judged by eye
      const colour = rgb(style.backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] >= 1) break;
    }
    return layers.reverse().reduce((base, top) => over(top, base), [255, 255, 255]);
  };
  const light = (c) => {
    const [r, g, b] = c.map((x) => { x /= 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement;
    if (!node.textContent.trim() || !seen(e) || e.closest('[disabled], script, style, noscript, [aria-hidden=true]')) continue;
    const style = getComputedStyle(e);
    const base = ground(e);
    if (!base) continue;
    const ink = e.closest('svg') ? rgb(style.fill) : rgb(style.color);
    const [high, low] = [light(over(ink, base)), light(base)].sort((x, y) => y - x);
    const ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5) - 0.01) faint.set(e.className || e.tagName, [e, ratio]);
  }
  for (const [e, ratio] of faint.values()) report('contrast', e, ratio.toFixed(2));
  return found;
},

overflow: () => {
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= room + 1) return [];
  const inside = (e) => {
    for (let at = e.parentElement; at; at = at.parentElement) {
      if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(at).overflowX)) return true;
    }
    return false;
  };
  return [...document.querySelectorAll('body *')]
    .filter((e) => e.getBoundingClientRect().right > room + 1 && !inside(e))
    .slice(0, 5).map((e) => `${e.tagName}#${e.id}.${e.className} ends at ${Math.round(e.getBoundingClientRect().right)} of ${room}`);
},
})
