// The profile: values over t at the chosen training step, runs overlaid; the pinned step is dashed.

import { drawVerticalTitle, drawXAxis, drawYAxis, FONT, linear } from '../draw/axes.js';
import { SPECIAL } from '../draw/colours.js';
import { el, prepareCanvas } from '../draw/dom.js';
import { formatStep, formatValue } from '../draw/numbers.js';
import { fetchRow, normalise, place, relative } from '../data/rows.js';
import { rangeTicks, timeText, timeTicks, timeTitle, unitOf } from '../draw/units.js';

const GHOSTS = 6; // earlier steps of a trail
const HORIZON = -2; // log10 of the 1 % that still counts as arriving
const LOWEST = -8; // relative curves below it run along the bottom: one vanished run must not flatten the others
const COMPANION = { state: ['steered', 'after steering'], steered: ['state', 'before steering'] };
const MARGIN = { top: 8, right: 14, bottom: 36, left: 62 };

export class Profile {
  text = 'Profile';
  title = 'Values over time at one training step, runs overlaid';

  constructor(tooltip, onColumn) {
    this.tooltip = tooltip;
    this.onColumn = onColumn;
    this.curves = [];
    this.ghosts = [];
    this.canvas = el('canvas', { role: 'img', 'aria-label': 'No profile is known yet' });
    this.line = el('div', { class: 'cross cross-column', hidden: true });
    this.message = el('div', { class: 'panel-message', hidden: true });
    this.key = el('div', { class: 'chart-key' });
    this.area = el('div', {
      class: 'chart-area', onpointermove: (event) => this.hover(event),
      onpointerleave: () => { this.tooltip.hide(); this.showColumn(null); this.onColumn(null); },
    }, this.canvas, this.line);
    this.node = el('div', { class: 'panel panel-column' }, this.key, this.area, this.message);
  }

  /** Fetches the rows of `context` ({view, layer, catalogue, chosen, pinned, runColour, maxTime, isCurrent}). */
  async load(context) {
    const { view, layer, catalogue, chosen, pinned } = context;
    const wanted = view.runs.flatMap((run) => {
      const found = catalogue.find(run, layer, view.quantity);
      if (!found) return [];
      const steps = pinned === null ? [chosen] : [chosen, pinned];
      const [quantity, note] = COMPANION[view.quantity] ?? [];
      const other = quantity && catalogue.find(run, layer, quantity);
      return [...steps.map((step, i) => ({ series: { ...found, run }, step, pinned: i === 1, note: '' })),
        ...(other ? [{ series: { ...other, run }, step: chosen, pinned: true, note, beside: { ...found, run } }] : [])];
    });
    const curves = await Promise.all(wanted.map(async ({ series, step, pinned: isPinned, note, beside }) => {
      const row = await fetchRow(series, step);
      const change = { normalised: normalise, relative }[view.mode];
      // Before and after steering are divided by the same number: what an action did is their distance.
      const scale = beside && change ? (await fetchRow(beside, step)).cells : row.cells;
      const cells = change ? change(row.cells, scale) : row.cells;
      const placed = place(cells, view.align, context.maxTime);
      return { run: series.run, step: row.step, pinned: isPinned, cells: placed, series, note };
    }));
    if (!context.isCurrent()) return;
    // While training is played or scrubbed through, the curves before stay as a trail.
    const before = this.curves.filter((curve) => !curve.pinned);
    this.ghosts = context.trail ? [...before, ...this.ghosts].slice(0, GHOSTS * Math.max(1, view.runs.length)) : [];
    this.context = context;
    this.curves = curves;
    this.keys = curves.map((curve) => el('i', { class: curve.pinned ? 'stroke dashed' : 'stroke' }));
    this.key.replaceChildren(...curves.map(({ run, step, note }, i) => el('span', { title: run }, this.keys[i],
      [context.shortName(run), `step ${formatStep(step)}`, note].filter(Boolean).join(', '))));
  }

  draw(colours) {
    this.colours = colours;
    if (!this.context) return;
    this.curves.forEach((curve, i) => { this.keys[i].style.color = this.context.runColour(curve.run); });
    const [width, height] = [this.area.clientWidth, this.area.clientHeight];
    if (!width || !height) return;
    this.message.hidden = this.curves.length > 0;
    this.message.textContent = 'This quantity was not logged for this layer.';
    this.x = drawProfile(prepareCanvas(this.canvas, width, height), this, width, height);
    this.canvas.setAttribute('aria-label', this.describe());
  }

