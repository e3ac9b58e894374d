// The grid of heat maps, a section per layer and a column per run, with one y axis per section.

import { drawVerticalTitle, drawYAxis, linear } from '../draw/axes.js';
import { el, prepareCanvas } from '../draw/dom.js';
import { MARGIN, plotBox } from '../draw/heatmap.js';
import { shortStep, ticks } from '../draw/numbers.js';
import { meanOf, percent } from './health.js';
import { describeLosses, drawLosses, LOSS_KEY, LOSS_WIDTH, pointsOf } from './losses.js';
import { Tile } from './tile.js';
import { timeTitle } from '../draw/units.js';

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
      const all = view.tiles.filter((spec) => spec.layer === layer);
      const specs = all.filter((spec) => spec.series);
      showMissing(section.missing, all.filter((spec) => !spec.series), view);
      while (section.tiles.length > specs.length) section.tiles.pop().node.remove();
      while (section.tiles.length < specs.length) {
        const tile = new Tile(this.handlers);
        section.tiles.push(tile);
        section.row.append(tile.node);
      }
      specs.forEach((spec, i) => section.tiles[i].describe(spec, runColour(spec.run)));
      section.row.style.gridTemplateColumns = `${AXIS_WIDTH}px repeat(${specs.length}, minmax(170px, 1fr)) ${LOSS_WIDTH}px`;
      section.row.append(section.losses.node); // behind the tiles
      const direction = specs.find((spec) => spec.series?.direction)?.series.direction;
      section.subtitle.textContent = [view.about.label, direction].filter(Boolean).join(' · ');
    });
  }

  makeSection(layer) {
    const axis = el('canvas', { class: 'y-axis', 'aria-hidden': 'true' });
    const canvas = el('canvas', { role: 'img', 'aria-label': 'No loss is known yet' });
    const losses = { canvas, node: el('figure', { class: 'losses' },
      el('figcaption', { title: LOSS_KEY }, 'loss ', el('span', { class: 'muted' }, '○eval ×skip ▸clip')), canvas) };
    const row = el('div', { class: 'tiles' }, axis, losses.node);
    const missing = el('p', { class: 'missing', hidden: true });
    const acted = el('p', { class: 'missing acted', hidden: true });
    const subtitle = el('span', { class: 'subtitle' });
    const node = el('section', { class: 'layer', data: { layer } },
      el('h2', {}, el('span', {}, layer), subtitle), row, acted, missing);
    return { missing, acted, node, row, axis, subtitle, losses, tiles: [], layer };
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
      this.drawLosses(section);
    }
  }

  /** `losses`: [{run, name, colour, overview}] of the chosen runs, as far as they are known. */
  showLosses(losses) {
    this.losses = losses;
    for (const section of this.sections.values()) showActed(section, losses);
    if (this.frame) for (const section of this.sections.values()) if (!section.dirty) this.drawLosses(section);
  }

  drawLosses({ losses }) {
    drawLosses(prepareCanvas(losses.canvas, LOSS_WIDTH, this.height), this.losses ?? [], this.frame, LOSS_WIDTH, this.height);
    losses.canvas.setAttribute('aria-label', describeLosses(this.losses ?? []) || 'No loss is known yet');
  }

  /** Moves the lines of the chosen and the pinned step; nothing else changes. */
  mark(step, pinned) {
    for (const tile of this.tiles) {
      if (!tile.scales) continue;
      tile.frame.view = { ...tile.frame.view, step, pinned };
      tile.mark('chosen', step);
      tile.mark('pinned', pinned);
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

/** How often the actions on time steps changed the gradient of a layer, run by run. */
function showActed({ acted, tiles }, losses) {
  const said = tiles.flatMap(({ spec }) => {
    const curve = losses.find(({ run }) => run === spec.run)?.overview.acted?.[spec.series.layer];
    const points = curve ? pointsOf(curve) : [];
    return points.length ? [`${spec.name}: ${percent(points[points.length - 1][1])} in the last probed update, `
      + `${percent(meanOf(curve))} on average`] : [];
  });
  acted.hidden = said.length === 0;
  acted.textContent = `Share of the (example, time step) pairs that timestep_actions changed. ${said.join('; ')}.`;
}

/** One line in place of the tiles that would be empty. */
function showMissing(line, specs, view) {
  line.hidden = specs.length === 0;
  const names = specs.map((spec) => spec.run).join(', ');
  line.textContent = view.baseline !== null && specs.some((spec) => spec.logged)
    ? `The baseline ${view.baseline} did not log this layer: no difference for ${names}.` : `Not logged in ${names}.`;
}

export function drawStepAxis(context, frame, height) {
  const box = plotBox(100, height);
  const scale = linear(frame.steps[0], frame.steps[1], box.y + box.height, box.y);
  const list = ticks(frame.steps[0], frame.steps[1], Math.max(3, Math.floor(box.height / 36)), true)
    .map((at) => ({ at, label: shortStep(at) }));
  drawYAxis(context, scale, list, AXIS_WIDTH - MARGIN.left - 1, frame.colours);
  drawVerticalTitle(context, 'training step', 8, box.y + box.height / 2, frame.colours);
}
