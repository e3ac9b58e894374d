// The loss beside the heat maps, on their axis: training step upwards, loss to the right, a line per run.

import { drawHatching, drawXAxis, linear } from '../draw/axes.js';
import { plotBox } from '../draw/heatmap.js';
import { logTicks, ticks, formatValue } from '../draw/numbers.js';

export const LOSS_WIDTH = 132;
const MARK = 4;

/** What the marks mean, for the title of the column. */
export const LOSS_KEY = 'Loss over training, a line per run. ○ evaluation, × skipped updates, ▸ clipped updates.';

/** `curves`: [{overview, colour}]. Draws on any context; `frame` as for the heat maps. */
export function drawLosses(context, curves, frame, width, height) {
  const box = plotBox(width, height);
  const { colours } = frame;
  const y = linear(frame.steps[0], frame.steps[1], box.y + box.height, box.y);
  const inside = (step) => step >= frame.steps[0] && step <= frame.steps[1];
  const shown = curves.map(({ overview, colour }) => ({ colour, overview,
    points: pointsOf(overview.loss).filter(([step]) => inside(step)),
    evaluated: pointsOf(overview.evaluations).filter(([step]) => inside(step)) }));
  const numbers = shown.flatMap(({ points, evaluated }) => [...points, ...evaluated].map(([, value]) => value));
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
  if (!numbers.length) {
    drawHatching(context, box.x, box.y, box.width, box.height, colours);
    return;
  }
  const logarithmic = Math.min(...numbers) > 0;
  const at = (value) => (logarithmic ? Math.log10(value) : value);
  const [low, high] = [at(Math.min(...numbers)), at(Math.max(...numbers))];
  const pad = Math.max((high - low) * 0.08, Math.abs(high) * 1e-3, 1e-9);
  const x = linear(low - pad, high + pad, box.x + 2 * MARK, box.x + box.width - 2 * MARK);
  context.save();
  context.beginPath();
  context.rect(box.x, box.y, box.width, box.height);
  context.clip();
  for (const { points, evaluated, overview, colour } of shown) {
    drawLine(context, points.map(([step, value]) => [x(at(value)), y(step)]), colour);
    context.lineWidth = 1.3;
    for (const [step, value] of evaluated) {
      context.beginPath();
      context.arc(x(at(value)), y(step), 2.5, 0, 7);
      context.stroke();
    }
    for (const step of overview.skipped_at.filter(inside)) drawCross(context, box.x + box.width - MARK - 2, y(step));
    context.fillStyle = colour;
    for (const step of overview.clipped_at.filter(inside)) drawArrow(context, box.x + 1, y(step));
  }
  context.restore();
  const list = logarithmic ? logTicks(x.domain[0], x.domain[1], 2)
    : ticks(x.domain[0], x.domain[1], 2).map((value) => ({ at: value, label: formatValue(value) }));
  drawXAxis(context, x, list, box.y + box.height + 1, colours, { left: 0, right: width });
}

/** [[step, value]…] of a curve, without what is not finite. */
export function pointsOf({ steps, values }) {
  return steps.map((step, i) => [step, values[i]]).filter(([, value]) => value !== null);
}

function drawLine(context, points, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1.6;
  context.lineJoin = 'round';
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

function drawCross(context, x, y) {
  context.beginPath();
  for (const sign of [1, -1]) {
    context.moveTo(x - 3, y - 3 * sign);
    context.lineTo(x + 3, y + 3 * sign);
  }
  context.stroke();
}

function drawArrow(context, x, y) {
  context.beginPath();
  context.moveTo(x, y - 2.5);
  context.lineTo(x + 4, y);
  context.lineTo(x, y + 2.5);
  context.fill();
}

/** The losses in words, for who does not see them. */
export function describeLosses(curves) {
  return curves.map(({ name, overview }) => {
    const points = pointsOf(overview.loss);
    const text = points.length ? `${formatValue(points[0][1])} to ${formatValue(points[points.length - 1][1])}` : 'none';
    return `${name}: loss ${text}, ${overview.evaluations.steps.length} evaluations, ${overview.skipped} skipped updates,`
      + ` clipped at ${overview.clipped_at.length} logged steps`;
  }).join('; ');
}