  describe() {
    return this.curves.map((curve) => {
      const numbers = curve.cells.filter(({ kind }) => kind === 'number').map(({ value }) => value);
      const [low, high] = [Math.min(...numbers), Math.max(...numbers)].map(formatValue);
      const range = numbers.length ? `from ${low} to ${high}` : 'no numbers';
      return `${[curve.run, curve.note].filter(Boolean).join(' ')} at step ${formatStep(curve.step)}: ${range}`;
    }).join('; ');
  }

  hover(event) {
    if (!this.context || !this.curves.length || !this.x) return;
    const area = this.area.getBoundingClientRect();
    const column = Math.floor(this.x.invert(event.clientX - area.left));
    const [first, last] = this.context.time;
    if (column < first || column >= last) {
      this.tooltip.hide();
      return;
    }
    this.showColumn(column);
    this.onColumn(column);
    this.tooltip.show(this.explain(column), event.clientX, event.clientY);
  }

  explain(column) {
    const { view, maxTime, runColour } = this.context;
    const lines = this.curves.map((curve) => {
      const cell = curve.cells[column];
      const value = { number: formatValue(cell.value), zero: '0', nan: 'NaN', inf: 'Inf', padding: '–' }[cell.kind];
      const about = [curve.run, `step ${formatStep(curve.step)}`, curve.note].filter(Boolean).join(', ');
      return { text: `${value}   ${about}`, colour: runColour(curve.run) };
    });
    return [timeText(column, view, maxTime, this.curves[0].series.time_shape), ...lines];
  }

  showColumn(column) {
    this.line.hidden = column === null || !this.x || column + 0.5 < this.x.domain[0] || column + 0.5 > this.x.domain[1];
    if (this.line.hidden) return;
    Object.assign(this.line.style, { left: `${this.x(column + 0.5)}px`, top: `${MARGIN.top}px`,
      height: `${this.area.clientHeight - MARGIN.top - MARGIN.bottom}px` });
  }

  /** The curves as CSV: a line per time step, a column per run and step. */
  csv() {
    const { view, maxTime } = this.context;
    const time = view.align === 'end' ? 'steps_back' : 't';
    const header = [time, ...this.curves.map((curve) => [`${curve.run} @ ${curve.step}`, curve.note].filter(Boolean).join(' '))];
    const text = {
      number: ({ value }) => String(value),
      zero: () => '0',
      nan: () => 'nan',
      inf: ({ value }) => (value < 0 ? '-inf' : 'inf'),
      padding: () => '',
    };
    const lines = Array.from({ length: maxTime }, (_, column) => [
      view.align === 'end' ? maxTime - 1 - column : column,
      ...this.curves.map((curve) => text[curve.cells[column].kind](curve.cells[column]))]);
    return [header.map(quote), ...lines].map((fields) => fields.join(',')).join('\n') + '\n';
  }
}

/** A field that a spreadsheet takes for text, whatever a run is called. */
function quote(field) {
  const text = /^[=+\-@\t\r]/.test(field) ? `'${field}` : String(field);
  return `"${text.replaceAll('"', '""')}"`;
}

