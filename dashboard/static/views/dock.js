// The panel that looks at one layer at one training step: profile, loss shares or credit matrix.

import { button, el, fillSelect, segmented } from '../draw/dom.js';
import { formatStep } from '../draw/numbers.js';

const RESIZE_STEP = 20;
const MATRIX_HEIGHT = 360; // squares need room

export class Dock {
  /**
   * `panels`: {name: {text, title, load(context), draw(colours), node}}, the first for unknown names. `scrubber`: below
   * them. `actions`: set(changes) of the state, csv(), fail(error), nextStep(±1) among the kept training steps.
   */
  constructor(panels, scrubber, actions) {
    const { set } = actions;
    this.panels = panels;
    this.actions = actions;
    const tabs = Object.entries(panels).map(([value, { text, title }]) => ({ value, text, title }));
    this.tabs = segmented('Panel', tabs, (panel) => set({ panel }));
    this.layer = el('select', { 'aria-label': 'Layer of the panel', onchange: () => set({ layer: this.layer.value }) });
    this.step = el('input', {
      type: 'text', inputmode: 'numeric', size: '8',
      'aria-label': 'Training step', title: 'Arrow keys go to the next kept step',
      onchange: () => this.readStep(), onkeydown: (event) => this.stepKey(event),
    });
    this.latest = button('latest', 'Follow the latest training step', () => set({ step: null }));
    this.pin = button('Pin', 'Keep this step, dashed, to compare another one with it (Shift+click a heat map)',
      () => set({ pinned: this.chosen }));
    this.pinned = button('', 'Remove the pinned step', () => set({ pinned: null }), { class: 'pinned' });
    this.csv = button('CSV', 'Download these curves as CSV', actions.csv);
    this.handle = el('div', {
      class: 'handle', role: 'separator', tabindex: '0', 'aria-orientation': 'horizontal',
      'aria-label': 'Height of the panel',
      onpointerdown: (event) => this.drag(event), onkeydown: (event) => this.resizeKey(event),
    });
    this.body = el('div', { class: 'dock-body' });
    const named = (name, control) => el('label', {}, el('span', { class: 'muted' }, name), control);
    this.node = el('aside', { class: 'dock', 'aria-label': 'One training step' },
      this.handle,
      el('div', { class: 'dock-head' }, this.tabs.node, named('layer', this.layer), named('step', this.step),
        this.latest, this.pin, this.pinned, el('span', { class: 'spring' }), this.csv),
      this.body, scrubber.node);
    this.request = 0;
  }

  /** Shows `context` (see the panels' `load`). A panel drops an answer that is no longer wanted: `isCurrent`. */
  async update(context, name, layers, height) {
    if (!Object.hasOwn(this.panels, name)) [name] = Object.keys(this.panels);
    this.chosen = context.chosen;
    this.name = name;
    this.tabs.show(name);
    fillSelect(this.layer, layers.map((layer) => ({ value: layer, label: layer })), context.layer);
    if (document.activeElement !== this.step) this.step.value = formatStep(context.chosen);
    this.latest.setAttribute('aria-pressed', String(context.follows));
    this.pinned.hidden = context.pinned === null;
    this.pinned.textContent = `compared with step ${formatStep(context.pinned ?? 0)} ×`;
    this.csv.hidden = name !== 'profile';
    this.node.style.setProperty('--dock', `${name === 'credit' ? Math.max(height, MATRIX_HEIGHT) : height}px`);
    this.handle.setAttribute('aria-valuenow', String(height));
    const panel = this.panels[name];
    if (this.body.firstChild !== panel.node) this.body.replaceChildren(panel.node);
    const request = ++this.request;
    try {
      await panel.load({ ...context, isCurrent: () => request === this.request });
    } catch (error) {
      if (request === this.request) this.actions.fail(error);
      return;
    }
    if (request === this.request) this.draw(this.colours);
  }

  draw(colours) {
    this.colours = colours;
    if (colours && this.name) {
      this.panels[this.name].draw(colours);
      this.node.dataset.step = String(this.chosen);
    }
  }

  readStep() {
    const step = Number(this.step.value.replace(/[,\s]/g, ''));
    if (Number.isSafeInteger(step) && step >= 0 && this.step.value.trim()) this.actions.set({ step });
    else this.step.value = formatStep(this.chosen);
  }

  stepKey(event) {
    const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    const step = this.actions.nextStep(direction);
    this.step.value = formatStep(step);
    this.actions.set({ step });
  }

  drag(event) {
    event.preventDefault();
    const start = event.clientY + this.node.offsetHeight;
    const move = (moved) => this.resize(start - moved.clientY);
    const stop = () => {
      window.removeEventListener('pointermove', move);
      window.removeEventListener('pointerup', stop);
    };
    window.addEventListener('pointermove', move);
    window.addEventListener('pointerup', stop);
  }

  resizeKey(event) {
    const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    this.resize(this.node.offsetHeight + direction * RESIZE_STEP);
  }

  resize(height) {
    this.actions.set({ dock: Math.round(Math.max(150, Math.min(window.innerHeight - 160, height))) });
  }
}
