// Axes and frames on a canvas, used for the screen and for the exported picture alike.

export const FONT = '11px Roboto, "Segoe UI", system-ui, sans-serif';
export const SMALL_FONT = '10px Roboto, "Segoe UI", system-ui, sans-serif';

/** A linear scale from [low, high] to pixels [from, to]; `invert` goes back. */
export function linear(low, high, from, to) {
  const factor = (to - from) / (high - low || 1);
  const scale = (value) => from + (value - low) * factor;
  scale.invert = (pixel) => low + (pixel - from) / factor;
  scale.domain = [low, high];
  return scale;
}

/** Ticks [{at, label}] below a plot, leaving out labels that would touch. */
export function drawXAxis(context, scale, tickList, y, colours, { right = Infinity, left = 0 } = {}) {
  context.font = FONT;
  context.textBaseline = 'top';
  context.textAlign = 'center';
  let edge = -Infinity;
  for (const { at, label } of tickList) {
    const x = scale(at);
    context.fillStyle = colours.line;
    context.fillRect(Math.round(x) - 0.5, y, 1, 4);
    const half = context.measureText(label).width / 2;
    const centre = Math.max(left + half, Math.min(right - half, x));
    if (centre - half < edge + 6) continue;
    context.fillStyle = colours.muted;
    context.fillText(label, centre, y + 6);
    edge = centre + half;
  }
}

/** Ticks [{at, label}] to the left of a plot. */
export function drawYAxis(context, scale, tickList, x, colours) {
  context.font = FONT;
  context.textBaseline = 'middle';
  context.textAlign = 'right';
  for (const { at, label } of tickList) {
    const y = scale(at);
    context.fillStyle = colours.line;
    context.fillRect(x - 4, Math.round(y) - 0.5, 4, 1);
    context.fillStyle = colours.muted;
    // The first and the last label stay whole at the edge of the canvas.
    context.fillText(label, x - 7, Math.max(6, y));
  }
}

/** A title along the left side, reading upwards. */
export function drawVerticalTitle(context, text, x, y, colours) {
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.font = FONT;
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  context.fillStyle = colours.muted;
  context.fillText(text, 0, 0);
  context.restore();
}

/** Diagonal hatching: "there is nothing here", which no colour of a map can say. */
export function drawHatching(context, x, y, width, height, colours) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colours.hatch;
  context.lineWidth = 1;
  context.beginPath();
  for (let offset = -height; offset < width; offset += 6) {
    context.moveTo(x + offset, y + height);
    context.lineTo(x + offset + height, y);
  }
  context.stroke();
  context.restore();
}

/** Shortens `text` to `width` pixels, keeping its end: runs tend to differ there. */
export function fitText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context.measureText(`…${text.slice(middle)}`).width <= width) high = middle;
    else low = middle + 1;
  }
  return `…${text.slice(low)}`;
}
