// The table of runs with its filter (TensorBoard does not tell a plugin which runs are selected) and the layers.

import { compare } from '../data/catalogue.js';
import { button, el } from '../draw/dom.js';
import { formatStep, formatValue } from '../draw/numbers.js';

const COLUMNS = [
  { value: 'name', text: 'run' },
  { value: 'rank', text: 'verdict', title: 'The worst finding of the run' },
  { value: 'loss', text: 'loss', title: 'The last total loss' },
  { value: 'horizon', text: 'horizon', title: 'Time steps that 1 % of the gradient reaches, in the run\'s shortest layer' },
];

export class Sidebar {
  /** `onRuns(names)`, `onHiddenLayers(names)`. */
  constructor(onRuns, onHiddenLayers) {
    this.onRuns = onRuns;
    this.onHiddenLayers = onHiddenLayers;
    this.sort = { by: 'name', up: true };
    this.filter = el('input', {
      type: 'search', placeholder: 'Filter runs (regex)', 'aria-label': 'Filter runs',
      oninput: () => this.applyFilter(),
    });
    this.problem = el('div', { class: 'problem', role: 'status' });
    this.heads = COLUMNS.map(({ value, text, title }) => el('th', { scope: 'col' },
      el('button', { type: 'button', class: 'quiet', title: title ?? null, onclick: () => this.sortBy(value) }, text)));
    this.body = el('tbody');
    const table = el('table', { class: 'runs', 'aria-label': 'Runs' }, el('thead', {}, el('tr', {}, ...this.heads)),
      this.body);
    this.layers = el('ul', { class: 'choices', 'aria-label': 'Layers' });
    this.node = el('nav', { class: 'sidebar', 'aria-label': 'Runs and layers' },
      el('div', { class: 'sidebar-title' }, el('h2', {}, 'Runs'),
        button('all', 'Show all runs that pass the filter', () => this.chooseMatching(true)),
        button('none', 'Hide all runs that pass the filter', () => this.chooseMatching(false))),
      this.filter, this.problem, el('div', { class: 'runs-box' }, table),
      el('div', { class: 'sidebar-title' }, el('h2', {}, 'Layers')), this.layers);
  }

  /** `runs`: [{run, name, shown, colour, summary}], `summary` as in `Verdicts.summary`. */
  update(runs, allLayers, hiddenLayers) {
    this.runs = runs;
    this.showRuns();
    const layers = allLayers.map((layer) => ({ name: layer, checked: !hiddenLayers.includes(layer) }));
    fillChoices(this.layers, layers, (name, checked) =>
      this.onHiddenLayers(checked ? hiddenLayers.filter((layer) => layer !== name) : [...hiddenLayers, name]));
  }

  sortBy(by) {
    this.sort = { by, up: this.sort.by === by ? !this.sort.up : true };
    this.showRuns();
  }

  /** Rows are kept and moved, so that keyboard focus survives a refresh. */
  showRuns() {
    const { by, up } = this.sort;
    this.heads.forEach((head, i) => {
      const mine = COLUMNS[i].value === by;
      head.setAttribute('aria-sort', mine ? (up ? 'ascending' : 'descending') : 'none');
    });
    const known = new Map([...this.body.children].map((row) => [row.dataset.name, row]));
    const sorted = [...this.runs].sort((a, b) => (up ? 1 : -1) * order(a, b, by) || compare(a.run, b.run));
    const rows = sorted.map((item) => fillRow(known.get(item.run) ?? this.makeRow(item.run), item));
    const focused = document.activeElement;
    if (rows.some((row, i) => this.body.children[i] !== row) || rows.length !== this.body.children.length) {
      this.body.replaceChildren(...rows);
      if (this.body.contains(focused)) focused.focus();
    }
    this.applyFilter();
  }

  makeRow(run) {
    return el('tr', { data: { name: run } },
      el('td', {}, el('label', { title: run },
        el('input', { type: 'checkbox', onchange: (event) => this.toggle(run, event.target.checked) }),
        el('span', { class: 'swatch' }), el('span', { class: 'choice-name' }))),
      el('td', { class: 'verdict' }, el('i', { class: 'dot' }), el('span', {})),
      el('td', { class: 'number' }), el('td', { class: 'number' }));
  }

  get shownRuns() {
    return this.runs.filter(({ shown }) => shown).map(({ run }) => run);
  }

  toggle(run, checked) {
    this.onRuns(checked ? [...this.shownRuns, run] : this.shownRuns.filter((other) => other !== run));
  }

  matches() {
    const text = this.filter.value.trim();
    this.problem.textContent = '';
    if (!text) return () => true;
    try {
      const pattern = new RegExp(text, 'i');
      return (run) => pattern.test(run);
    } catch {
      this.problem.textContent = 'Not a regular expression; taken literally.';
      return (run) => run.toLowerCase().includes(text.toLowerCase());
    }
  }

  applyFilter() {
    const matches = this.matches();
    for (const row of this.body.children) row.hidden = !matches(row.dataset.name);
  }

  chooseMatching(checked) {
    const matches = this.matches();
    const matching = this.runs.map(({ run }) => run).filter(matches);
    const others = this.shownRuns.filter((run) => !matches(run));
    this.onRuns(checked ? [...others, ...matching] : others);
  }
}

/** What is not known comes last, whichever way the column is sorted first. */
function order(a, b, by) {
  if (by === 'name') return compare(a.run, b.run);
  const [x, y] = [a.summary[by], b.summary[by]].map((value) => (Number.isFinite(value) ? value : Infinity));
  return x === y ? 0 : x - y;
}

function fillRow(row, { name, shown, colour, summary }) {
  const [label, verdict, loss, horizon] = row.children;
  const [input, swatch, text] = label.firstChild.children;
  input.checked = shown;
  swatch.style.background = colour;
  text.textContent = name;
  verdict.dataset.tone = summary.tone;
  verdict.title = summary.text;
  verdict.lastChild.textContent = summary.word ?? (summary.known ? '–' : '…');
  loss.textContent = summary.loss === null ? '–' : formatValue(Number(summary.loss.toPrecision(3)));
  horizon.textContent = summary.horizon === null ? '–' : formatStep(summary.horizon);
  return row;
}

/** Check boxes for `items`; rebuilt only when names change, so that keyboard focus survives a refresh. */
function fillChoices(list, items, onToggle) {
  list.toggle = onToggle;
  const signature = JSON.stringify(items.map(({ name }) => name));
  if (list.dataset.signature !== signature) {
    list.dataset.signature = signature;
    list.replaceChildren(...items.map(({ name }) => el('li', { data: { name } },
      el('label', { title: name },
        el('input', { type: 'checkbox', onchange: (event) => list.toggle(name, event.target.checked) }),
        el('span', { class: 'choice-name' }, name)))));
  }
  items.forEach(({ checked }, i) => { list.children[i].firstChild.firstChild.checked = checked; });
}
