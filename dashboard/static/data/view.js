// What is to be seen, from what the user chose and what there is.

import { describe, isShare, shortNames } from './catalogue.js';

export function makeView(state, catalogue) {
  const page = catalogue.hasSeries ? state.get('page') : 'health';
  const runs = chosenRuns(state.get('runs'), catalogue);
  const quantities = catalogue.quantities();
  const known = quantities.some(({ value }) => value === state.get('quantity'));
  const quantity = known ? state.get('quantity') : quantities[0]?.value ?? 'state';
  let mode = state.get('mode');
  if (isShare(quantity) || (mode === 'difference' && runs.length < 2)) mode = 'absolute';
  if (mode === 'relative' && quantity === 'gain') mode = 'absolute'; // a ratio already
  const wanted = runs.includes(state.get('baseline')) ? state.get('baseline') : runs[0];
  const baseline = mode === 'difference' ? wanted : null;
  const columns = runs.filter((run) => run !== baseline);
  const layers = catalogue.layers(runs).filter((layer) => !state.get('hiddenLayers').includes(layer)
    && runs.some((run) => catalogue.find(run, layer, quantity)));
  const align = state.get('align');
  const names = shortNames(catalogue.runs);
  const tiles = layers.flatMap((layer) => columns.map((run) => {
    const comparable = baseline === null || catalogue.find(baseline, layer, quantity);
    const found = catalogue.find(run, layer, quantity);
    const own = catalogue.nameIn(run, layer);
    const name = own === layer ? names.get(run) : `${names.get(run)} · ${own}`;
    return { run, layer, name, logged: Boolean(found), series: comparable ? found : undefined };
  }));
  const about = quantities.find(({ value }) => value === quantity) ?? describe(quantity);
  const diverging = !['absolute', 'relative'].includes(mode) || quantity === 'gain' || isShare(quantity);
  const [step, pinned, zoom] = [state.get('step'), state.get('pinned'), state.get('zoom')];
  const measure = state.get('measure');
  return { page, measure, runs, quantity, mode, baseline, layers, tiles, align, about, diverging, step, pinned, zoom };
}

/** The chosen runs that exist, in the catalogue's order; the newest ones if a link names only runs that are gone. */
function chosenRuns(names, catalogue) {
  const known = catalogue.runs.filter((run) => names?.includes(run));
  return known.length || names?.length === 0 ? known : catalogue.newestRuns();
}

/** What the heat maps of a page show: {steps: [low, high], time: [low, high]} of training steps and columns. */
export function extent(pictures, maxTime, zoom) {
  const ends = pictures.flatMap(({ edges, rows }) => [edges.from[0], edges.to[rows - 1]]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const whole = { steps: ends.length && high > low ? [low, high] : [0, 1], time: [0, maxTime] };
  if (!zoom) return whole;
  // A link may come from another log directory: what lies outside is cut off, and nothing left means everything.
  const cut = (range, [from, to]) => [Math.max(range[0], from), Math.min(range[1], to)];
  const zoomed = { steps: cut(zoom.steps, whole.steps), time: cut(zoom.time, whole.time) };
  return zoomed.steps[0] < zoomed.steps[1] && zoomed.time[0] < zoomed.time[1] ? zoomed : whole;
}
