// Light or dark: what the system prefers, unless the reader chose.

const NAME = 'rolltape.theme';
const dark = matchMedia('(prefers-color-scheme: dark)');
const listeners = [];

export function theme() {
  const chosen = localStorage.getItem(NAME);
  if (chosen === 'light' || chosen === 'dark') return chosen;
  return dark.matches ? 'dark' : 'light';
}

export function toggle() {
  localStorage.setItem(NAME, theme() === 'dark' ? 'light' : 'dark');
  apply();
}

export function onTheme(listener) {
  listeners.push(listener);
  return () => listeners.splice(listeners.indexOf(listener), 1);
}

function apply() {
  document.documentElement.dataset.theme = theme();
  [...listeners].forEach((listener) => listener());
}

dark.addEventListener('change', apply);
apply();

/** A colour of the style sheet, for a canvas. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Sizes and empties a canvas for the pixels of the screen; its pen, which counts in those of the page. */
export function cleared(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext('2d');
  pen.scale(ratio, ratio);
  pen.fillStyle = colour('ground');
  pen.fillRect(0, 0, width, height);
  return pen;
}
