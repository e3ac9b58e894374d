// A number for each layer over training: layers downwards, training steps to the right, a map per run.

import { drawHatching, drawXAxis, linear } from '../draw/axes.js';
import { colourAt, mapPoints, SPECIAL } from '../draw/colours.js';
import { el, prepareCanvas } from '../draw/dom.js';
import { formatStep, formatValue, shortStep, ticks } from '../draw/numbers.js';

export const ROW = 24;
const AXIS = 24;
const PADDING = 10;
// log10 of the ratio: neutral from 10⁻⁴ to 10⁻², about 10⁻³ being what most good runs have; full colour at the ends.
const [LOWEST, SMALL, LARGE, LARGEST] = [-7, -4, -2, 0];

/** ‖ΔW‖ / ‖W‖ of each layer. */
export const UPDATES = {
  field: 'updates',
  figure: 'update-map',
  title: 'How far an update moves each layer',
  choice: 'Update / weight, by layer',
  about: '‖ΔW‖ / ‖W‖ per update. Blue: it hardly learns. Neutral: 10⁻⁴ to 10⁻². Orange: steps too large.',
  range: [LOWEST, LARGEST],
  labels: { [-7]: '10⁻⁷', [-4]: '10⁻⁴', [-2]: '10⁻²', 0: '1' },
  size: (ratio) => (ratio === 0 ? null : Math.log10(ratio)),
  position(size) {
    if (size < SMALL) return 0.5 * Math.max(0, (size - LOWEST) / (SMALL - LOWEST)) * 0.8;
    if (size > LARGE) return 0.6 + 0.4 * Math.min(1, (size - LARGE) / (LARGEST - LARGE));
    return 0.5;
  },
  text(ratio) {
    const size = Math.log10(ratio);
    const word = ratio === 0 ? 'it does not move'
      : size < SMALL ? 'it hardly learns' : size > LARGE ? 'the steps are large' : 'healthy';
    return `${formatValue(ratio)}: ${word}`;
  },
};

/** The same of each variable. */
const RATIO = { ...UPDATES, field: 'ratio', title: 'How far an update moves each variable', choice: 'Update / weight, by variable' };

/** A norm of each variable: log10, from the largest of all maps down to `DECADES` below it. */
const DECADES = 6;
function norm(field, title, choice, about) {
  return {
    field,
    figure: 'update-map',
    title,
    choice,
    about: `${about} Yellow: the largest of all shown. Grey: less than 10⁻⁶ of it, or 0.`,
    sequential: true,
    range: [-DECADES, 0],
    labels: { [-6]: '10⁻⁶', [-4]: '10⁻⁴', [-2]: '10⁻²', 0: 'largest' },
    size: (value, largest) => (value > 0 && value >= largest * 10 ** -DECADES ? Math.log10(value / largest) : null),
    position: (size) => 1 + size / DECADES,
    text: (value) => (value === 0 ? '0: nothing arrives' : formatValue(value)),
  };
}
const GRADIENT = norm('gradient', 'Gradient of each variable', 'Gradient norm, by variable',
  '‖g‖ of the whole update, before clipping.');
const WEIGHT = { ...norm('weight', 'Size of each variable', 'Weight norm, by variable', '‖W‖ before the update.'), text: formatValue };

/** The fraction of exact zeros in the gradient of each variable. */
const ZEROS = {
  field: 'zeros',
  figure: 'update-map',
  title: 'Zeros in the gradient of each variable',
  choice: 'Zeros in the gradient, by variable',
  about: 'Fraction of exact zeros: units that are off, rows of an embedding that no example used. Orange: all of it.',
  range: [0, 1],
  labels: { 0: '0', 0.5: '50 %', 1: '100 %' },
  size: (share) => share,
  position: (share) => 0.5 + 0.5 * share,
  text: (share) => `${formatValue(100 * share)} % of the gradient is exactly 0`,
};

/** What the map of layers can show; all but the first are read when somebody asks for them. */
export const MEASURES = [UPDATES, RATIO, GRADIENT, WEIGHT, ZEROS];

/** The share of units that put out 0 for every example. */
export const DEAD = {
  field: 'dead',
  figure: 'dead-map',
  title: 'Dead units',
  about: 'Share of a layer\'s units that put out 0 for every example. Neutral: none. Orange: all of them.',
  range: [0, 1],
  labels: { 0: '0', 0.5: '50 %', 1: '100 %' },
  size: (share) => share,
  position: (share) => 0.5 + 0.5 * share,
  text: (share) => `${formatValue(100 * share)} % of the units are dead`,
};

export class LayerMap {
  /** `kind`: one of the above. `actions.show(run, layer, step)`: the time steps or positions of a layer. */
  constructor(kind, tooltip, actions) {
    this.kind = kind;
    this.tooltip = tooltip;
    this.actions = actions;
    this.maps = [];
    this.bar = el('canvas', { 'aria-hidden': 'true' });
    this.row = el('div', { class: 'layer-maps' });
    this.title = el('h2', {}, kind.title);
    this.about = el('p', { class: 'muted' }, kind.about);
    this.node = el('section', { class: `layer-section ${kind.field}`, hidden: true },
      this.title, this.about, this.bar, this.row);
  }

  /** `runs`: those whose overview has the numbers. */
  update(runs, catalogue) {
    this.show(runs.map((item) => ({ ...item, table: item.overview[this.kind.field] })).filter(({ table }) => table), catalogue);
  }

