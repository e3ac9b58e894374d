// Single rows, exactly as logged, and what a view makes of them.

import { fetchBinary } from './api.js';

/** Fetches the kept row nearest to `step`: {step, cells: [{kind, value}…]}. */
export async function fetchRow(series, step) {
  const answer = await fetchBinary('row', { run: series.run, tag: series.tag, step }, series.version);
  const bits = new Uint32Array(answer.values.buffer, answer.values.byteOffset, answer.values.length);
  const isPadding = (i) => bits[i] === answer.padding_bits;
  const cells = Array.from(answer.values, (value, i) => ({ kind: kindOf(value, isPadding(i)), value }));
  return { step: answer.step, cells };
}

function kindOf(value, padding) {
  if (padding) return 'padding';
  if (Number.isNaN(value)) return 'nan';
  if (!Number.isFinite(value)) return 'inf';
  return value === 0 ? 'zero' : 'number';
}

/** Divides by the last value of `scale` that is a number other than zero, as the server does for heat maps. */
export function normalise(cells, scale = cells) {
  const last = scale.findLast(({ kind, value }) => kind === 'number' && value > 0);
  if (!last) return cells;
  return cells.map((cell) => (cell.kind === 'number' ? { ...cell, value: cell.value / last.value } : cell));
}

/** Divides by the largest number of `scale`, as the server does for heat maps. */
export function relative(cells, scale = cells) {
  const largest = scale.reduce((best, { kind, value }) => (kind === 'number' && value > best ? value : best), 0);
  if (!largest) return cells;
  return cells.map((cell) => (cell.kind === 'number' ? { ...cell, value: cell.value / largest } : cell));
}

/** Places cells into columns 0 … maxTime − 1: at the left, or with their last valid one at the right. */
export function place(cells, align, maxTime) {
  const length = cells.findLastIndex(({ kind }) => kind !== 'padding') + 1;
  const offset = align === 'end' ? maxTime - length : 0;
  const placed = Array.from({ length: maxTime }, () => ({ kind: 'padding' }));
  for (let t = 0; t < Math.min(length, maxTime); t++) placed[t + offset] = cells[t];
  return placed;
}
