// What is shown when there is nothing to show: how to log the first data.

import { el } from './dom.js';

const EXAMPLE = `from trainer import Trainer

trainer = Trainer(model, optimizer, losses, probe_every=10)
trainer.fit(dataset, steps=1000, workdir="runs/first")`;

export function emptyState() {
  return el('div', { class: 'empty', hidden: true },
    el('h1', {}, 'No gradients per time step yet'),
    el('p', {}, 'This tab draws the gradient of every time step of a recurrent loop, over training. Give the trainer ',
      el('code', {}, 'probe_every'), ' and a ', el('code', {}, 'workdir'), ':'),
    el('pre', {}, EXAMPLE),
    el('p', {}, 'and start TensorBoard with ', el('code', {}, '--logdir runs'),
      '. Every Keras recurrent layer is probed; in a loop of your own, wrap the state in ',
      el('code', {}, 'probe(name, state, t)'), '.'),
    el('p', { class: 'muted' }, 'New data appear here by themselves.'));
}
