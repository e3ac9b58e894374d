// One heat map on the page: its caption, its canvas, the lines over it, and what pointer and keys do to it.

import { button, el, prepareCanvas } from '../draw/dom.js';
import { columnOffset, drawHeatmap, plotBox, scales } from '../draw/heatmap.js';
import { formatStep } from '../draw/numbers.js';
import { honesty, readout, timeText, unitOf } from '../draw/units.js';

const DRAGGED = 6; // pixels from which on a press is a drag

/**
 * `handlers`: hover(tile, {column, step} | null), choose(step), pin(step), csv(tile), zoom({steps, time} | null).
 */
export class Tile {
  constructor(handlers) {
    this.handlers = handlers;
    this.picture = null;
    this.pending = false;
    this.request = null; // what was asked for last, so that a late answer to something else is dropped
    this.canvas = el('canvas', { 'aria-hidden': 'true' });
    this.lines = {
      column: el('div', { class: 'cross cross-column' }),
      step: el('div', { class: 'cross cross-step' }),
      chosen: el('div', { class: 'mark mark-chosen' }),
      pinned: el('div', { class: 'mark mark-pinned' }),
    };
    this.lasso = el('div', { class: 'lasso', hidden: true });
    this.message = el('div', { class: 'tile-message', hidden: true });
    this.plot = el('div', {
      class: 'plot', tabindex: '0', role: 'application', 'aria-roledescription': 'heat map',
      onpointermove: (event) => this.handlers.hover(this, this.locate(event)),
      onpointerleave: () => this.handlers.hover(this, null),
      onpointerdown: (event) => this.press(event),
      ondblclick: () => this.handlers.zoom(null),
      onclick: (event) => this.click(event),
      onkeydown: (event) => this.key(event),
      onblur: () => this.handlers.hover(this, null),
    }, this.canvas, ...Object.values(this.lines), this.lasso, this.message);
    this.swatch = el('span', { class: 'swatch' });
    this.name = el('span', { class: 'run-name' });
    this.alarm = el('button', { type: 'button', class: 'alarm', hidden: true, onclick: () => this.showNonfinite() });
    this.note = el('span', { class: 'note' });
    this.download = button('⤓', 'Download all kept rows of this heat map as CSV', () => this.handlers.csv(this),
      { 'aria-label': 'Download as CSV' });
    this.node = el('figure', { class: 'tile' },
      el('figcaption', {}, this.swatch, this.name, this.alarm, this.download), this.plot, this.note);
  }

  /** Names the tile. What it shows arrives later, by `show`. */
  describe(spec, colour) {
    this.spec = spec;
    this.node.dataset.run = spec.run;
    this.node.dataset.layer = spec.layer;
    this.name.textContent = spec.name;
    this.name.title = spec.run;
    this.swatch.style.background = colour;
    const help = 'Arrow keys move, Enter chooses the training step, P pins it, plus and minus zoom, 0 shows everything.';
    this.plot.setAttribute('aria-label', `${spec.layer}, run ${spec.run}. ${help}`);
  }

  show(picture) {
    this.picture = picture;
    this.message.hidden = picture.rows > 0;
    if (!picture.rows) this.message.textContent = picture.kept ? 'no training steps in common' : 'no rows yet';
    const bad = picture.nonfiniteRows;
    this.alarm.hidden = bad === 0;
    this.alarm.textContent = `${formatStep(bad)} NaN/Inf`;
    this.alarm.title = `${formatStep(bad)} kept rows hold a NaN or an Inf. Choose the first of them.`;
    this.note.textContent = honesty(picture);
    const perLine = picture.rows ? Math.ceil(picture.shown / picture.rows) : 1;
    this.note.title = `Up to ${perLine} kept steps to a line, and as many lines to a pixel as it takes. `
      + 'Start TensorBoard with --samples_per_plugin gradient_flow=0 to keep every row.';
    this.node.dataset.loaded = 'true';
  }

  showMessage(text) {
    this.picture = null;
    this.message.textContent = text;
    this.message.hidden = false;
    this.alarm.hidden = true;
    this.note.textContent = '';
  }

