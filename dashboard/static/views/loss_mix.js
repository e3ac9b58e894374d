// What the losses of a run do to each other over training: their shares of the total, and how often gradients conflict.

import { drawXAxis, drawYAxis, linear } from '../draw/axes.js';
import { lossColour } from '../draw/colours.js';
import { el, prepareCanvas } from '../draw/dom.js';
import { formatStep, formatValue, shortStep, ticks } from '../draw/numbers.js';
import { pointsOf } from './losses.js';
import { stack } from './shares.js';

const HEIGHT = 170;
const SMOOTHED = 10;
const MARGIN = { top: 6, right: 10, bottom: 24, left: 40 };

export class LossMix {
  constructor(tooltip) {
    this.tooltip = tooltip;
    this.charts = [];
    this.row = el('div', { class: 'layer-maps' });
    this.node = el('section', { class: 'mix', hidden: true }, el('h2', {}, 'Shares of the losses'), this.row);
  }

  /** `runs`: those whose overview has the shares of several losses. */
  update(runs) {
    this.node.hidden = runs.length === 0;
    const signature = JSON.stringify(runs.map(({ run, colour, overview }) => [run, colour, overview.version]));
    if (signature === this.signature) return;
    this.signature = signature;
    this.charts = runs.flatMap((item) => groups(item.overview).map((losses) => this.makeChart(item, losses)));
    this.row.replaceChildren(...this.charts.map(({ node }) => node));
    if (this.colours) this.draw(this.colours);
  }

  makeChart({ run, name, colour, overview }, losses) {
    const steps = overview.shares[losses[0]].steps;
    const cells = losses.map((loss) => {
      const known = new Map(pointsOf(overview.shares[loss]));
      return steps.map((step) => (known.has(step) ? { kind: 'number', value: known.get(step) } : { kind: 'padding' }));
    });
    const conflict = pointsOf(overview.conflict);
    const rate = conflict.reduce((sum, [, value]) => sum + value, 0) / conflict.length;
    const text = conflict.length
      ? `Gradients conflict in ${Math.round(100 * rate)} % of the pairs of losses, over ${formatStep(conflict.length)} probed updates.`
      : 'probe_every also measures how often their gradients conflict.';
    const canvas = el('canvas', { role: 'img', 'aria-label': losses.map((loss, i) => {
      const last = cells[i].findLast(({ kind }) => kind === 'number');
      return `${loss}: ${last ? formatValue(last.value) : 'unknown'} of the total at last`;
    }).join('; ') });
    const chart = { canvas, losses, steps, cells, stacks: stack(cells, steps.length), conflict: runningMean(conflict) };
    chart.keys = losses.map(() => el('i', { class: 'swatch' }));
    canvas.addEventListener('pointermove', (event) => this.hover(event, chart));
    canvas.addEventListener('pointerleave', () => this.tooltip.hide());
    chart.node = el('figure', { class: 'layer-map mix-chart', data: { run } },
      el('figcaption', {}, el('span', { class: 'swatch', style: { background: colour } }),
        el('span', { class: 'run-name', title: run }, name)),
      el('div', { class: 'chart-key' }, ...losses.map((loss, i) => el('span', {}, chart.keys[i], loss)),
        conflict.length > 0 && el('span', {}, el('i', { class: 'stroke dashed' }), `conflict rate, mean of ${SMOOTHED}`)),
      el('div', { class: 'layer-area' }, canvas), el('p', { class: 'conflict' }, text));
    return chart;
  }

  draw(colours) {
    this.colours = colours;
    if (this.node.hidden || !this.node.clientWidth) return;
    for (const chart of this.charts) drawChart(chart, chart.canvas.parentElement.clientWidth, colours);
  }

  hover(event, chart) {
    if (!chart.x) return;
    const step = chart.x.invert(event.clientX - chart.canvas.getBoundingClientRect().left);
    const distances = chart.steps.map((other) => Math.abs(other - step));
    const row = distances.indexOf(Math.min(...distances));
    const lines = chart.losses.map((loss, i) => ({ colour: lossColour(i, this.colours.dark),
      text: `${chart.cells[i][row].kind === 'number' ? formatValue(chart.cells[i][row].value) : '–'}   ${loss}` }));
    this.tooltip.show([`step ${formatStep(chart.steps[row])}`, ...lines], event.clientX, event.clientY);
  }
}

/** The losses of each minimizer, by name: shares of different ones do not add up to anything. */
function groups({ shares, minimizers = [] }) {
  const found = new Map();
  for (const loss of Object.keys(shares).sort()) {
    const owner = minimizers.filter((name) => name && loss.startsWith(`${name}/`)).sort((a, b) => b.length - a.length)[0] ?? '';
    found.set(owner, [...(found.get(owner) ?? []), loss]);
  }
  return [...found.values()];
}

/** Each value as the mean of the last `SMOOTHED` ones: with two losses a single update conflicts fully or not at all. */
function runningMean(points) {
  return points.map(([step], i) => {
    const last = points.slice(Math.max(0, i + 1 - SMOOTHED), i + 1);
    return [step, last.reduce((sum, [, value]) => sum + value, 0) / last.length];
  });
}

function drawChart(chart, width, colours) {
  const context = prepareCanvas(chart.canvas, width, HEIGHT);
  const { steps, stacks, cells } = chart;
  const bottom = HEIGHT - MARGIN.bottom;
  const shown = [steps[0], steps[steps.length - 1], ...chart.conflict.map(([step]) => step)];
  const first = Math.min(...shown);
  const x = linear(first, Math.max(...shown, first + 1), MARGIN.left, width - MARGIN.right);
  const y = linear(Math.min(0, stacks.low), Math.max(1, stacks.high), bottom, MARGIN.top);
  chart.x = x;
  chart.losses.forEach((_, i) => {
    const colour = lossColour(i, colours.dark);
    chart.keys[i].style.background = colour;
    context.fillStyle = colour;
    const rows = steps.map((_step, row) => row).filter((row) => cells[i][row].kind === 'number');
    context.beginPath();
    for (const row of rows) context.lineTo(x(steps[row]), y(stacks.bands[i][row][1]));
    for (const row of rows.reverse()) context.lineTo(x(steps[row]), y(stacks.bands[i][row][0]));
    context.fill();
  });
  context.strokeStyle = colours.text;
  context.lineWidth = 1.5;
  context.setLineDash([4, 3]);
  context.beginPath();
  chart.conflict.forEach(([step, rate], i) => (i ? context.lineTo(x(step), y(rate)) : context.moveTo(x(step), y(rate))));
  context.stroke();
  context.setLineDash([]);
  drawYAxis(context, y, ticks(...y.domain, 4).map((at) => ({ at, label: formatValue(at) })), MARGIN.left, colours);
  const list = ticks(...x.domain, Math.max(2, Math.floor(width / 90)), true).map((at) => ({ at, label: shortStep(at) }));
  drawXAxis(context, x, list, bottom + 1, colours, { right: width });
}
