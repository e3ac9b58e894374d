// The grid of heat maps, a section per layer and a column per run, with one y axis per section.

import { drawVerticalTitle, drawYAxis, linear } from './axes.js';
import { el, prepareCanvas } from './dom.js';
import { MARGIN, plotBox } from './heatmap.js';
import { shortStep, ticks } from './numbers.js';
import { Tile } from './tile.js';
import { timeTitle } from './units.js';

export const AXIS_WIDTH = 62;
const [MIN_HEIGHT, MAX_HEIGHT] = [130, 420];
const CAPTION_HEIGHT = 108; // a section's titles and notes

export class Grid {
  /** `handlers` as in `Tile`, without `hover`; `onHover(explanation | null)` for the tooltip. */
  constructor(handlers, onHover) {
    this.node = el('div', { class: 'grid' });
    this.sections = new Map();
    this.handlers = { ...handlers, hover: (tile, place) => this.hover(tile, place) };
    this.onHover = onHover;
  }

  get tiles() {
    return [...this.sections.values()].flatMap((section) => section.tiles);
  }

  /** Makes the page's sections and tiles those of `view`, reusing what is there: a refresh must not flicker. */
  arrange(view, runColour) {
    const wanted = new Set(view.layers);
    for (const [layer, section] of this.sections) {
      if (!wanted.has(layer)) {
        section.node.remove();
        this.sections.delete(layer);
      }
    }
    view.layers.forEach((layer, index) => {
      if (!this.sections.has(layer)) this.sections.set(layer, this.makeSection(layer));
      const section = this.sections.get(layer);
      const present = this.node.children[index] ?? null;
      if (present !== section.node) this.node.insertBefore(section.node, present);
      const specs = view.tiles.filter((spec) => spec.layer === layer);
      while (section.tiles.length > specs.length) section.tiles.pop().node.remove();
      while (section.tiles.length < specs.length) {
        const tile = new Tile(this.handlers);
        section.tiles.push(tile);
        section.row.append(tile.node);
      }
      specs.forEach((spec, i) => section.tiles[i].describe(spec, runColour(spec.run)));
      section.row.style.gridTemplateColumns = `${AXIS_WIDTH}px repeat(${specs.length}, minmax(170px, 1fr))`;
      const direction = specs.find((spec) => spec.series?.direction)?.series.direction;
      section.subtitle.textContent = [view.about.label, direction].filter(Boolean).join(' · ');
    });
  }

  makeSection(layer) {
    const axis = el('canvas', { class: 'y-axis', 'aria-hidden': 'true' });
    const row = el('div', { class: 'tiles' }, axis);
    const subtitle = el('span', { class: 'subtitle' });
    const node = el('section', { class: 'layer', data: { layer } },
      el('h2', {}, el('span', {}, layer), subtitle), row);
    return { node, row, axis, subtitle, tiles: [], layer };
  }

  /** The height of a plot: what the window has, shared among the sections, within reason. */
  plotHeight(available) {
    const each = available / Math.max(1, this.sections.size) - CAPTION_HEIGHT;
    return Math.round(Math.max(MIN_HEIGHT, Math.min(MAX_HEIGHT, each)));
  }

  draw(frame, available) {
    this.frame = frame;
    this.height = this.plotHeight(available);
    for (const section of this.sections.values()) {
      section.dirty = true;
      section.node.dataset.timeTitle = timeTitle(frame.view);
      for (const tile of section.tiles) tile.plot.style.height = `${this.height}px`;
    }
    this.drawVisible();
  }

  /** Draws the sections that can be seen; the others when they are scrolled to. A model may have fifty layers. */
  drawVisible() {
    for (const section of this.sections.values()) {
      const { top, bottom } = section.node.getBoundingClientRect();
      if (!section.dirty || bottom < 0 || top > window.innerHeight) continue;
      section.dirty = false;
      drawStepAxis(prepareCanvas(section.axis, AXIS_WIDTH, this.height), this.frame, this.height);
      for (const tile of section.tiles) tile.draw(this.frame, this.height);
    }
  }

  hover(tile, place) {
    for (const other of this.tiles) other.cross(place);
    const lines = place && tile.explain(place);
    this.onHover(lines ? { lines, place, tile } : null);
  }

  cross(place) {
    for (const tile of this.tiles) tile.cross(place);
  }
}

export function drawStepAxis(context, frame, height) {
  const box = plotBox(100, height);
  const scale = linear(frame.steps[0], frame.steps[1], box.y + box.height, box.y);
  const list = ticks(frame.steps[0], frame.steps[1], Math.max(3, Math.floor(box.height / 36)), true)
    .map((at) => ({ at, label: shortStep(at) }));
  drawYAxis(context, scale, list, AXIS_WIDTH - MARGIN.left - 1, frame.colours);
  drawVerticalTitle(context, 'training step', 8, box.y + box.height / 2, frame.colours);
}