  draw(frame, height) {
    this.frame = frame;
    const width = this.plot.clientWidth;
    if (!width) return;
    [this.width, this.height] = [width, height];
    this.box = plotBox(width, height);
    this.scales = scales(frame, this.box);
    const ratio = window.devicePixelRatio || 1;
    drawHeatmap(prepareCanvas(this.canvas, width, height, ratio), this.picture, frame, width, height, ratio);
    this.mark('chosen', frame.view.step);
    this.mark('pinned', frame.view.pinned);
    this.cross(null);
  }

  mark(which, step) {
    this.place(this.lines[which], step === null ? null : this.scales.y(step), 'y');
  }

  /** Shows the cross-hair of another tile's pointer here as well. */
  cross(place) {
    if (!this.scales) return;
    this.place(this.lines.column, place ? this.scales.x(place.column + 0.5) : null, 'x');
    this.place(this.lines.step, place ? this.scales.y(place.step) : null, 'y');
  }

  place(line, at, axis) {
    const { x, y, width, height } = this.box;
    const inside = at !== null && (axis === 'x' ? at >= x && at <= x + width : at >= y - 1 && at <= y + height + 1);
    line.hidden = !inside;
    if (!inside) return;
    Object.assign(line.style, axis === 'x'
      ? { left: `${at}px`, top: `${y}px`, height: `${height}px` }
      : { top: `${at}px`, left: `${x}px`, width: `${width}px` });
  }

  locate(event) {
    if (!this.scales) return null;
    const area = this.plot.getBoundingClientRect();
    const [x, y] = [event.clientX - area.left, event.clientY - area.top];
    const { box } = this;
    if (x < box.x || x >= box.x + box.width + 14 || y < box.y || y >= box.y + box.height) return null;
    const column = Math.min(Math.ceil(this.frame.time[1]) - 1, Math.floor(this.scales.x.invert(x)));
    return { column, step: this.scales.y.invert(y), x: event.clientX, y: event.clientY };
  }

  /** What is under a place: {lines of text} for the tooltip, or null. */
  explain({ column, step }) {
    const { picture, frame } = this;
    if (!picture || !picture.rows) return null;
    const row = picture.rowAt(step);
    if (row < 0) return [`step ${formatStep(step)}`, 'nothing was logged here'];
    const time = timeText(column, frame.view, frame.maxTime, this.spec.series.time_shape);
    const { first, last, count } = picture.extent(row);
    const steps = count === 1
      ? `step ${formatStep(first)}` : `steps ${formatStep(first)} – ${formatStep(last)} (${count} rows)`;
    const inPicture = Math.floor((column - columnOffset(picture, frame)) / picture.column_width);
    const cell = inPicture >= 0 && inPicture < picture.columns ? picture.at(row, inPicture) : { kind: 'padding' };
    const lines = [readout(cell, unitOf(frame.view)), `${time}, ${steps}`];
    if (picture.nonfinite[row]) lines.push(`${picture.nonfinite[row]} of ${count} rows here with NaN/Inf`);
    return Object.assign(lines, { cell });
  }

  /** The kept training step that a place stands for: of merged rows the one with the largest value. */
  stepAt({ step }) {
    const row = this.picture?.rows ? this.picture.rowAt(step) : -1;
    return row < 0 ? null : this.picture.steps[this.picture.peaks[row]];
  }

