// What the numbers of a view are, in words: for tooltips, axes and the colour bar.

import { isShare, POSITIONS } from '../data/catalogue.js';
import { formatSigned, formatStep, formatValue, logTicks, ticks } from './numbers.js';

/** 'log': log10 of a norm or a ratio; 'difference': of two log10; 'share': as it is. */
export function unitOf(view) {
  if (isShare(view.quantity)) return 'share';
  return view.mode === 'difference' ? 'difference' : 'log';
}

export function readout(cell, unit) {
  if (cell.kind === 'padding') return 'padding: no valid example here';
  if (cell.kind === 'nan') return 'NaN';
  if (cell.kind === 'inf') return unit === 'difference' ? 'infinite: one of the two is zero or Inf' : 'Inf';
  if (cell.kind === 'zero') return 'exactly 0';
  if (unit === 'share') return formatValue(cell.number);
  const value = formatValue(10 ** cell.number);
  if (unit === 'difference') return `${formatSigned(cell.number)} in log₁₀, a factor of ${value}`;
  return value;
}

export function rangeTicks([low, high], unit, count) {
  if (unit === 'log') return logTicks(low, high, count);
  const label = unit === 'share' ? formatValue : (at) => formatSigned(at, tickDigits(low, high));
  return ticks(low, high, count).map((at) => ({ at, label: label(at) }));
}

function tickDigits(low, high) {
  return high - low > 4 ? 0 : high - low > 0.4 ? 1 : 2;
}

export function rangeTitle(view) {
  const label = view.about.label;
  if (view.mode === 'difference') return `log₁₀ difference: ${label.toLowerCase()} minus that of ${view.baseline}`;
  if (view.mode === 'relative') return `${label}, relative to the largest of its row (line: 1 %)`;
  if (view.mode === 'normalised') return `${label}, divided by its last time step`;
  if (unitOf(view) === 'share') return label;
  return view.quantity === 'gain' ? `${label} (neutral colour: 1)` : `${label} (logarithmic)`;
}

/** Columns are counted from the left edge of the widest picture; this is the time step that one stands for. */
export function timeLabel(column, view, maxTime) {
  return view.align === 'end' ? maxTime - 1 - column : column;
}

export function timeText(column, view, maxTime, shape) {
  if (view.align === 'end') {
    const back = maxTime - 1 - column;
    return back > 0 ? `${formatStep(back)} back from the end` : view.quantity === POSITIONS ? 'last position' : 'last time step';
  }
  if (view.quantity === POSITIONS) return `position ${formatStep(column)}`;
  let text = `t = ${formatStep(column)}`;
  // In nested loops t is flattened, outer loop first.
  if (shape && shape.length > 1 && shape.reduce((product, side) => product * side, 1) === maxTime) {
    const indices = [];
    let rest = column;
    for (const side of [...shape].reverse()) {
      indices.unshift(rest % side);
      rest = Math.floor(rest / side);
    }
    text += ` = (${indices.join(', ')})`;
  }
  return text;
}

/** `range`: the columns that are shown, [low, high); all of them by default. */
export function timeTicks(view, maxTime, count, [low, high] = [0, maxTime]) {
  const last = Math.max(low + 1, high - 1);
  if (view.align !== 'end') {
    return ticks(low, last, count, true).map((value) => ({ at: value + 0.5, label: formatStep(value) }));
  }
  return ticks(maxTime - 1 - last, maxTime - 1 - low, count, true).reverse()
    .map((value) => ({ at: maxTime - 0.5 - value, label: value ? `−${formatStep(value)}` : '0' }));
}

export function timeTitle(view) {
  const [one, many] = view.quantity === POSITIONS ? ['position', 'positions'] : ['time step t', 'time steps'];
  return view.align === 'end' ? `${many} back from the end` : one;
}

/** "1,000 of 10,000 logged steps kept, merged by max", and what else was left out. */
export function honesty(picture) {
  if (!picture.kept) return 'No rows yet.';
  const parts = [picture.logged === null
    ? `${formatStep(picture.kept)} steps kept; how many were logged is not known`
    : `${formatStep(picture.kept)} of ${formatStep(Math.max(picture.logged, picture.kept))} logged steps kept`];
  if (picture.shown < picture.kept) parts.push(`${formatStep(picture.shown)} within the other run's range`);
  parts.push(`merged by ${picture.merged_by === 'magnitude' ? 'largest magnitude' : 'max'}`);
  if (picture.column_width > 1) parts.push(`${picture.column_width} time steps per column`);
  if (picture.skipped) parts.push(`${formatStep(picture.skipped)} left out: not of the right shape`);
  return parts.join(', ');
}
