// The scrubber below the panel: training steps on a slider, and a button that plays them.

import { el } from '../draw/dom.js';
import { formatStep } from '../draw/numbers.js';

const FRAME_MS = 130;
const MOST_FRAMES = 120; // a thousand rows are played in sixteen seconds, not in two minutes

export class Scrubber {
  /** `onStep(step, trail)`: show a step; with `trail` the curves before it stay as ghosts. Returns a promise. */
  constructor(onStep) {
    this.onStep = onStep;
    this.steps = [];
    this.slider = el('input', { type: 'range', min: '0', step: '1', 'aria-label': 'Training step, from first to last',
      oninput: () => { this.stop(); this.onStep(this.steps[Number(this.slider.value)], true); } });
    this.button = el('button', { type: 'button', class: 'play', 'aria-label': 'Play training', title: 'Play training',
      onclick: () => (this.playing ? this.stop() : this.play()) }, '▶');
    this.label = el('output', { class: 'muted' });
    this.node = el('div', { class: 'scrubber' }, this.button, this.slider, this.label);
  }

  /** `steps`: the kept training steps of all heat maps, increasing. */
  update(steps, chosen) {
    this.steps = steps;
    this.node.hidden = steps.length < 2;
    this.slider.max = String(Math.max(0, steps.length - 1));
    const index = nearest(steps, chosen);
    this.slider.value = String(index);
    const text = steps.length ? `step ${formatStep(steps[index])} of ${formatStep(steps[steps.length - 1])}` : '';
    this.slider.setAttribute('aria-valuetext', text);
    this.label.textContent = text;
  }

  async play() {
    const stride = Math.max(1, Math.ceil(this.steps.length / MOST_FRAMES));
    const last = this.steps.length - 1;
    let index = Number(this.slider.value) >= last ? 0 : Number(this.slider.value);
    const turn = this.playing = {};
    this.show(true);
    while (this.playing === turn) {
      await Promise.all([this.onStep(this.steps[index], true), new Promise((done) => setTimeout(done, FRAME_MS))]);
      if (index >= last) break;
      index = Math.min(last, index + stride);
    }
    if (this.playing === turn) this.stop();
  }

  stop() {
    this.playing = null;
    this.show(false);
  }

  show(playing) {
    this.button.textContent = playing ? '❚❚' : '▶';
    const text = playing ? 'Pause' : 'Play training';
    this.button.setAttribute('aria-label', text);
    this.button.title = text;
  }
}

/** The index of the step nearest to `chosen` in an increasing list. */
export function nearest(steps, chosen) {
  let best = 0;
  steps.forEach((step, i) => { if (Math.abs(step - chosen) < Math.abs(steps[best] - chosen)) best = i; });
  return best;
}