  /** Dragging with a mouse marks a rectangle to zoom into; on a touch screen it scrolls. */
  press(event) {
    if (event.button !== 0 || event.pointerType === 'touch' || !this.picture?.rows || !this.locate(event)) return;
    const area = this.plot.getBoundingClientRect();
    const { box } = this;
    const at = ({ clientX, clientY }) => [Math.max(box.x, Math.min(box.x + box.width, clientX - area.left)),
      Math.max(box.y, Math.min(box.y + box.height, clientY - area.top))];
    const from = at(event);
    let to = from;
    const move = (moved) => {
      to = at(moved);
      const [left, top] = [0, 1].map((i) => Math.min(from[i], to[i]));
      const [width, height] = [0, 1].map((i) => Math.abs(from[i] - to[i]));
      this.lasso.hidden = width < DRAGGED || height < DRAGGED;
      Object.assign(this.lasso.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
    };
    const stop = () => {
      window.removeEventListener('pointermove', move);
      window.removeEventListener('pointerup', stop);
      this.dragged = !this.lasso.hidden;
      if (this.dragged) this.zoomTo(from, to);
      this.lasso.hidden = true;
    };
    window.addEventListener('pointermove', move);
    window.addEventListener('pointerup', stop);
  }

  /** Zooms to a rectangle of pixels, to whole time steps. */
  zoomTo(from, to) {
    const { x, y } = this.scales;
    const [left, right] = [from[0], to[0]].map((pixel) => x.invert(pixel)).sort((a, b) => a - b);
    const [first, last] = [from[1], to[1]].map((pixel) => y.invert(pixel)).sort((a, b) => a - b);
    this.handlers.zoom({ steps: [first, last], time: [Math.floor(left), Math.max(Math.floor(left) + 1, Math.ceil(right))] });
  }

  /** Makes what is shown half (factor 0.5) or twice (2) as large, about the cursor. */
  zoomBy(factor, column, step) {
    const { time, steps, maxTime } = this.frame;
    const scaled = ([low, high], centre) => [centre - (centre - low) * factor, centre + (high - centre) * factor];
    const [from, to] = scaled(time, column + 0.5);
    const columns = [Math.max(0, Math.floor(from)), Math.min(maxTime, Math.max(Math.floor(from) + 1, Math.ceil(to)))];
    this.handlers.zoom({ steps: scaled(steps, step), time: columns });
  }

  click(event) {
    if (this.dragged) {
      this.dragged = false;
      return;
    }
    const place = this.locate(event);
    const step = place && this.stepAt(place);
    if (step === null || step === undefined) return;
    if (event.shiftKey) this.handlers.pin(step);
    else this.handlers.choose(step, this);
  }

  showNonfinite() {
    const row = this.picture.nonfinite.findIndex((count) => count > 0);
    this.handlers.choose(this.picture.steps[this.picture.peaks[row]], this);
  }

  /** Arrow keys move a cross-hair over the cells, so that everything a pointer can read a keyboard can, too. */
  key(event) {
    if (!this.picture?.rows) return;
    const { picture, frame } = this;
    // The picture may have changed since the last key.
    let column = Math.min(this.cursor?.column ?? Infinity, frame.maxTime - 1);
    let row = Math.min(this.cursor?.row ?? Infinity, picture.rows - 1);
    const page = Math.max(1, Math.round(picture.rows / 10));
    const moves = {
      ArrowLeft: () => { column -= event.shiftKey ? 10 : 1; },
      ArrowRight: () => { column += event.shiftKey ? 10 : 1; },
      ArrowUp: () => { row += 1; },
      ArrowDown: () => { row -= 1; },
      PageUp: () => { row += page; },
      PageDown: () => { row -= page; },
      Home: () => { column = 0; },
      End: () => { column = frame.maxTime - 1; },
      Enter: () => this.handlers.choose(picture.steps[picture.peaks[row]], this),
      '+': () => this.zoomBy(0.5, column, picture.steps[picture.peaks[row]]),
      '-': () => this.zoomBy(2, column, picture.steps[picture.peaks[row]]),
      0: () => this.handlers.zoom(null),
      p: () => this.handlers.pin(picture.steps[picture.peaks[row]]),
      Escape: () => this.handlers.pin(null),
    };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move();
    column = Math.max(0, Math.min(frame.maxTime - 1, column));
    row = Math.max(0, Math.min(picture.rows - 1, row));
    this.cursor = { column, row };
    if (event.key === 'Escape') {
      this.handlers.hover(this, null);
      return;
    }
    const area = this.plot.getBoundingClientRect();
    const step = picture.steps[picture.peaks[row]];
    const [x, y] = [area.left + this.scales.x(column + 0.5), area.top + this.scales.y(step)];
    this.handlers.hover(this, { column, step, x, y, spoken: true });
  }
}