/** Draws on any context, for the screen and for the exported picture. Returns the scale of the time steps. */
export function drawProfile(context, profile, width, height) {
  const { view, maxTime, runColour, time } = profile.context;
  const { curves, colours, ghosts } = profile;
  const unit = unitOf({ ...view, mode: 'absolute' });
  const numbers = [...curves, ...ghosts].flatMap((curve) => curve.cells
    .filter(({ kind, value }) => kind === 'number' && (unit === 'share' || value > 0))
    .map(({ value }) => (unit === 'share' ? value : Math.log10(value))));
  let [low, high] = unit === 'share' ? [0, 1] : [Infinity, -Infinity];
  for (const number of numbers) [low, high] = [Math.min(low, number), Math.max(high, number)];
  if (!numbers.length) [low, high] = [-1, 0];
  if (view.quantity === 'gain' || view.mode === 'normalised') [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (view.mode === 'relative') [low, high] = [Math.max(Math.min(low, HORIZON), LOWEST), Math.max(0, high)];
  const pad = Math.max((high - low) * 0.06, 0.02);
  const bottom = height - MARGIN.bottom;
  const x = linear(...time, MARGIN.left, width - MARGIN.right);
  const y = linear(low - pad, high + pad, bottom, MARGIN.top);
  const yTicks = rangeTicks(y.domain, unit, Math.max(2, Math.floor((bottom - MARGIN.top) / 34)));
  context.fillStyle = colours.grid;
  const inner = width - MARGIN.left - MARGIN.right;
  for (const { at } of yTicks) context.fillRect(MARGIN.left, Math.round(y(at)) - 0.5, inner, 1);
  drawYAxis(context, y, yTicks, MARGIN.left, colours);
  const xTicks = timeTicks(view, maxTime, Math.max(2, Math.floor(width / 90)), time);
  drawXAxis(context, x, xTicks, bottom, colours, { right: width });
  context.strokeStyle = colours.line;
  context.strokeRect(MARGIN.left - 0.5, MARGIN.top - 0.5, inner + 1, bottom - MARGIN.top + 1);
  context.font = FONT;
  context.fillStyle = colours.muted;
  context.textAlign = 'center';
  context.textBaseline = 'alphabetic';
  context.fillText(timeTitle(view), (MARGIN.left + width - MARGIN.right) / 2, height - 5);
  const title = { normalised: 'relative to the last step', relative: 'relative to the largest' }[view.mode]
    ?? view.about.label;
  drawVerticalTitle(context, title, 10, (MARGIN.top + bottom) / 2, colours);
  if (view.quantity === 'gain' || view.mode === 'normalised') drawUnity(context, y(0), width, colours);
  if (view.mode === 'relative') drawUnity(context, y(HORIZON), width, colours);
  context.save();
  context.beginPath();
  context.rect(MARGIN.left, 0, inner, bottom + 1);
  context.clip();
  ghosts.forEach((curve, i) => {
    context.globalAlpha = 0.45 * (1 - i / ghosts.length);
    drawCurve(context, { ...curve, ghost: true }, x, y, unit, runColour(curve.run), colours, bottom);
  });
  context.globalAlpha = 1;
  // Pinned curves lie below the chosen ones.
  for (const curve of [...curves].sort((a, b) => b.pinned - a.pinned)) {
    drawCurve(context, curve, x, y, unit, runColour(curve.run), colours, bottom);
  }
  context.restore();
  return x;
}

function drawUnity(context, y, width, colours) {
  context.save();
  context.strokeStyle = colours.muted;
  context.setLineDash([2, 3]);
  context.beginPath();
  context.moveTo(MARGIN.left, Math.round(y) - 0.5);
  context.lineTo(width - MARGIN.right, Math.round(y) - 0.5);
  context.stroke();
  context.restore();
}

/** A line through the numbers; zeros sit at the bottom, NaN and Inf are flagged at the top. */
function drawCurve(context, curve, x, y, unit, colour, colours, bottom) {
  context.save();
  context.strokeStyle = colour;
  context.fillStyle = colour;
  context.lineWidth = curve.ghost ? 1 : curve.pinned ? 1.3 : 1.8;
  if (curve.pinned) context.globalAlpha = 0.85;
  context.lineJoin = 'round';
  context.setLineDash(curve.pinned ? [5, 4] : []);
  context.beginPath();
  let drawing = false;
  const special = SPECIAL[colours.dark ? 'dark' : 'light'];
  curve.cells.forEach((cell, column) => {
    const isNumber = cell.kind === 'number' && (unit === 'share' || cell.value > 0);
    if (isNumber || (cell.kind === 'zero' && unit === 'share')) {
      const at = Math.min(bottom, y(unit === 'share' ? cell.value : Math.log10(cell.value)));
      if (drawing) context.lineTo(x(column + 0.5), at);
      else {
        context.moveTo(x(column + 0.5), at);
        const next = curve.cells[column + 1]?.kind;
        if (next !== 'number') context.arc(x(column + 0.5), at, 1.2, 0, 7);
      }
      drawing = true;
      return;
    }
    drawing = false;
    const [left, size] = [x(column), Math.max(1.5, x(column + 1) - x(column))];
    if (curve.ghost) return;
    if (cell.kind === 'nan' || cell.kind === 'inf') {
      context.fillStyle = special[cell.kind];
      context.fillRect(left, MARGIN.top, size, 5);
    } else if (cell.kind === 'zero') {
      context.fillStyle = colour;
      context.fillRect(left, bottom - 3, size, 3);
    }
  });
  context.stroke();
  context.restore();
}
