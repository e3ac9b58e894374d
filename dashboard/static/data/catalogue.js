// What there is to see: the server's list of series, arranged by run, layer and quantity.

const ABOUT = {
  state: ['State gradient', '‖∂L/∂sₜ‖ of the whole state: what arrives at time step t from all later ones'],
  steered: ['State gradient after steering', '‖∂L/∂sₜ‖ as the actions of `timestep_actions` left it; the state gradient is before them'],
  hidden: ['Hidden state gradient', '‖∂L/∂hₜ‖'],
  cell: ['Cell state gradient', '‖∂L/∂cₜ‖; zero at the last time step by definition'],
  recurrent: ['Recurrent gradient', '‖Jₜᵀλₜ‖: what time step t sends back to t − 1'],
  external: ['External gradient', '‖∂L/∂yₜ‖ with later states held: what arrives from the layers above'],
  input: ['Input gradient', '‖∂L/∂xₜ‖'],
  gain: ['Backward gain', '‖Jₜᵀλₜ‖ / ‖λₜ‖: below 1 the gradient shrinks in this time step, above 1 it grows'],
};
const ORDER = Object.keys(ABOUT);
ABOUT.output = ['Output gradient by position', '‖∂L/∂output‖ of the layer at each position, averaged over the examples'];
export const POSITIONS = 'output';
const GROUPS = ['Gradients', 'Weights', 'Loss shares', 'Other'];
const NEWEST_RUNS = 4;

export class Catalogue {
  constructor(tags) {
    this.unreadable = tags.unreadable;
    this.trained = tags.trained ?? {}; // {run: version}: also runs without any series
    const others = Object.keys(this.trained).filter((run) => !(run in tags.runs)).map((run) => [run, []]);
    this.byRun = new Map([...Object.entries(tags.runs), ...others].sort(([a], [b]) => compare(a, b)));
    this.order = tags.order ?? this.runs; // of all runs, as TensorBoard colours them
    this.all = [...this.byRun].flatMap(([run, list]) => list.map((series) => ({ ...series, run })));
  }

  get runs() {
    return [...this.byRun.keys()];
  }

  get empty() {
    return this.byRun.size === 0;
  }

  /** Whether any run has gradients of time steps. */
  get hasSeries() {
    return this.all.length > 0;
  }

  /** The runs written to last, by name: what is shown before anybody chooses. */
  newestRuns() {
    const lastWritten = (run) => Math.max(0, ...this.byRun.get(run).map((series) => series.wall_time), ...this.trainedAt(run));
    return this.runs.sort((a, b) => lastWritten(b) - lastWritten(a)).slice(0, NEWEST_RUNS).sort(compare);
  }

  /** When a run last logged its loss and its health: a version is a list of step/time. */
  trainedAt(run) {
    return (this.trained[run] ?? '').split(' ').map((version) => Number(version.split('/')[1])).filter(Number.isFinite);
  }

  /** The layer of a run's series that a variable's path belongs to: `lstm` of `model/lstm/cell`; undefined if none. */
  layerOfPath(run, path) {
    return this.layersOf(run).filter((layer) => `/${path}/`.includes(`/${layer}/`))
      .sort((a, b) => b.length - a.length)[0];
  }

  /**
   * The layers of `runs`, matched: by name, else by their place among the layers of a run, so that a GRU and an LSTM
   * stand side by side. Returns titles; `find`, `shares` and `credit` take a title for the layer from then on.
   */
  layers(runs) {
    const timed = new Set(this.all.filter(({ axis }) => axis !== 'position').map(({ layer }) => layer));
    const lists = (wanted) => runs.map((run) => [run, this.layersOf(run).filter((layer) => timed.has(layer) === wanted)]);
    // Layers known by their positions alone are many and have names of their own: their places say nothing.
    const groups = [...matchLayers(lists(true)), ...matchLayers(lists(false), false)];
    this.groups = new Map(groups.map((group) => [group.title, group.names]));
    return groups.map(({ title }) => title);
  }

  /** Changes when a run has something new. */
  version(run) {
    return [...this.byRun.get(run).map((series) => series.version), this.trained[run]].join(' ');
  }

  layersOf(run) {
    // Layers that are known by their positions alone stand in the order of calls.
    const depths = new Map();
    for (const { layer, depth } of this.byRun.get(run) ?? []) depths.set(layer, Math.max(depth ?? 0, depths.get(layer) ?? 0));
    return [...depths.keys()].sort((a, b) => depths.get(a) - depths.get(b) || compare(a, b));
  }

  /** What a run itself calls the layer of this title. */
  nameIn(run, title) {
    return this.groups?.get(title)?.get(run) ?? title;
  }

