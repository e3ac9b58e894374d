// Drawing one heat map: pixels, strip of non-finite rows, frame and x axis. Screen and export use the same code.

import { drawHatching, drawXAxis, linear } from './axes.js';
import { codeColours, SPECIAL } from './colours.js';
import { CODES, paint } from '../data/picture.js';
import { timeTicks } from './units.js';

export const MARGIN = { top: 1, right: 15, bottom: 22, left: 1 };
const STRIP_WIDTH = 8;
const HORIZON = -2; // log10 of 1 %

/**
 * What all heat maps of a page share.
 * {view, range, steps: [low, high], time: [low, high] of columns, maxTime, colours}
 */
export function plotBox(width, height) {
  return { x: MARGIN.left, y: MARGIN.top, width: Math.max(1, width - MARGIN.left - MARGIN.right),
    height: Math.max(1, height - MARGIN.top - MARGIN.bottom) };
}

export function scales(frame, box) {
  return {
    x: linear(frame.time[0], frame.time[1], box.x, box.x + box.width),
    y: linear(frame.steps[0], frame.steps[1], box.y + box.height, box.y),
  };
}

/** The column of a picture's first time step: aligned at the end, pictures of shorter sequences begin later. */
export function columnOffset(picture, frame) {
  return frame.view.align === 'end' ? frame.maxTime - picture.time : 0;
}

export function drawHeatmap(context, picture, frame, width, height, ratio) {
  const box = plotBox(width, height);
  const { x, y } = scales(frame, box);
  if (!picture || !covers(picture, frame)) drawHatching(context, box.x, box.y, box.width, box.height, frame.colours);
  if (picture && picture.rows && picture.columns) {
    context.drawImage(pixels(picture, frame, box, ratio), box.x, box.y, box.width, box.height);
    if (frame.view.mode === 'relative') drawContour(context, picture, frame, box, x, y);
    drawStrip(context, picture, frame, box, y);
  }
  context.strokeStyle = frame.colours.line;
  context.lineWidth = 1;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
  const tickCount = Math.max(2, Math.floor(box.width / 70));
  drawXAxis(context, x, timeTicks(frame.view, frame.maxTime, tickCount, frame.time), box.y + box.height + 1, frame.colours,
    { left: 0, right: box.x + box.width + 6 });
}

/** Whether a picture leaves nothing of its frame free, so that there is nothing to hatch. */
function covers(picture, frame) {
  return picture.whole && picture.time === frame.maxTime && picture.edges.from[0] <= frame.steps[0]
    && picture.edges.to[picture.rows - 1] >= frame.steps[1];
}

function pixels(picture, frame, box, ratio) {
  const canvas = document.createElement('canvas');
  canvas.width = Math.max(1, Math.round(box.width * ratio));
  canvas.height = Math.max(1, Math.round(box.height * ratio));
  const image = new ImageData(canvas.width, canvas.height);
  const colours = codeColours(picture, frame.range, frame.view.diverging, frame.colours.dark,
    frame.view.mode === 'relative');
  const step = linear(frame.steps[0], frame.steps[1], canvas.height, 0);
  const time = linear(frame.time[0], frame.time[1], 0, canvas.width);
  const offset = columnOffset(picture, frame);
  const { from, to } = picture.edges;
  const rowsAt = (pixel) => {
    const [low, high] = [step.invert(pixel + 1), step.invert(pixel)];
    const first = lowerBound(to, low);
    const last = lowerBound(from, high);
    // Where a line is taller than a pixel its neighbour would shine through at the border: the centre decides.
    if (last - first === 2 && to[first + 1] - from[first] > 2.5 * (high - low)) {
      return (low + high) / 2 < to[first] ? [first, first + 1] : [first + 1, last];
    }
    return [first, last];
  };
  const columnsAt = (pixel) => {
    const low = (time.invert(pixel) - offset) / picture.column_width;
    const high = (time.invert(pixel + 1) - offset) / picture.column_width;
    if (high - low < 1) {
      const column = Math.floor((low + high) / 2);
      return column >= 0 && column < picture.columns ? [column, column + 1] : [0, 0];
    }
    return [Math.max(0, Math.floor(low + 1e-9)), Math.min(picture.columns, Math.ceil(high - 1e-9))];
  };
  paint(picture, colours, image, rowsAt, columnsAt);
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

/** The border of what is above 1 % of its row: the horizon over training. Two strokes, to be seen on any colour. */
function drawContour(context, picture, frame, box, x, y) {
  const { codes, columns, rows, low, high, column_width: width } = picture;
  if (low === null) return;
  const limit = high > low ? CODES.first + ((HORIZON - low) / (high - low)) * (CODES.last - CODES.first) : -Infinity;
  const reached = (row, column) => {
    const code = codes[row * columns + column];
    return code >= CODES.first && code <= CODES.last && code >= limit;
  };
  const offset = columnOffset(picture, frame);
  const crisp = (place) => Math.floor(place) + 0.5; // the middle of a pixel: a thin line between two is pale
  const edge = (column) => crisp(x(Math.min(offset + column * width, frame.maxTime)));
  const path = new Path2D();
  for (let row = 0; row < rows; row++) {
    const [top, bottom] = [crisp(y(picture.edges.to[row])), crisp(y(picture.edges.from[row]))];
    for (let column = 0; column < columns; column++) {
      const here = reached(row, column);
      if (column + 1 < columns && here !== reached(row, column + 1)) {
        path.moveTo(edge(column + 1), top);
        path.lineTo(edge(column + 1), bottom);
      }
      if (row + 1 < rows && here !== reached(row + 1, column)) {
        path.moveTo(edge(column), top);
        path.lineTo(edge(column + 1), top);
      }
    }
  }
  context.save();
  context.beginPath();
  context.rect(box.x, box.y, box.width, box.height);
  context.clip();
  for (const [colour, thickness] of [['#000a', 3], ['#fff', 1.3]]) {
    context.strokeStyle = colour;
    context.lineWidth = thickness;
    context.stroke(path);
  }
  context.restore();
}

/** Rows with NaN or Inf, beside the picture, at least two pixels tall: the first thing to look for. */
function drawStrip(context, picture, frame, box, y) {
  const left = box.x + box.width + 5;
  context.fillStyle = frame.colours.grid;
  context.fillRect(left, box.y, STRIP_WIDTH, box.height);
  context.fillStyle = SPECIAL[frame.colours.dark ? 'dark' : 'light'].nan;
  for (let row = 0; row < picture.rows; row++) {
    if (!picture.nonfinite[row]) continue;
    const top = y(picture.edges.to[row]);
    const height = Math.max(2, y(picture.edges.from[row]) - top);
    context.fillRect(left, Math.max(box.y, Math.min(top, box.y + box.height - height)), STRIP_WIDTH, height);
  }
}

/** The first index whose entry is greater than `value`… in an increasing array. */
function lowerBound(array, value) {
  let [low, high] = [0, array.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
