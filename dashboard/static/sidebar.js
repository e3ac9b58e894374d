// The run picker with its filter (TensorBoard does not tell a plugin which runs are selected) and the layers.

import { button, el } from './dom.js';

export class Sidebar {
  /** `onRuns(names)`, `onHiddenLayers(names)`. */
  constructor(onRuns, onHiddenLayers) {
    this.onRuns = onRuns;
    this.onHiddenLayers = onHiddenLayers;
    this.filter = el('input', {
      type: 'search', placeholder: 'Filter runs (regex)', 'aria-label': 'Filter runs',
      oninput: () => this.applyFilter(),
    });
    this.problem = el('div', { class: 'problem', role: 'status' });
    this.runs = el('ul', { class: 'choices', 'aria-label': 'Runs' });
    this.layers = el('ul', { class: 'choices', 'aria-label': 'Layers' });
    this.node = el('nav', { class: 'sidebar', 'aria-label': 'Runs and layers' },
      el('div', { class: 'sidebar-title' }, el('h1', {}, 'Runs'),
        button('all', 'Show all runs that pass the filter', () => this.chooseMatching(true)),
        button('none', 'Hide all runs that pass the filter', () => this.chooseMatching(false))),
      this.filter, this.problem, this.runs,
      el('div', { class: 'sidebar-title' }, el('h1', {}, 'Layers')), this.layers);
  }

  update(allRuns, shownRuns, allLayers, hiddenLayers, runColour) {
    [this.allRuns, this.shownRuns] = [allRuns, shownRuns];
    const runs = allRuns.map((run) => ({ name: run, checked: shownRuns.includes(run), colour: runColour(run) }));
    const layers = allLayers.map((layer) => ({ name: layer, checked: !hiddenLayers.includes(layer) }));
    fillChoices(this.runs, runs, (name, checked) =>
      this.onRuns(checked ? [...this.shownRuns, name] : this.shownRuns.filter((run) => run !== name)));
    fillChoices(this.layers, layers, (name, checked) =>
      this.onHiddenLayers(checked ? hiddenLayers.filter((layer) => layer !== name) : [...hiddenLayers, name]));
    this.applyFilter();
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
    for (const item of this.runs.children) item.hidden = !matches(item.dataset.name);
  }

  chooseMatching(checked) {
    const matches = this.matches();
    const matching = this.allRuns.filter(matches);
    const others = this.shownRuns.filter((run) => !matches(run));
    this.onRuns(checked ? [...others, ...matching] : others);
  }
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
        el('span', { class: 'swatch' }), el('span', { class: 'choice-name' }, name)))));
  }
  items.forEach(({ checked, colour }, i) => {
    const [input, swatch] = list.children[i].firstChild.children;
    input.checked = checked;
    swatch.style.background = colour ?? 'transparent';
  });
}
