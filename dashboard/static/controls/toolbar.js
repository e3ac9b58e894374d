// The line at the top: what is shown, how, and what can be taken away.

import { button, el, fillSelect, segmented } from '../draw/dom.js';
import { isShare } from '../data/catalogue.js';

export class Toolbar {
  /** `set(changes)`; `actions`: {link(button), png(), toggleSidebar()}. */
  constructor(set, actions) {
    this.page = segmented('View', [
      { value: 'health', text: 'Run health', title: 'Each run as a whole: loss, verdict, speed, updates of every layer' },
      { value: 'flow', text: 'Time steps', title: 'The gradient of every time step, over training' },
    ], (page) => set({ page }));
    this.quantity = el('select', {
      'aria-label': 'Quantity', onchange: () => set({ quantity: this.quantity.value, range: null }),
    });
    this.align = segmented('Time axis', [
      { value: 'start', text: 't', title: 'Time steps from the beginning' },
      { value: 'end', text: 'from end', title: 'Time steps back from the last valid one' },
    ], (align) => set({ align }));
    this.mode = segmented('Values', [
      { value: 'relative', text: 'Relative', title: 'Each row divided by its largest value: 1 % is the horizon' },
      { value: 'absolute', text: 'Absolute', title: 'Values as logged' },
      { value: 'normalised', text: 'Normalised', title: 'Each row divided by its value at the last time step' },
      { value: 'difference', text: 'Difference', title: 'log₁₀ of a run minus log₁₀ of the baseline' },
    ], (mode) => set({ mode, range: null }));
    this.baseline = el('select', {
      'aria-label': 'Baseline run', onchange: () => set({ baseline: this.baseline.value, range: null }),
    });
    this.baselineLabel = el('label', { hidden: true }, el('span', { class: 'muted' }, 'minus'), this.baseline);
    this.live = button('Live', 'Look for new data every few seconds',
      () => set({ live: this.live.getAttribute('aria-pressed') !== 'true' }), { class: 'live' });
    this.link = button('Copy link', 'Copy a link to this view', () => actions.link(this.link));
    this.png = button('PNG', 'Download what is shown as a picture', actions.png);
    this.menu = button('☰', 'Show or hide runs and layers', actions.toggleSidebar,
      { class: 'quiet menu', 'aria-label': 'Runs and layers' });
    this.reset = button('Reset zoom', 'Show all training steps and time steps (double click on a heat map)',
      () => set({ zoom: null }), { hidden: true });
    this.flow = el('div', { class: 'toolbar-part' }, this.quantity, this.mode.node, this.baselineLabel, this.align.node,
      this.reset);
    this.node = el('header', { class: 'toolbar' }, el('h1', { class: 'visually-hidden' }, 'Gradient Flow'),
      this.menu, this.page.node, this.flow,
      el('span', { class: 'spring' }), this.live, this.link, this.png);
  }

  update(view, quantities, state) {
    this.page.show(view.page);
    this.page.node.lastChild.disabled = quantities.length === 0;
    this.flow.hidden = this.png.hidden = view.page !== 'flow';
    this.reset.hidden = view.zoom === null;
    fillSelect(this.quantity, quantities.map(({ value, label, group }) => ({ value, label, group })), view.quantity);
    this.quantity.title = view.about.about;
    this.align.show(view.align);
    this.mode.show(view.mode);
    for (const button of this.mode.node.children) {
      const single = view.runs.length < 2 && button.dataset.value === 'difference';
      button.disabled = button.dataset.value !== 'absolute' && (isShare(view.quantity) || single
        || (view.quantity === 'gain' && button.dataset.value === 'relative'));
    }
    this.baselineLabel.hidden = view.mode !== 'difference';
    fillSelect(this.baseline, view.runs.map((run) => ({ value: run, label: run })), view.baseline);
    this.live.setAttribute('aria-pressed', String(state.get('live')));
    this.menu.setAttribute('aria-pressed', String(state.get('sidebar')));
  }
}
