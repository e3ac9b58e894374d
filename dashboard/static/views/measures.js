// The map of layers in run health with a choice of what it shows: updates, gradients, weights, zeros of every variable.

import { fetchVariables } from '../data/api.js';
import { el } from '../draw/dom.js';
import { LayerMap, MEASURES, UPDATES } from './layer_map.js';

export class Measures {
  /** `actions.show` as for `LayerMap`; `actions.measure(field)`: somebody chose another one. */
  constructor(tooltip, actions) {
    this.map = new LayerMap(UPDATES, tooltip, actions);
    this.answers = new Map(); // run → {key, table}
    this.select = el('select', { 'aria-label': 'What the map of layers shows', onchange: () => actions.measure(this.select.value) },
      ...MEASURES.map(({ field, choice }) => el('option', { value: field }, choice)));
    this.map.title.after(el('p', { class: 'measure' }, this.select));
    this.node = this.map.node;
  }

  /** `runs`: those with an overview. */
  update(runs, catalogue, measure) {
    const kind = MEASURES.find(({ field }) => field === measure) ?? UPDATES;
    this.select.value = kind.field;
    const measured = runs.filter(({ overview }) => overview.updates);
    if (kind === UPDATES) {
      this.request = null;
      this.map.kind = kind;
      this.map.update(measured, catalogue);
    } else this.load(kind, measured, catalogue);
  }

  /** Reads what is new, then shows all runs at once; a late answer to an earlier choice is dropped. */
  async load(kind, runs, catalogue) {
    const request = this.request = {};
    const tables = await Promise.all(runs.map(({ run, overview }) => this.table(run, kind.field, overview.version)));
    if (this.request !== request) return;
    this.map.kind = kind;
    this.map.show(runs.map((item, i) => ({ ...item, table: tables[i] })).filter(({ table }) => table), catalogue);
  }

  async table(run, field, version) {
    const key = `${field} ${version}`;
    if (this.answers.get(run)?.key !== key) {
      this.answers.set(run, { key, table: await fetchVariables(run, field).catch(() => null) });
    }
    return this.answers.get(run).table;
  }

  draw(colours) {
    this.map.draw(colours);
  }
}
