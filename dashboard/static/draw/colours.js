// Colour maps that colour-blind people can read, and the colours of what is not a number.

import { CODES } from '../data/picture.js';

// viridis, at nine equidistant points; interpolated linearly the error stays below what a screen shows.
const VIRIDIS = ['#440154', '#472d7b', '#3b528b', '#2c728e', '#21918c', '#28ae80', '#5ec962', '#addc30', '#fde725'];
// Blue through neutral to orange; the neutral is the page's own colour, so that "no difference" recedes.
const DIVERGING_LIGHT = [
  '#08306b', '#2171b5', '#6baed6', '#c6dbef', '#f5f5f5', '#fdd0a2', '#fd8d3c', '#d94801', '#7f2704',
];
const DIVERGING_DARK = [
  '#c6e2ff', '#74b3f0', '#3b7fc4', '#224a75', '#26292e', '#7a3d12', '#c4621b', '#f59b4a', '#ffe0bd',
];

export const SPECIAL = {
  light: { nan: '#e5007d', inf: '#ff3b1f', zero: '#b9bec6', vanished: '#b9bec6' },
  dark: { nan: '#ff4fae', inf: '#ff5a3c', zero: '#5d646e', vanished: '#5d646e' },
};

// TensorBoard's own, in its order: a run has one colour in all tabs.
const RUNS_LIGHT = ['#425066', '#12b5cb', '#e52592', '#f9ab00', '#9334e6', '#7cb342', '#e8710a'];
const RUNS_DARK = ['#8e98a3', '#12b5cb', '#e52592', '#f9ab00', '#9334e6', '#7cb342', '#e8710a'];

const LOSSES_LIGHT = ['#6f4fa0', '#f2a71b', '#d94f70', '#4fb0ae', '#9aae3c', '#8a6d5b'];
const LOSSES_DARK = ['#a58bd6', '#f5bd52', '#ec7f99', '#6cc9c7', '#bcd05e', '#b89a87'];

function parseHex(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

export function mapPoints(diverging, dark) {
  if (!diverging) return VIRIDIS;
  return dark ? DIVERGING_DARK : DIVERGING_LIGHT;
}

/** [r, g, b] of a map at `position` in [0, 1]. */
export function colourAt(points, position) {
  const scaled = Math.min(1, Math.max(0, position)) * (points.length - 1);
  const index = Math.min(points.length - 2, Math.floor(scaled));
  const [from, to] = [parseHex(points[index]), parseHex(points[index + 1])];
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * (scaled - index)));
}

function pack([red, green, blue], alpha = 255) {
  return ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/**
 * A colour for each of the 65,536 codes of one picture, as packed RGBA. `range` is what the whole page shares;
 * padding stays transparent, so that the hatching below shows through. With `vanishes`, numbers below
 * the range take the colour of zero instead of that of its lower end.
 */
export function codeColours(picture, range, diverging, dark, vanishes = false) {
  const points = mapPoints(diverging, dark);
  const shades = Uint32Array.from({ length: 512 }, (_, i) => pack(colourAt(points, i / 511)));
  const colours = new Uint32Array(65536);
  const vanished = pack(parseHex(SPECIAL[dark ? 'dark' : 'light'].vanished));
  const [low, high] = range;
  const perCode = (picture.high - picture.low) / (CODES.last - CODES.first);
  for (let code = CODES.first; code <= CODES.last; code++) {
    const position = (picture.low + (code - CODES.first) * perCode - low) / (high - low);
    colours[code] = vanishes && position < 0 ? vanished : shades[Math.max(0, Math.min(511, Math.round(position * 511)))];
  }
  const special = SPECIAL[dark ? 'dark' : 'light'];
  colours[CODES.zero] = pack(parseHex(special.zero));
  colours[CODES.inf] = pack(parseHex(special.inf));
  colours[CODES.nan] = pack(parseHex(special.nan));
  return colours;
}

/** Remembers which run has which colour: by the order in which TensorBoard saw them, never by what is selected. */
export class RunColours {
  constructor() {
    this.slots = new Map();
  }

  /** `runs`: all there are, chosen or not. */
  assign(runs) {
    for (const run of runs) if (!this.slots.has(run)) this.slots.set(run, this.slots.size);
  }

  of(run, dark) {
    const slot = this.slots.get(run);
    if (slot === undefined) return null;
    const palette = dark ? RUNS_DARK : RUNS_LIGHT;
    // Beyond the palette TensorBoard repeats itself; here hues a golden angle apart follow.
    return palette[slot] ?? `hsl(${Math.round((slot * 137.5) % 360)} 55% ${dark ? 66 : 40}%)`;
  }
}

/** Losses have hues of their own: a loss in the colour of a run would look like it. */
export function lossColour(index, dark) {
  const palette = dark ? LOSSES_DARK : LOSSES_LIGHT;
  return palette[index % palette.length];
}
