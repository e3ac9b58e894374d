// The gradient at every position of each layer: layers downwards in the order of calls, positions to the right.

import { fetchPositions } from '../data/api.js';
import { drawHatching, drawXAxis, linear } from '../draw/axes.js';
import { colourAt, mapPoints, SPECIAL } from '../draw/colours.js';
import { el, prepareCanvas } from '../draw/dom.js';
import { formatStep, formatValue, ticks } from '../draw/numbers.js';
import { ROW } from './layer_map.js';

const AXIS = 24;
const PADDING = 10;
const LOWEST = -6; // log10 of what still has a colour, relative to the largest of the map

export class Positions {
  /** `actions.show(run, layer, step)`: one layer over training. */
  constructor(tooltip, actions) {
    this.tooltip = tooltip;
    this.actions = actions;
    this.maps = [];
    this.slider = el('input', { type: 'range', min: '0', 'aria-label': 'Training step of the positions',
      oninput: () => this.choose(Number(this.slider.value)) });
    this.shown = el('output', {});
    this.row = el('div', { class: 'layer-maps' });
    this.node = el('section', { class: 'layer-section positions', hidden: true },
      el('h2', {}, 'Does the gradient reach every position?'),
      el('p', { class: 'muted' }, '‖∂L/∂output‖ of each layer at each position, relative to the largest of the map: '
        + 'bright 1, dark 10⁻⁶, grey below. Click a layer to see it over training.'),
      el('label', { class: 'position-step' }, el('span', { class: 'muted' }, 'training step'), this.slider, this.shown), this.row);
  }

  /** `runs`: [{run, name, colour, series}], `series` of quantity `output`. */
  update(runs) {
    this.node.hidden = runs.length === 0;
    const signature = JSON.stringify(runs.map(({ run, colour, series }) => [run, colour, series.map((one) => one.version)]));
    if (signature === this.signature) return;
    this.signature = signature;
    const follows = this.chosen === undefined || this.chosen === this.steps?.length - 1;
    this.maps = runs.map((item) => this.makeMap(item));
    this.row.replaceChildren(...this.maps.map(({ node }) => node));
    this.load(follows ? null : this.steps[this.chosen]);
  }

  makeMap({ run, name, colour }) {
    const canvas = el('canvas', { role: 'img', 'aria-label': 'reading …' });
    const map = { run, canvas, names: el('div', { class: 'layer-names' }) };
    canvas.addEventListener('pointermove', (event) => this.hover(event, map));
    canvas.addEventListener('pointerleave', () => this.tooltip.hide());
    canvas.addEventListener('click', (event) => {
      const place = this.locate(event, map);
      if (place) this.open(map, map.answer.layers[place.layer]);
    });
    map.node = el('figure', { class: 'layer-map position-map', data: { run } },
      el('figcaption', {}, el('span', { class: 'swatch', style: { background: colour } }),
        el('span', { class: 'run-name', title: run }, name)),
      el('div', { class: 'layer-rows' }, map.names, el('div', { class: 'layer-area' }, canvas)));
    return map;
  }

  open({ run, answer }, layer) {
    this.tooltip.hide();
    this.actions.show(run, layer, answer.step, 'output');
  }

  choose(index) {
    if (!this.steps?.length) return;
    this.chosen = index;
    this.shown.textContent = `step ${formatStep(this.steps[index])}`;
    this.load(this.steps[index]);
  }

