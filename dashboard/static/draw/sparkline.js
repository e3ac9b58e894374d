// Small curves without axes, as SVG: [[x, y]…] with a label that says what they show.

const SVG = 'http://www.w3.org/2000/svg';

/** `range`: [low, high] of y; null for that of the points. Returns null for fewer than two points. */
export function sparkline(points, { width, height, range = null, label, colour = null }) {
  if (points.length < 2) return null;
  const ys = points.map(([, y]) => y);
  const [low, high] = range ?? [Math.min(...ys), Math.max(...ys)];
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const path = points.map(([x, y], i) => {
    const left = 1 + ((x - first) / (last - first || 1)) * (width - 2);
    const share = high > low ? (Math.max(low, Math.min(high, y)) - low) / (high - low) : 0.5;
    return `${i ? 'L' : 'M'}${left.toFixed(1)} ${(height - 1 - share * (height - 2)).toFixed(1)}`;
  }).join('');
  const svg = document.createElementNS(SVG, 'svg');
  const attributes = { width, height, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', role: 'img',
    class: 'sparkline', 'aria-label': label };
  for (const [name, value] of Object.entries(attributes)) svg.setAttribute(name, value);
  const line = document.createElementNS(SVG, 'path');
  line.setAttribute('d', path);
  if (colour) line.style.stroke = colour;
  svg.append(line);
  return svg;
}
