// One tooltip for the whole page, and a line that screen readers read when the keyboard moves.

import { el } from '../draw/dom.js';

const GAP = 14;

export class Tooltip {
  constructor() {
    this.node = el('div', { class: 'tooltip', role: 'tooltip', hidden: true });
    this.spoken = el('div', { class: 'visually-hidden', 'aria-live': 'polite' });
  }

  /** `lines`: texts, or {text, colour} for a line with a swatch; the first one is printed large. */
  show(lines, x, y, speak = false) {
    const items = lines.map((line) => (typeof line === 'string' ? { text: line } : line));
    this.node.replaceChildren(...items.map(({ text, colour }, i) => el('div', { class: i ? '' : 'first' },
      colour && el('i', { class: 'swatch', style: { background: colour } }), text)));
    this.node.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const left = x + GAP + width > window.innerWidth ? x - GAP - width : x + GAP;
    const top = y + GAP + height > window.innerHeight ? y - GAP - height : y + GAP;
    this.node.style.transform = `translate(${Math.max(2, left)}px, ${Math.max(2, top)}px)`;
    if (speak) this.spoken.textContent = items.map(({ text }) => text).join('. ');
  }

  hide() {
    this.node.hidden = true;
  }
}