  /** Reads the rows nearest to a training step, the last ones for null. A late answer to an earlier question is dropped. */
  async load(step) {
    const request = this.request = {};
    const { maps } = this;
    await Promise.all(maps.map(async (map) => {
      const answer = await fetchPositions(map.run, step).catch(() => null);
      if (this.request !== request || !answer) return;
      map.answer = answer;
      map.canvas.setAttribute('aria-label', summary(answer));
      const buttons = answer.layers.map((layer) => el('button', { type: 'button', class: 'quiet',
        title: `${layer}: show its positions over training`, onclick: () => this.open(map, layer) }, layer));
      if (map.names.textContent !== answer.layers.join('')) map.names.replaceChildren(...buttons);
    }));
    if (this.request !== request) return;
    const known = maps.filter(({ answer }) => answer);
    this.steps = [...new Set(known.flatMap(({ answer }) => answer.steps))].sort((a, b) => a - b);
    if (!this.steps.length) return;
    this.slider.max = String(this.steps.length - 1);
    this.chosen = step === null ? this.steps.length - 1 : Math.max(0, this.steps.indexOf(step));
    this.slider.value = String(this.chosen);
    this.shown.textContent = `step ${formatStep(this.steps[this.chosen])}`;
    if (this.colours) this.draw(this.colours);
    this.node.dataset.step = String(this.steps[this.chosen]);
  }

  draw(colours) {
    this.colours = colours;
    if (this.node.hidden || !this.node.clientWidth) return;
    for (const map of this.maps) if (map.answer) drawMap(map, map.canvas.parentElement.clientWidth, colours);
  }

  locate(event, { canvas, answer, x }) {
    const area = canvas.getBoundingClientRect();
    const [layer, column] = [Math.floor((event.clientY - area.top) / ROW), x && Math.floor(x.invert(event.clientX - area.left))];
    return x && answer.values[layer]?.[column] !== undefined ? { layer, column } : null;
  }

  hover(event, map) {
    const place = this.locate(event, map);
    if (!place) {
      this.tooltip.hide();
      return;
    }
    const { answer } = map;
    const value = answer.values[place.layer][place.column];
    const first = place.column * answer.column_width;
    const where = answer.column_width > 1 ? `positions ${first} – ${first + answer.column_width - 1}` : `position ${first}`;
    this.tooltip.show([value === null ? 'no valid example, or not finite' : formatValue(value),
      `${answer.layers[place.layer]}, ${where}, step ${formatStep(answer.step)}`], event.clientX, event.clientY);
  }
}

function largestOf(values) {
  return values.flat().reduce((best, value) => (value !== null && value > best ? value : best), 0);
}

function drawMap(map, width, colours) {
  const { values, column_width: columnWidth } = map.answer;
  const height = values.length * ROW;
  const context = prepareCanvas(map.canvas, width, height + AXIS);
  const columns = Math.max(1, ...values.map((row) => row.length));
  const points = mapPoints(false, colours.dark);
  const special = SPECIAL[colours.dark ? 'dark' : 'light'];
  const largest = largestOf(values);
  map.x = linear(0, columns, 0, width - PADDING);
  drawHatching(context, 0, 0, width - PADDING, height, colours);
  values.forEach((row, i) => row.forEach((value, j) => {
    if (value === null) return;
    const size = value > 0 ? Math.log10(value / largest) : -Infinity;
    context.fillStyle = value === 0 ? special.zero : size < LOWEST ? special.vanished
      : `rgb(${colourAt(points, 1 - size / LOWEST).join(' ')})`;
    context.fillRect(map.x(j), i * ROW, Math.max(1, map.x(j + 1) - map.x(j) + 0.4), ROW - 1);
  }));
  context.strokeStyle = colours.line;
  context.strokeRect(0.5, 0.5, width - PADDING - 1, height - 1);
  const list = ticks(0, Math.max(1, columns * columnWidth - 1), Math.max(2, Math.floor(width / 80)), true)
    .map((at) => ({ at: at / columnWidth + 0.5, label: formatStep(at) }));
  drawXAxis(context, map.x, list, height + 1, colours, { right: width });
}

/** The map in words: each layer with its smallest and largest value. */
function summary({ layers, values, step }) {
  const described = layers.map((layer, i) => {
    const numbers = values[i].filter((value) => value !== null);
    return `${layer}: ${numbers.length ? `${formatValue(Math.min(...numbers))} to ${formatValue(Math.max(...numbers))}` : 'none'}`;
  });
  return `Gradient at each position, step ${formatStep(step)}. ${described.join('; ')}`;
}
