// What there is to see: the server's list of series, arranged by run, layer and quantity.

const ABOUT = {
  state: ['State gradient', '‖∂L/∂sₜ‖ of the whole state: what arrives at time step t from all later ones'],
  hidden: ['Hidden state gradient', '‖∂L/∂hₜ‖'],
  cell: ['Cell state gradient', '‖∂L/∂cₜ‖; zero at the last time step by definition'],
  recurrent: ['Recurrent gradient', '‖Jₜᵀλₜ‖: what time step t sends back to t − 1'],
  external: ['External gradient', '‖∂L/∂yₜ‖ with later states held: what arrives from the layers above'],
  input: ['Input gradient', '‖∂L/∂xₜ‖'],
  gain: ['Backward gain', '‖Jₜᵀλₜ‖ / ‖λₜ‖: below 1 the gradient shrinks in this time step, above 1 it grows'],
};
const ORDER = Object.keys(ABOUT);
const GROUPS = ['Gradients', 'Weights', 'Loss shares', 'Other'];
const NEWEST_RUNS = 4;

export class Catalogue {
  constructor(tags) {
    this.unreadable = tags.unreadable;
    this.byRun = new Map(Object.entries(tags.runs).sort(([a], [b]) => compare(a, b)));
    this.all = [...this.byRun].flatMap(([run, list]) => list.map((series) => ({ ...series, run })));
  }

  get runs() {
    return [...this.byRun.keys()];
  }

  get empty() {
    return this.byRun.size === 0;
  }

  /** The runs written to last, by name: what is shown before anybody chooses. */
  newestRuns() {
    const lastWritten = (run) => Math.max(...this.byRun.get(run).map((series) => series.wall_time));
    return this.runs.sort((a, b) => lastWritten(b) - lastWritten(a)).slice(0, NEWEST_RUNS).sort(compare);
  }

  layers(runs) {
    const list = this.all.filter((series) => runs.includes(series.run)).map((series) => series.layer);
    return [...new Set(list)].sort(compare);
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
    return this.byRun.get(run)?.find((series) =>
      series.kind === 'vector' && series.layer === layer && quantityOf(series) === quantity);
  }

  /** The loss shares of a layer: [{loss, …series}], by name. */
  shares(run, layer) {
    return (this.byRun.get(run) ?? []).filter((series) => series.layer === layer && series.quantity === 'loss_share')
      .sort((a, b) => compare(a.loss, b.loss));
  }

  credit(run, layer) {
    return this.byRun.get(run)?.find((series) => series.layer === layer && series.kind === 'matrix');
  }
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
