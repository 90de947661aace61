// Colours from formulas, mixed in OKLab: a diverging scale blue - neutral - orange, and a sequential
// one, blue and yellow by lightness. Both are told apart with every common colour blindness.

/** |delta| at which the scale is full, nats. The texts are what stands in links. */
export const PRESETS = [
  { text: '1e-3', value: 1e-3 },
  { text: '1e-2', value: 1e-2 },
  { text: '1e-1', value: 1e-1 },
  { text: '1', value: 1 },
];
export const DEFAULT_PRESET = 2;
const STEPS = 64;
const LINEAR = 0.01; // below this share of the full scale the axis is linear

/** -1..1: symmetric log of delta, 0 at 0, linear near 0, clipped at the full scale. */
export function symlog(delta, scale) {
  const size = Math.min(Math.abs(delta) / scale, 1);
  return (Math.sign(delta) * Math.log1p(size / LINEAR)) / Math.log1p(1 / LINEAR);
}

/** Inverse of `symlog` on -1..1. */
export function unsymlog(t, scale) {
  return Math.sign(t) * scale * LINEAR * Math.expm1(Math.abs(t) * Math.log1p(1 / LINEAR));
}

/** OKLCh (hue in degrees) -> sRGB, 0..255 each. */
export function fromOklch(L, C, hue) {
  const angle = (hue * Math.PI) / 180;
  return fromOklab(L, C * Math.cos(angle), C * Math.sin(angle));
}

function fromOklab(L, a, b) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => {
    const clipped = Math.min(Math.max(x, 0), 1);
    const gamma = clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055;
    return Math.round(gamma * 255);
  });
}

/** WCAG relative luminance of an sRGB triple. */
export function luminance(rgb) {
  const [r, g, b] = rgb.map((byte) => {
    const x = byte / 255;
    return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** WCAG contrast of two sRGB triples, 1..21. */
export function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

const BLACK = [0, 0, 0];
const WHITE = [255, 255, 255];

/** Black or white, whichever reads better; at least 4.5:1 on any ground. */
export function ink(ground) {
  return contrast(ground, BLACK) >= contrast(ground, WHITE) ? BLACK : WHITE;
}

const ENDS = {
  light: { neutral: [1, 0, 0], blue: [0.58, 0.17, 255], orange: [0.72, 0.17, 55] },
  dark: { neutral: [0.22, 0.008, 250], blue: [0.68, 0.15, 250], orange: [0.75, 0.16, 60] },
};

const RAMP = {
  light: [[0.97, 0.045, 100], [0.34, 0.11, 262]],
  dark: [[0.28, 0.06, 262], [0.92, 0.13, 100]],
};

const tables = {};
const ramps = {};

function lab([L, C, h]) {
  return [L, C * Math.cos((h * Math.PI) / 180), C * Math.sin((h * Math.PI) / 180)];
}

/** The sequential scale: sRGB of t in 0..1, paler (in the dark: darker) for less. */
export function sequential(t, theme) {
  if (!ramps[theme]) {
    const [low, high] = RAMP[theme].map(lab);
    ramps[theme] = Array.from({ length: STEPS + 1 }, (_, i) => fromOklab(...low.map((x, k) => x + (i / STEPS) * (high[k] - x))));
  }
  return ramps[theme][Math.round(Math.min(Math.max(t, 0), 1) * STEPS)];
}

function table(theme) {
  if (tables[theme]) return tables[theme];
  const { neutral, blue, orange } = ENDS[theme];
  const [n, low, high] = [neutral, blue, orange].map(lab);
  tables[theme] = [];
  for (let i = -STEPS; i <= STEPS; i += 1) {
    const t = Math.abs(i) / STEPS;
    const end = i < 0 ? low : high;
    tables[theme].push(fromOklab(...n.map((x, k) => x + t * (end[k] - x))));
  }
  return tables[theme];
}

/**
 * How a compared token looks.
 * @returns {{ground: number[], ink: number[], thickness: number, clipped: boolean}}
 *   thickness of the underline in px, 1..4: the size once more, without colour.
 */
export function paint(delta, scale, theme) {
  const t = symlog(delta, scale);
  const ground = table(theme)[Math.round(t * STEPS) + STEPS];
  return {
    ground,
    ink: ink(ground),
    thickness: Math.max(1, Math.ceil(Math.abs(t) * 4)),
    clipped: Math.abs(delta) > scale,
  };
}

/**
 * How a token looks by a value that has no sign: 0 to full scale.
 * @param {boolean} log whether the axis is logarithmic from 1 on (ranks), else it is linear.
 */
export function paintAmount(value, scale, theme, log = false) {
  const t = Math.min(Math.max(log ? Math.log1p(value) / Math.log1p(scale) : value / scale, 0), 1);
  const ground = sequential(t, theme);
  return { ground, ink: ink(ground), thickness: Math.max(1, Math.ceil(t * 4)), clipped: value > scale };
}

export function css(rgb) {
  return `rgb(${rgb.join(' ')})`;
}