  /** `runs`: as `update`, each with its `table`. */
  show(runs, catalogue) {
    this.node.hidden = runs.length === 0;
    const signature = JSON.stringify([this.kind.field, runs.map(({ run, colour, overview }) => [run, colour, overview.version])]);
    if (signature === this.signature) return;
    this.signature = signature;
    this.title.textContent = this.kind.title;
    this.about.textContent = this.kind.about;
    this.node.dataset.shown = this.kind.field;
    const values = runs.flatMap(({ table }) => table.values.flat());
    this.largest = values.reduce((best, value) => (value !== null && value > best ? value : best), 0);
    this.maps = runs.map((item) => this.makeMap(item, catalogue));
    this.row.replaceChildren(...this.maps.map(({ node }) => node));
    if (this.colours) this.draw(this.colours);
  }

  makeMap({ run, name, colour, table }, catalogue) {
    const lead = table.layers.map((path) => catalogue.layerOfPath(run, path));
    const canvas = el('canvas', { role: 'img', 'aria-label': this.summary(table) });
    const map = { run, canvas, lead, table };
    const names = table.layers.map((path, i) => (lead[i] === undefined ? el('span', { title: path }, path)
      : el('button', { type: 'button', class: 'quiet', title: `${path}: show its time steps or positions`,
        onclick: () => this.actions.show(run, lead[i], null) }, path)));
    canvas.addEventListener('pointermove', (event) => this.hover(event, map));
    canvas.addEventListener('pointerleave', () => this.tooltip.hide());
    canvas.addEventListener('click', (event) => this.click(event, map));
    map.node = el('figure', { class: `layer-map ${this.kind.figure}`, data: { run } },
      el('figcaption', {}, el('span', { class: 'swatch', style: { background: colour } }),
        el('span', { class: 'run-name', title: run }, name)),
      el('div', { class: 'layer-rows' }, el('div', { class: 'layer-names' }, ...names),
        el('div', { class: 'layer-area' }, canvas)));
    return map;
  }

  draw(colours) {
    this.colours = colours;
    if (this.node.hidden || !this.node.clientWidth) return;
    drawLegend(prepareCanvas(this.bar, 300, 30), this.kind, colours);
    for (const map of this.maps) drawMap(map, this.kind, this.largest, map.canvas.parentElement.clientWidth, colours);
  }

  /** {layer index, row index} under the pointer, or null. */
  locate(event, { canvas, table, x }) {
    const area = canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - area.top) / ROW);
    if (!x || layer < 0 || layer >= table.layers.length) return null;
    const step = x.invert(event.clientX - area.left);
    const distances = table.steps.map((other) => Math.abs(other - step));
    return { layer, row: distances.indexOf(Math.min(...distances)) };
  }

  hover(event, map) {
    const place = this.locate(event, map);
    if (!place) {
      this.tooltip.hide();
      return;
    }
    const value = map.table.values[place.layer][place.row];
    const text = value === null ? 'not measured, or not finite' : this.kind.text(value);
    this.tooltip.show([text, `${map.table.layers[place.layer]}, step ${formatStep(map.table.steps[place.row])}`],
      event.clientX, event.clientY);
  }

  click(event, map) {
    const place = this.locate(event, map);
    if (!place || map.lead[place.layer] === undefined) return;
    this.tooltip.hide();
    this.actions.show(map.run, map.lead[place.layer], map.table.steps[place.row]);
  }

  /** The map in words: each layer with the median of its later half. */
  summary({ layers, values }) {
    return layers.map((layer, i) => {
      const later = values[i].slice(values[i].length >> 1).filter((value) => value !== null).sort((a, b) => a - b);
      return `${layer}: ${later.length ? this.kind.text(later[later.length >> 1]) : 'not measured'}`;
    }).join('; ');
  }
}

function drawMap(map, kind, largest, width, colours) {
  const { steps, values, layers } = map.table;
  const height = layers.length * ROW;
  const context = prepareCanvas(map.canvas, width, height + AXIS);
  const points = mapPoints(!kind.sequential, colours.dark);
  const edges = steps.map((step, i) => (i ? (steps[i - 1] + step) / 2 : step - ((steps[1] ?? step + 1) - step) / 2));
  edges.push(steps[steps.length - 1] + (steps[steps.length - 1] - edges[edges.length - 1]));
  map.x = linear(edges[0], edges[edges.length - 1], 0, width - PADDING);
  drawHatching(context, 0, 0, width - PADDING, height, colours);
  values.forEach((row, i) => row.forEach((value, j) => {
    if (value === null) return;
    const size = kind.size(value, largest);
    context.fillStyle = size === null ? SPECIAL[colours.dark ? 'dark' : 'light'].zero
      : `rgb(${colourAt(points, kind.position(size)).join(' ')})`;
    const left = map.x(edges[j]);
    context.fillRect(left, i * ROW, Math.max(1, map.x(edges[j + 1]) - left + 0.4), ROW - 1);
  }));
  context.strokeStyle = colours.line;
  context.strokeRect(0.5, 0.5, width - PADDING - 1, height - 1);
  const list = ticks(...map.x.domain, Math.max(2, Math.floor(width / 80)), true).map((at) => ({ at, label: shortStep(at) }));
  drawXAxis(context, map.x, list, height + 1, colours, { right: width });
}

function drawLegend(context, kind, colours) {
  const { range, labels, position } = kind;
  const points = mapPoints(!kind.sequential, colours.dark);
  const scale = linear(...range, 12, 288);
  for (let pixel = 12; pixel < 288; pixel++) {
    context.fillStyle = `rgb(${colourAt(points, position(scale.invert(pixel))).join(' ')})`;
    context.fillRect(pixel, 0, 1.5, 10);
  }
  context.strokeStyle = colours.line;
  context.strokeRect(11.5, 0.5, 277, 10);
  const list = Object.entries(labels).map(([at, label]) => ({ at: Number(at), label })).sort((a, b) => a.at - b.at);
  drawXAxis(context, scale, list, 10, colours, { right: 300 });
}
