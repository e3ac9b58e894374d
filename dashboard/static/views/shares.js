// Loss shares: which loss drives the state gradient, stacked over t, one small chart per run and training step.

import { drawHatching, drawXAxis, drawYAxis, linear } from '../draw/axes.js';
import { lossColour } from '../draw/colours.js';
import { el, prepareCanvas } from '../draw/dom.js';
import { formatStep, formatValue, ticks } from '../draw/numbers.js';
import { fetchRow, place } from '../data/rows.js';
import { timeText, timeTicks } from '../draw/units.js';

const MARGIN = { top: 4, right: 10, bottom: 22, left: 38 };

export class Shares {
  text = 'Loss shares';
  title = 'Which loss drives the state gradient, over time';

  constructor(tooltip, onColumn) {
    this.tooltip = tooltip;
    this.onColumn = onColumn;
    this.charts = [];
    this.key = el('div', { class: 'chart-key' });
    this.row = el('div', { class: 'charts' });
    this.message = el('div', { class: 'panel-message', hidden: true });
    this.node = el('div', { class: 'panel panel-column' }, this.key, this.row, this.message);
  }

  async load(context) {
    const { view, layer, catalogue, chosen, pinned } = context;
    const steps = pinned === null ? [chosen] : [chosen, pinned];
    const wanted = view.runs.flatMap((run) => {
      const series = catalogue.shares(run, layer);
      return series.length ? steps.map((step) => ({ run, step, series })) : [];
    });
    const charts = await Promise.all(wanted.map(async ({ run, step, series }) => {
      const rows = await Promise.all(series.map((one) => fetchRow({ ...one, run }, step)));
      return { run, step: rows[0].step, losses: series.map(({ loss }) => loss), series,
        cells: rows.map((row) => place(row.cells, view.align, context.maxTime)) };
    }));
    if (!context.isCurrent()) return;
    this.context = context;
    this.charts = charts;
    this.losses = [...new Set(charts.flatMap(({ losses }) => losses))].sort();
    this.keys = this.losses.map(() => el('i', { class: 'swatch' }));
    this.key.replaceChildren(...this.losses.map((loss, i) => el('span', {}, this.keys[i], loss)));
    this.row.replaceChildren(...charts.map((chart) => this.makeChart(chart)));
    this.message.hidden = charts.length > 0;
    this.message.textContent = 'No loss shares were logged for this layer. They need two or more losses.';
  }

  makeChart(chart) {
    chart.swatch = el('i', { class: 'swatch' });
    const step = `step ${formatStep(chart.step)}`;
    chart.canvas = el('canvas', { role: 'img', 'aria-label': `Loss shares of ${chart.run} at ${step}` });
    return el('figure', { class: 'chart', data: { run: chart.run }, onpointermove: (event) => this.hover(event, chart),
      onpointerleave: () => { this.tooltip.hide(); this.onColumn(null); } },
      el('figcaption', {}, chart.swatch, el('span', { class: 'run-name' }, chart.run),
        el('span', { class: 'muted' }, step)),
      el('div', { class: 'chart-area' }, chart.canvas));
  }

  draw(colours) {
    if (!this.context || !this.node.clientWidth) return;
    this.keys.forEach((swatch, i) => { swatch.style.background = lossColour(i, colours.dark); });
    for (const chart of this.charts) {
      const area = chart.canvas.parentElement;
      chart.swatch.style.background = this.context.runColour(chart.run);
      const [width, height] = [area.clientWidth, area.clientHeight];
      drawStack(prepareCanvas(chart.canvas, width, height), chart, this, width, height, colours);
    }
  }

  hover(event, chart) {
    if (!chart.x) return;
    const column = Math.floor(chart.x.invert(event.clientX - chart.canvas.getBoundingClientRect().left));
    const { view, maxTime } = this.context;
    if (column < 0 || column >= maxTime) return;
    const dark = document.documentElement.dataset.theme === 'dark';
    const lines = chart.losses.map((loss, i) => {
      const { kind, value } = chart.cells[i][column];
      const text = `${kind === 'padding' ? '–' : formatValue(value)}   ${loss}`;
      return { text, colour: lossColour(this.losses.indexOf(loss), dark) };
    });
    this.onColumn(column);
    const time = timeText(column, view, maxTime, chart.series[0].time_shape);
    this.tooltip.show([time, ...lines], event.clientX, event.clientY);
  }
}

/** Positive shares are stacked upwards from 0, negative ones downwards: together they make 1. */
function drawStack(context, chart, panel, width, height, colours) {
  const { maxTime, view } = panel.context;
  const stacks = stack(chart.cells, maxTime);
  const bottom = height - MARGIN.bottom;
  const x = linear(0, maxTime, MARGIN.left, width - MARGIN.right);
  const y = linear(Math.min(0, stacks.low), Math.max(1, stacks.high), bottom, MARGIN.top);
  chart.x = x;
  drawHatching(context, MARGIN.left, MARGIN.top, width - MARGIN.left - MARGIN.right, bottom - MARGIN.top, colours);
  chart.losses.forEach((loss, i) => {
    context.fillStyle = lossColour(panel.losses.indexOf(loss), colours.dark);
    for (const [first, last] of stretches(chart.cells[i])) fillBand(context, stacks.bands[i], first, last, x, y);
  });
  const yTicks = ticks(...y.domain, Math.max(2, Math.floor(height / 45))).map((at) => ({ at, label: formatValue(at) }));
  drawYAxis(context, y, yTicks, MARGIN.left, colours);
  context.fillStyle = colours.text;
  const inner = width - MARGIN.left - MARGIN.right;
  for (const level of [0, 1]) context.fillRect(MARGIN.left, Math.round(y(level)) - 0.5, inner, 1);
  const xTicks = timeTicks(view, maxTime, Math.max(2, Math.floor(width / 70)));
  drawXAxis(context, x, xTicks, bottom + 1, colours, { right: width });
}

/** The stretches of columns [first, last] that hold a value. */
function stretches(cells) {
  const found = [];
  cells.forEach(({ kind }, column) => {
    if (kind !== 'number' && kind !== 'zero') return;
    if (found.length && found[found.length - 1][1] === column - 1) found[found.length - 1][1] = column;
    else found.push([column, column]);
  });
  return found;
}

function fillBand(context, band, first, last, x, y) {
  // Values belong to the middle of a column; the ends reach out to its border.
  const places = [[x(first), first]];
  for (let column = first; column <= last; column++) places.push([x(column + 0.5), column]);
  places.push([x(last + 1), last]);
  context.beginPath();
  for (const [at, column] of places) context.lineTo(at, y(band[column][1]));
  for (const [at, column] of places.reverse()) context.lineTo(at, y(band[column][0]));
  context.closePath();
  context.fill();
}

export function stack(cells, maxTime) {
  const bands = cells.map(() => Array.from({ length: maxTime }, () => [0, 0]));
  let [low, high] = [0, 0];
  for (let column = 0; column < maxTime; column++) {
    let [up, down] = [0, 0];
    cells.forEach((row, i) => {
      const { kind, value } = row[column];
      if (kind !== 'number' && kind !== 'zero') return;
      const from = value >= 0 ? up : down;
      if (value >= 0) up += value;
      else down += value;
      bands[i][column] = [from, from + value];
    });
    [low, high] = [Math.min(low, down), Math.max(high, up)];
  }
  return { bands, low, high };
}
