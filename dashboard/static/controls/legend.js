// The colour bar that all heat maps share, its range, and the colours of what is not a number.

import { drawXAxis, linear } from '../draw/axes.js';
import { colourAt, mapPoints, SPECIAL } from '../draw/colours.js';
import { el, prepareCanvas } from '../draw/dom.js';
import { rangeTicks, rangeTitle, unitOf } from '../draw/units.js';

const HEIGHT = 34;
const PADDING = 16;
const BAR = 12;

export class Legend {
  /** `onRange([low, high] | null)`: in log10 where colours are logarithmic. */
  constructor(onRange) {
    this.onRange = onRange;
    this.canvas = el('canvas', { 'aria-hidden': 'true' });
    this.needle = el('div', { class: 'needle', hidden: true });
    this.title = el('div', { class: 'legend-title' });
    this.inputs = ['from', 'to'].map((end) => el('input', {
      type: 'text', size: '7', spellcheck: 'false', 'aria-label': `Colours ${end}`,
      onchange: () => this.readInputs(),
    }));
    this.automatic = el('button', { type: 'button', class: 'quiet', title: 'Relative: from 1 down to 10⁻⁶. Else the 1st to 99th percentile of everything shown',
      onclick: () => onRange(null) }, 'auto');
    this.specials = el('div', { class: 'specials' },
      ...[['nan', 'NaN'], ['inf', 'Inf'], ['zero', 'exactly 0'], ['vanished', 'vanished: below 10⁻⁶, or 0'], ['padding', 'no data']].map(([kind, text]) =>
        el('span', { class: 'special', data: { kind } }, el('i', { class: `chip chip-${kind}` }), text)));
    this.bar = el('div', { class: 'bar' }, this.canvas, this.needle);
    this.node = el('div', { class: 'legend' },
      el('div', { class: 'bar-block' }, this.title, this.bar),
      el('div', { class: 'range', role: 'group', 'aria-label': 'Range of the colours' },
        el('span', { class: 'muted' }, 'colours'), this.inputs[0], el('span', { class: 'muted' }, 'to'), this.inputs[1],
        this.automatic),
      this.specials);
  }

  draw(frame, automatic) {
    this.frame = frame;
    this.title.textContent = rangeTitle(frame.view);
    const relative = frame.view.mode === 'relative';
    for (const chip of this.specials.children) {
      if (chip.dataset.kind === 'zero') chip.hidden = relative;
      if (chip.dataset.kind === 'vanished') chip.hidden = !relative;
    }
    this.title.title = frame.view.about.about;
    const unit = unitOf(frame.view);
    frame.range.forEach((end, i) => {
      const shown = unit === 'log' ? 10 ** end : end;
      if (document.activeElement !== this.inputs[i]) {
        this.inputs[i].value = unit === 'log' && shown < 1e-3 ? shown.toExponential(1) : shown.toPrecision(3);
      }
    });
    this.automatic.setAttribute('aria-pressed', String(automatic));
    const width = this.bar.clientWidth;
    if (width) drawBar(prepareCanvas(this.canvas, width, HEIGHT), frame, width);
    const special = SPECIAL[frame.colours.dark ? 'dark' : 'light'];
    for (const kind of Object.keys(special)) this.node.style.setProperty(`--${kind}`, special[kind]);
  }

  /** Shows where on the bar the value under the pointer is. */
  point(number) {
    const shown = number !== null && number !== undefined && this.frame;
    this.needle.hidden = !shown;
    if (!shown) return;
    const [low, high] = this.frame.range;
    const scale = barScale(this.frame, this.bar.clientWidth);
    this.needle.style.left = `${scale(Math.max(low, Math.min(high, number)))}px`;
  }

  readInputs() {
    const logarithmic = unitOf(this.frame.view) === 'log';
    const range = this.inputs.map((input) => {
      const value = Number(input.value.replace('−', '-'));
      return logarithmic ? Math.log10(value) : value;
    });
    if (range.every(Number.isFinite) && range[0] < range[1]) this.onRange(range);
    else this.draw(this.frame, this.automatic.getAttribute('aria-pressed') === 'true');
  }
}

function barScale(frame, width) {
  return linear(frame.range[0], frame.range[1], PADDING, width - PADDING);
}

/** The bar with arrows at both ends: values beyond the range take the colour of its end. */
export function drawBar(context, frame, width) {
  const points = mapPoints(frame.view.diverging, frame.colours.dark);
  const scale = barScale(frame, width);
  const gradient = context.createLinearGradient(PADDING, 0, width - PADDING, 0);
  for (let i = 0; i <= 32; i++) gradient.addColorStop(i / 32, `rgb(${colourAt(points, i / 32).join(' ')})`);
  context.fillStyle = gradient;
  context.beginPath();
  context.moveTo(PADDING - 8, BAR / 2);
  context.lineTo(PADDING - 1, 0);
  context.lineTo(width - PADDING + 1, 0);
  context.lineTo(width - PADDING + 8, BAR / 2);
  context.lineTo(width - PADDING + 1, BAR);
  context.lineTo(PADDING - 1, BAR);
  context.closePath();
  context.fill();
  const count = Math.max(2, Math.floor((width - 2 * PADDING) / 64));
  drawXAxis(context, scale, rangeTicks(frame.range, unitOf(frame.view), count), BAR, frame.colours, { right: width });
}