  /** Choices for the quantity: [{value, label, group, about}]. */
  quantities() {
    const found = new Map();
    for (const series of this.all) {
      if (series.kind === 'vector' && !found.has(quantityOf(series))) {
        found.set(quantityOf(series), describe(quantityOf(series), series));
      }
    }
    const rank = ({ value, group }) => [GROUPS.indexOf(group), ORDER.indexOf(value)];
    return [...found.values()].sort((a, b) => {
      const [x, y] = [rank(a), rank(b)];
      return x[0] - y[0] || x[1] - y[1] || compare(a.value, b.value);
    });
  }

  /** The series of a vector quantity, or undefined. */
  find(run, layer, quantity) {
    const name = this.nameIn(run, layer);
    return this.byRun.get(run)?.find((series) =>
      series.kind === 'vector' && series.layer === name && quantityOf(series) === quantity);
  }

  /** Whether a run logged a quantity of a layer, by the run's own name of it. */
  has(run, layer, quantity) {
    return this.byRun.get(run).some((series) => series.layer === layer && series.quantity === quantity);
  }

  /** The series of a run's positions, one for each layer. */
  positions(run) {
    return (this.byRun.get(run) ?? []).filter((series) => series.axis === 'position');
  }

  /** The loss shares of a layer: [{loss, …series}], by name. */
  shares(run, layer) {
    const name = this.nameIn(run, layer);
    return (this.byRun.get(run) ?? []).filter((series) => series.layer === name && series.quantity === 'loss_share')
      .sort((a, b) => compare(a.loss, b.loss));
  }

  credit(run, layer) {
    const name = this.nameIn(run, layer);
    return this.byRun.get(run)?.find((series) => series.layer === name && series.kind === 'matrix');
  }
}

/** Groups [[run, layers]…] into [{title, names: Map(run → layer)}], by name and then `byPlace`: see `Catalogue.layers`. */
export function matchLayers(lists, byPlace = true) {
  const byName = new Map();
  for (const [run, layers] of lists) {
    layers.forEach((layer, place) => {
      if (!byName.has(layer)) byName.set(layer, { title: layer, place, names: new Map() });
      const group = byName.get(layer);
      group.names.set(run, layer);
      group.place = Math.min(group.place, place);
    });
  }
  const merged = [];
  for (const group of [...byName.values()].sort((a, b) => a.place - b.place || compare(a.title, b.title))) {
    const partner = byPlace && merged.find((other) => other.place === group.place
      && [...group.names.keys()].every((run) => !other.names.has(run)));
    if (!partner) merged.push(group);
    else for (const [run, layer] of group.names) partner.names.set(run, layer);
  }
  for (const group of merged) {
    const names = [...new Set(group.names.values())].sort(compare);
    if (names.length > 1) group.title = `layer ${group.place + 1}: ${names.join(' / ')}`;
  }
  return merged;
}

/** Names without the folders that all of them begin or end with: [full] → Map(full → short). */
export function shortNames(names) {
  const parts = names.map((name) => name.split('/'));
  const strip = (take) => {
    while (parts.length > 1 && parts.every((list) => list.length > 1 && list.at(take) === parts[0].at(take))) {
      for (const list of parts) list.splice(take, 1);
    }
  };
  strip(0);
  strip(-1);
  return new Map(names.map((name, i) => [name, parts[i].join('/')]));
}

/** One name per choice: `state`, `weight/kernel`, `loss_share/mse`. */
export function quantityOf(series) {
  return series.loss === null || series.loss === undefined ? series.quantity : `${series.quantity}/${series.loss}`;
}

export function isShare(quantity) {
  return quantity.startsWith('loss_share/');
}

export function describe(quantity, series = {}) {
  const described = { value: quantity, about: series.description || '' };
  if (isShare(quantity)) {
    const loss = quantity.slice('loss_share/'.length);
    return { ...described, label: `Share of ${loss}`, group: 'Loss shares',
      about: described.about || 'Which part of the state gradient comes from this loss; all shares sum to 1' };
  }
  if (quantity === 'weight' || quantity.startsWith('weight/')) {
    const variable = quantity.slice('weight/'.length) || 'tensor';
    return { ...described, label: `Weight: ${variable}`, group: 'Weights',
      about: described.about || 'Norm of what the use of the weight at time step t adds to its gradient' };
  }
  if (ABOUT[quantity]) {
    const [label, about] = ABOUT[quantity];
    return { ...described, label, group: 'Gradients', about: described.about || about };
  }
  return { ...described, label: quantity, group: 'Other' };
}

export function compare(a, b) {
  return a.localeCompare(b, 'en', { numeric: true });
}
