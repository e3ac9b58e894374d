// The credit matrix M[s, t] = ‖∂l_s/∂s_t‖: how much the loss at s depends on the state at t, on demand.

import { fetchBinary } from '../data/api.js';
import { drawHatching, drawVerticalTitle, drawXAxis, drawYAxis, FONT, linear } from '../draw/axes.js';
import { codeColours } from '../draw/colours.js';
import { el, prepareCanvas } from '../draw/dom.js';
import { drawBar } from '../controls/legend.js';
import { formatStep, ticks } from '../draw/numbers.js';
import { paint, Picture, sharedRange } from '../data/picture.js';
import { readout } from '../draw/units.js';

const MARGIN = { top: 3, right: 8, bottom: 36, left: 54 };
const BAR_WIDTH = 220;
const VIEW = { quantity: 'credit', mode: 'absolute', diverging: false, align: 'start' };

export class Credit {
  text = 'Credit matrix';
  title = 'How much the loss at s depends on the state at t';

  constructor(tooltip) {
    this.tooltip = tooltip;
    this.charts = [];
    this.bar = el('canvas', { 'aria-hidden': 'true' });
    const title = el('span', {}, '‖∂ loss at s / ∂ state at t‖ (logarithmic)');
    this.key = el('div', { class: 'chart-key' }, title, this.bar);
    this.row = el('div', { class: 'charts' });
    this.message = el('div', { class: 'panel-message', hidden: true });
    this.node = el('div', { class: 'panel panel-column' }, this.key, this.row, this.message);
  }

  async load(context) {
    const { view, layer, catalogue, chosen, pinned } = context;
    const steps = pinned === null ? [chosen] : [chosen, pinned];
    const wanted = view.runs.flatMap((run) => {
      const series = catalogue.credit(run, layer);
      return series ? steps.map((step) => ({ run, step, series })) : [];
    });
    const charts = await Promise.all(wanted.map(async ({ run, step, series }) => ({
      run, picture: new Picture(await fetchBinary('matrix', { run, tag: series.tag, step }, series.version)),
    })));
    if (!context.isCurrent()) return;
    // Matrices are logged seldom: the chosen and the pinned step may mean the same one.
    this.charts = charts.filter(({ run, picture }, i) =>
      charts.findIndex((other) => other.run === run && other.picture.step === picture.step) === i);
    this.context = context;
    this.row.replaceChildren(...this.charts.map((chart) => this.makeChart(chart)));
    this.message.hidden = this.charts.length > 0;
    this.message.textContent = 'No credit matrix was logged for this layer.';
    this.key.hidden = this.charts.length === 0;
  }

  draw(colours) {
    if (!this.context || !this.node.clientWidth) return;
    const range = sharedRange(this.charts.map(({ picture }) => picture), false);
    const frame = { view: VIEW, range, colours };
    drawBar(prepareCanvas(this.bar, BAR_WIDTH, 28), frame, BAR_WIDTH);
    for (const chart of this.charts) {
      const area = chart.canvas.parentElement;
      chart.swatch.style.background = this.context.runColour(chart.run);
      const width = area.clientWidth - MARGIN.left - MARGIN.right;
      const height = area.clientHeight - MARGIN.top - MARGIN.bottom;
      drawMatrix(chart, Math.max(40, Math.min(width, height)), frame);
    }
  }

  makeChart(chart) {
    chart.swatch = el('i', { class: 'swatch' });
    const step = formatStep(chart.picture.step);
    chart.canvas = el('canvas', { role: 'img', 'aria-label': `Credit matrix of ${chart.run} at step ${step}` });
    return el('figure', { class: 'chart', data: { run: chart.run },
      onpointermove: (event) => this.hover(event, chart), onpointerleave: () => this.tooltip.hide() },
      el('figcaption', {}, chart.swatch, el('span', { class: 'run-name' }, chart.run),
        el('span', { class: 'muted' }, `step ${step}, one of ${chart.picture.steps.length} logged`)),
      el('div', { class: 'chart-area' }, chart.canvas));
  }

  hover(event, chart) {
    const area = chart.canvas.getBoundingClientRect();
    const t = Math.floor(chart.x.invert(event.clientX - area.left));
    const s = Math.floor(chart.y.invert(event.clientY - area.top));
    const { picture } = chart;
    if (t < 0 || s < 0 || t >= picture.time || s >= picture.time) {
      this.tooltip.hide();
      return;
    }
    const cell = picture.at(rowOf(picture, s), Math.floor(t / picture.column_width));
    const text = t > s ? 'no influence: the state is later than the loss' : readout(cell, 'log');
    this.tooltip.show([text, `loss at s = ${s}, state at t = ${t}`], event.clientX, event.clientY);
  }
}

function rowOf(picture, s) {
  return Math.min(picture.rows - 1, Math.floor((s * picture.rows) / picture.time));
}

function drawMatrix(chart, size, frame) {
  const { picture } = chart;
  const { colours } = frame;
  const [width, height] = [size + MARGIN.left + MARGIN.right, size + MARGIN.top + MARGIN.bottom];
  const ratio = window.devicePixelRatio || 1;
  const context = prepareCanvas(chart.canvas, width, height, ratio);
  chart.x = linear(0, picture.time, MARGIN.left, MARGIN.left + size);
  // As a matrix is written: s downwards.
  chart.y = linear(0, picture.time, MARGIN.top, MARGIN.top + size);
  drawHatching(context, MARGIN.left, MARGIN.top, size, size, colours);
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = Math.max(1, Math.round(size * ratio));
  const image = new ImageData(canvas.width, canvas.height);
  const cells = (pixel, count) => {
    const [low, high] = [(pixel * count) / canvas.width, ((pixel + 1) * count) / canvas.width];
    const middle = Math.floor((low + high) / 2);
    return high - low < 1 ? [middle, middle + 1] : [Math.floor(low), Math.min(count, Math.ceil(high))];
  };
  const shades = codeColours(picture, frame.range, false, colours.dark);
  paint(picture, shades, image, (y) => cells(y, picture.rows), (x) => cells(x, picture.columns));
  canvas.getContext('2d').putImageData(image, 0, 0);
  context.drawImage(canvas, MARGIN.left, MARGIN.top, size, size);
  context.strokeStyle = colours.line;
  context.strokeRect(MARGIN.left - 0.5, MARGIN.top - 0.5, size + 1, size + 1);
  const list = ticks(0, Math.max(1, picture.time - 1), Math.max(2, Math.floor(size / 60)), true)
    .map((at) => ({ at: at + 0.5, label: formatStep(at) }));
  drawXAxis(context, chart.x, list, MARGIN.top + size + 1, colours, { right: width });
  drawYAxis(context, chart.y, list, MARGIN.left - 1, colours);
  drawVerticalTitle(context, 'loss at s', 9, MARGIN.top + size / 2, colours);
  context.font = FONT;
  context.textAlign = 'center';
  context.textBaseline = 'alphabetic';
  context.fillStyle = colours.muted;
  context.fillText('state at t', MARGIN.left + size / 2, height - 5);
}
