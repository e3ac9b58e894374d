// What is shown when there is nothing to show: how to log the first data.

import { el } from '../draw/dom.js';

const EXAMPLE = `from looptape import Trainer

trainer = Trainer(model, optimizer, losses, probe_every=10)
trainer.fit(dataset, steps=1000, workdir="runs/first")`;

export function emptyState() {
  return el('div', { class: 'empty', hidden: true },
    el('h1', {}, 'No training runs yet'),
    el('p', {}, 'This tab shows how healthy a run is, and for recurrent loops the gradient of every time step. Give the trainer a ',
      el('code', {}, 'workdir'), ', and one or both of ', el('code', {}, 'health_every'), ' and ',
      el('code', {}, 'probe_every'), ':'),
    el('pre', {}, EXAMPLE),
    el('p', {}, 'and start TensorBoard with ', el('code', {}, '--logdir runs'),
      '. Every Keras recurrent layer is probed; in a loop of your own, wrap the state in ',
      el('code', {}, 'probe(name, state, t)'), '.'),
    el('p', {}, 'A model without a recurrent loop (a GAN, an autoencoder, several tasks on one trunk) needs no ',
      el('code', {}, 'probe_every'), ': its loss, speed and skipped updates are shown without it, and ',
      el('code', {}, 'health_every'), ' adds every layer. With several losses, ', el('code', {}, 'probe_every'),
      ' measures how their gradients conflict.'),
    el('p', { class: 'muted' }, 'New data appear here by themselves.'));
}
