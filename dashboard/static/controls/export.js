// Taking pictures and numbers away.

import { fitText, FONT, SMALL_FONT } from '../draw/axes.js';
import { address } from '../data/api.js';
import { SPECIAL } from '../draw/colours.js';
import { el } from '../draw/dom.js';
import { AXIS_WIDTH, drawStepAxis } from '../views/grid.js';
import { drawHeatmap, plotBox, scales } from '../draw/heatmap.js';
import { drawBar } from './legend.js';
import { drawProfile } from '../views/profile.js';
import { honesty, rangeTitle, timeTitle } from '../draw/units.js';

const SCALE = 2;
const EDGE = 20;
const HEAD = 64;
const CAPTION = 20;
const PROFILE_HEIGHT = 260;
const NAME_FONT = '500 12px Roboto, "Segoe UI", system-ui, sans-serif';
const LAYER_FONT = '600 14px Roboto, "Segoe UI", system-ui, sans-serif';

export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  el('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Letters that every file system takes. */
export function fileName(...parts) {
  return parts.filter(Boolean).join('-').replace(/[^\p{L}\p{N}._-]+/gu, '_').slice(0, 150);
}

export function downloadCsv(spec) {
  const url = address('csv', { run: spec.run, tag: spec.series.tag });
  el('a', { href: url, download: `${fileName(spec.run, spec.series.tag)}.csv` }).click();
}

/** Draws the whole grid, its colour bar and the profile (if that is shown) into one picture, twice screen size. */
export function renderPng(grid, frame, profile) {
  const sections = [...grid.sections.values()];
  const columns = Math.max(...sections.map(({ tiles }) => tiles.length));
  const tileWidth = Math.max(280, Math.min(420, grid.tiles[0]?.width ?? 300));
  const width = 2 * EDGE + AXIS_WIDTH + columns * (tileWidth + 12);
  const sectionHeight = 28 + CAPTION + grid.height + 34;
  const height = HEAD + sections.length * sectionHeight + (profile ? PROFILE_HEIGHT + 20 : 0) + EDGE;
  const canvas = document.createElement('canvas');
  canvas.width = width * SCALE;
  canvas.height = height * SCALE;
  const context = canvas.getContext('2d');
  const at = (x, y, draw) => {
    context.save();
    context.setTransform(SCALE, 0, 0, SCALE, x * SCALE, y * SCALE);
    draw();
    context.restore();
  };
  at(0, 0, () => {
    context.fillStyle = frame.colours.surface;
    context.fillRect(0, 0, width, height);
  });
  at(EDGE, EDGE - 4, () => drawHead(context, frame, width - 2 * EDGE));
  sections.forEach((section, index) => {
    const top = HEAD + index * sectionHeight;
    at(EDGE, top, () => text(context, section.layer, 0, 18, LAYER_FONT, frame.colours.text));
    at(EDGE, top + 28 + CAPTION, () => drawStepAxis(context, frame, grid.height));
    section.tiles.forEach((tile, i) => {
      const left = EDGE + AXIS_WIDTH + i * (tileWidth + 12);
      at(left, top + 28, () => {
        context.font = NAME_FONT;
        text(context, fitText(context, tile.spec.run, tileWidth - 20), 0, 12, NAME_FONT, frame.colours.text);
      });
      at(left, top + 28 + CAPTION, () => {
        drawHeatmap(context, tile.picture, frame, tileWidth, grid.height, SCALE);
        drawMarks(context, frame, tileWidth, grid.height);
      });
      at(left, top + 28 + CAPTION + grid.height, () => {
        context.font = SMALL_FONT;
        const note = tile.picture ? fitText(context, honesty(tile.picture), tileWidth - 10) : '';
        text(context, note, 0, 14, SMALL_FONT, frame.colours.muted);
      });
    });
  });
  const below = HEAD + sections.length * sectionHeight;
  if (profile) at(EDGE, below, () => drawNamedProfile(context, profile, width - 2 * EDGE, frame));
  return new Promise((resolve) => canvas.toBlob(resolve, 'image/png'));
}

function drawHead(context, frame, width) {
  const title = `${rangeTitle(frame.view)}, by ${timeTitle(frame.view)} and training step`;
  text(context, title, 0, 8, NAME_FONT, frame.colours.text);
  context.save();
  context.transform(1, 0, 0, 1, 0, 18);
  drawBar(context, frame, Math.min(420, width - 230));
  context.restore();
  const special = SPECIAL[frame.colours.dark ? 'dark' : 'light'];
  let left = Math.min(420, width - 230) + 16;
  const nothing = frame.view.mode === 'relative' ? 'vanished' : 'exactly 0';
  for (const [kind, label] of [['nan', 'NaN'], ['inf', 'Inf'], ['zero', nothing]]) {
    context.fillStyle = special[kind];
    context.fillRect(left, 19, 10, 10);
    text(context, label, left + 14, 28, FONT, frame.colours.muted);
    left += 34 + context.measureText(label).width;
  }
}

/** The chosen training step, and the pinned one dashed, as on the screen. */
function drawMarks(context, frame, width, height) {
  const box = plotBox(width, height);
  const { y } = scales(frame, box);
  for (const [step, dash] of [[frame.view.step, []], [frame.view.pinned, [4, 3]]]) {
    if (step === null || step < frame.steps[0] || step > frame.steps[1]) continue;
    for (const [colour, thickness, dashes] of [['#0008', 3, []], ['#fff', 1.5, dash]]) {
      context.strokeStyle = colour;
      context.lineWidth = thickness;
      context.setLineDash(dashes);
      context.beginPath();
      context.moveTo(box.x, y(step));
      context.lineTo(box.x + box.width, y(step));
      context.stroke();
    }
  }
  context.setLineDash([]);
}

function drawNamedProfile(context, profile, width, frame) {
  let left = 66;
  for (const curve of profile.curves) {
    const label = `${curve.run}, step ${curve.step}${curve.pinned ? ' (dashed)' : ''}`;
    context.fillStyle = profile.context.runColour(curve.run);
    context.fillRect(left, 4, 14, 3);
    text(context, label, left + 20, 10, FONT, frame.colours.text);
    left += 40 + context.measureText(label).width;
  }
  context.save();
  context.transform(1, 0, 0, 1, 0, 16);
  drawProfile(context, profile, width, PROFILE_HEIGHT - 16);
  context.restore();
}

function text(context, content, x, y, font, colour) {
  context.font = font;
  context.fillStyle = colour;
  context.textAlign = 'left';
  context.textBaseline = 'alphabetic';
  context.fillText(content, x, y);
}
