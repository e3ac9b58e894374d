// Shown in place of data: how to log the first ones, and why the view of time steps is empty.

import { button, el } from '../draw/dom.js';

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

/** Why the view of time steps is empty, and buttons that lead on; `set(changes)` changes the state. */
export function noTimeSteps(view, catalogue, hiddenLayers, set) {
  if (!view.runs.length) return [el('p', {}, 'Choose at least one run.')];
  const health = button('Run health', 'What the chosen runs logged', () => set({ page: 'health' }), { class: 'primary' });
  if (catalogue.layers(view.runs).some((layer) => hiddenLayers.includes(layer))) {
    const show = button('Show all layers', 'Undoes the choice of layers', () => set({ hiddenLayers: [] }), { class: 'primary' });
    return [el('p', {}, 'All layers of the chosen runs that logged this quantity are hidden.'), show];
  }
  if (catalogue.layers(view.runs).length) {
    return [el('p', {}, `The chosen runs did not log the quantity “${view.about.label}”. Choose another one above.`), health];
  }
  const others = catalogue.order.filter((run) => catalogue.layersOf(run).length).slice(-4);
  const choose = button('Runs with time steps', others.join(', '), () => set({ runs: others }), { class: 'primary' });
  return [el('p', {}, 'The chosen runs logged no time steps: they have no recurrent layer, or were not probed (',
    el('code', {}, 'probe_every'), ').'), health, ' ', others.length ? choose : null].filter(Boolean);
}
