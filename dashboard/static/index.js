// The dashboard: TensorBoard imports this module into an iframe and calls `render`.

import { fetchBinary, fetchTags } from './api.js';
import { Catalogue, describe, isShare } from './catalogue.js';
import { Channel } from './channel.js';
import { RunColours } from './colours.js';
import { Credit } from './credit.js';
import { Dock } from './dock.js';
import { el } from './dom.js';
import { emptyState } from './empty.js';
import { download, downloadCsv, fileName, renderPng } from './export.js';
import { Grid } from './grid.js';
import { Legend } from './legend.js';
import { Picture, sharedRange } from './picture.js';
import { Profile } from './profile.js';
import { Shares } from './shares.js';
import { Sidebar } from './sidebar.js';
import { State } from './state.js';
import { themeColours, watchTheme } from './theme.js';
import { Toolbar } from './toolbar.js';
import { Tooltip } from './tooltip.js';

// Imported by the modules above; named here so that the browser asks for all files at once.
import './axes.js';
import './heatmap.js';
import './numbers.js';
import './rows.js';
import './tile.js';
import './units.js';

const LIVE_SECS = 5;
const PATIENCE_SECS = 0.15;

/** What is to be seen, from what the user chose and what there is. */
export function makeView(state, catalogue) {
  const runs = chosenRuns(state.get('runs'), catalogue);
  const quantities = catalogue.quantities();
  const known = quantities.some(({ value }) => value === state.get('quantity'));
  const quantity = known ? state.get('quantity') : quantities[0]?.value ?? 'state';
  let mode = state.get('mode');
  if (isShare(quantity) || (mode === 'difference' && runs.length < 2)) mode = 'absolute';
  const wanted = runs.includes(state.get('baseline')) ? state.get('baseline') : runs[0];
  const baseline = mode === 'difference' ? wanted : null;
  const columns = runs.filter((run) => run !== baseline);
  const layers = catalogue.layers(runs).filter((layer) => !state.get('hiddenLayers').includes(layer)
    && runs.some((run) => catalogue.find(run, layer, quantity)));
  const align = state.get('align');
  const tiles = layers.flatMap((layer) => columns.map((run) => {
    const comparable = baseline === null || catalogue.find(baseline, layer, quantity);
    return { run, layer, series: comparable ? catalogue.find(run, layer, quantity) : undefined };
  }));
  const about = quantities.find(({ value }) => value === quantity) ?? describe(quantity);
  const diverging = mode !== 'absolute' || quantity === 'gain' || isShare(quantity);
  const [step, pinned] = [state.get('step'), state.get('pinned')];
  return { runs, quantity, mode, baseline, layers, tiles, align, about, diverging, step, pinned };
}

/** The chosen runs that exist, in the catalogue's order; the newest ones if a link names only runs that are gone. */
function chosenRuns(names, catalogue) {
  const known = catalogue.runs.filter((run) => names?.includes(run));
  return known.length || names?.length === 0 ? known : catalogue.newestRuns();
}

class Dashboard {
  constructor() {
    this.state = new State();
    this.runColours = new RunColours();
    this.tooltip = new Tooltip();
    const set = (changes) => this.state.set(changes);
    this.toolbar = new Toolbar(set, {
      link: (button) => this.copyLink(button),
      png: () => this.savePng(),
      toggleSidebar: () => set({ sidebar: !this.state.get('sidebar') }),
    });
    this.sidebar = new Sidebar((runs) => set({ runs }), (hiddenLayers) => set({ hiddenLayers }));
    this.legend = new Legend((range) => set({ range }));
    this.grid = new Grid({
      choose: (step, tile) => set({ step, layer: tile.spec.layer }),
      pin: (pinned) => set({ pinned }),
      csv: (tile) => downloadCsv(tile.spec),
    }, (hovered) => this.showHover(hovered));
    const onColumn = (column) => this.grid.cross(column === null ? null : { column, step: this.chosen });
    this.profile = new Profile(this.tooltip, onColumn);
    const [shares, credit] = [new Shares(this.tooltip, onColumn), new Credit(this.tooltip)];
    const panels = { profile: this.profile, shares, credit };
    this.dock = new Dock(panels, {
      set,
      csv: () => this.saveProfile(),
      fail: (error) => this.complain(error),
      nextStep: (direction) => this.nextStep(direction),
    });
    this.problem = el('div', { class: 'banner', role: 'alert', hidden: true });
    this.nothing = el('div', { class: 'nothing', hidden: true });
    this.empty = emptyState();
    this.scroller = el('div', { class: 'scroller' }, this.grid.node, this.nothing);
    this.main = el('main', {}, this.legend.node, this.scroller);
    this.app = el('div', { class: 'app', hidden: true },
      this.toolbar.node, this.sidebar.node, this.main, this.dock.node);
    document.body.append(this.problem, this.app, this.empty, this.tooltip.node, this.tooltip.spoken);
    this.state.subscribe(() => this.update());
  }

  /** `tags` is the list of series, already asked for. */
  start(tags) {
    watchTheme(() => this.redraw());
    // The tab stays alive at height 0 while another one is open: measure again when it comes back.
    new ResizeObserver(() => this.redraw()).observe(this.scroller);
    this.scroller.addEventListener('scroll', () => this.grid.drawVisible(), { passive: true });
    new ResizeObserver(() => this.dock.draw(this.dock.colours)).observe(this.dock.body);
    const channel = new Channel();
    channel.listen('experimental.RunsChanged', () => this.refresh());
    channel.listen('experimental.DataReloaded', () => this.refresh());
    channel.ask('experimental.GetURLPluginData', { pluginName: 'gradient_flow' }).then((data) => {
      if (data?.view) {
        this.state.followLink(data.view);
        this.update();
      }
    });
    this.refresh(tags);
    setInterval(() => {
      if (this.state.get('live') && document.visibilityState === 'visible' && window.innerHeight > 0) this.refresh();
    }, LIVE_SECS * 1000);
  }

  /** Looks for news. Nothing moves if there are none. */
  async refresh(asked = fetchTags()) {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      const tags = await asked;
      this.problem.hidden = true;
      const signature = JSON.stringify(tags);
      if (signature === this.signature) return;
      this.signature = signature;
      this.catalogue = new Catalogue(tags);
      this.update();
    } catch (error) {
      this.complain(error);
    } finally {
      this.refreshing = false;
    }
  }

  update() {
    const { catalogue, state } = this;
    if (!catalogue) return;
    this.app.hidden = catalogue.empty;
    this.empty.hidden = !catalogue.empty;
    document.body.dataset.ready = 'true';
    if (catalogue.empty) return;
    this.view = makeView(state, catalogue);
    this.runColours.assign(this.view.runs);
    const { view } = this;
    this.app.dataset.sidebar = String(state.get('sidebar'));
    this.toolbar.update(view, catalogue.quantities(), state);
    this.sidebar.update(catalogue.runs, view.runs, catalogue.layers(view.runs), state.get('hiddenLayers'),
      (run) => this.runColour(run));
    this.nothing.hidden = view.layers.length > 0;
    this.nothing.textContent = view.runs.length
      ? 'The chosen runs did not log this quantity, or all their layers are hidden.' : 'Choose at least one run.';
    this.grid.arrange(view, (run) => this.runColour(run));
    for (const tile of this.grid.tiles) this.loadTile(tile);
    this.redraw();
  }

  async loadTile(tile) {
    const { spec } = tile;
    const { view } = this;
    if (!spec.series) return;
    const parameters = { run: spec.run, tag: spec.series.tag, align: view.align, minus: view.baseline,
      normalise: view.mode === 'normalised' ? 'last' : 'none' };
    const baseline = view.baseline && this.catalogue.find(view.baseline, spec.layer, view.quantity);
    const version = [spec.series.version, baseline?.version];
    const [what, key] = [JSON.stringify(parameters), JSON.stringify([parameters, version])];
    if (tile.request === key) return;
    // Another picture's pixels under a new caption would be a lie; the same one's, a refresh ago, are not.
    if (!tile.request?.startsWith(`[${what},`)) tile.showMessage('loading …');
    tile.request = key;
    tile.pending = true;
    try {
      const answer = await fetchBinary('heatmap', parameters, version);
      if (tile.request !== key) return;
      answer.picture ??= new Picture(answer);
      tile.show(answer.picture);
    } catch (error) {
      if (tile.request !== key) return;
      tile.request = null;
      tile.showMessage(error.message);
    }
    tile.pending = false;
    if (!this.waiting()) this.redraw();
    else this.redrawLater();
  }

  /** Pictures tend to arrive together: drawing waits a moment for more of them, but not for all. */
  redrawLater() {
    this.patience ??= setTimeout(() => {
      this.patience = null;
      this.redraw();
    }, PATIENCE_SECS * 1000);
  }

  waiting() {
    return this.grid.tiles.some((tile) => tile.spec.series && tile.pending);
  }

  /** Draws once per frame, however many answers arrive in it. */
  redraw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      if (this.view?.tiles.length && window.innerHeight > 0) this.draw();
    });
  }

  draw() {
    const { view } = this;
    const pictures = this.grid.tiles.map((tile) => tile.picture).filter((picture) => picture?.rows);
    const fixed = this.state.get('range');
    this.frame = {
      view,
      range: fixed ?? sharedRange(pictures, view.diverging),
      steps: stepRange(pictures),
      maxTime: Math.max(1, ...pictures.map((picture) => picture.time)),
      colours: themeColours(),
    };
    this.legend.draw(this.frame, fixed === null);
    this.grid.draw(this.frame, this.scroller.clientHeight);
    this.latest = Math.max(0, ...pictures.map((picture) => picture.steps[picture.steps.length - 1]));
    this.chosen = view.step ?? this.latest;
    this.dock.colours = this.frame.colours;
    // The panel's rows can wait until the heat maps are there: both ask the same server.
    if (pictures.length && !this.waiting()) this.updateDock();
    this.app.dataset.drawn = String(this.grid.tiles.filter((tile) => tile.picture).length);
    // For `benchmarks/dashboard.py`: when, after the tab was opened, all heat maps were there.
    if (this.grid.tiles.every((tile) => tile.picture)) performance.mark('gradient_flow.drawn');
  }

  /** Fetches for the panel only if what it shows has changed. */
  updateDock() {
    const { view, state } = this;
    const layer = view.layers.includes(state.get('layer')) ? state.get('layer') : view.layers[0];
    const context = {
      view,
      layer,
      catalogue: this.catalogue,
      chosen: this.chosen,
      pinned: view.pinned,
      follows: view.step === null,
      maxTime: this.frame.maxTime,
      runColour: (run) => this.runColour(run),
    };
    const [panel, height] = [state.get('panel'), state.get('dock')];
    const key = JSON.stringify([view, layer, this.chosen, this.frame.maxTime, panel, height, this.signature]);
    if (key === this.dockKey) this.dock.draw(this.frame.colours);
    else this.dock.update(context, panel, view.layers, height);
    this.dockKey = key;
  }

  /** The kept training step before or after the chosen one, in any of the heat maps. */
  nextStep(direction) {
    const steps = this.grid.tiles.flatMap(({ picture }) => (picture?.rows ? [...picture.steps] : []));
    const distances = steps.map((step) => (step - this.chosen) * direction).filter((distance) => distance > 0);
    const nearest = distances.reduce((a, b) => Math.min(a, b), Infinity);
    return nearest === Infinity ? this.chosen : this.chosen + direction * nearest;
  }

  runColour(run) {
    return this.runColours.of(run, document.documentElement.dataset.theme === 'dark');
  }

  showHover(hovered) {
    if (!hovered) {
      this.tooltip.hide();
      this.legend.point(null);
      this.profile.showColumn(null);
      return;
    }
    const { lines, place, tile } = hovered;
    const { run } = tile.spec;
    this.tooltip.show([...lines, { text: run, colour: this.runColour(run) }], place.x, place.y, place.spoken);
    this.legend.point(lines.cell?.kind === 'number' ? lines.cell.number : null);
    this.profile.showColumn(place.column);
  }

  async copyLink(button) {
    const link = this.state.link();
    try {
      await navigator.clipboard.writeText(link);
    } catch {
      window.prompt('The link to this view:', link);
    }
    button.textContent = 'Copied';
    setTimeout(() => { button.textContent = 'Copy link'; }, 1500);
  }

  async savePng() {
    if (!this.frame || !this.grid.tiles.length) return;
    const profile = this.state.get('panel') === 'profile' && this.profile.context ? this.profile : null;
    const blob = await renderPng(this.grid, this.frame, profile);
    download(blob, `${fileName('gradient_flow', this.view.quantity, this.view.mode)}.png`);
  }

  saveProfile() {
    if (!this.profile.context) return;
    const name = fileName('profile', this.profile.context.layer, this.view.quantity, String(this.chosen));
    download(new Blob([this.profile.csv()], { type: 'text/csv' }), `${name}.csv`);
  }

  complain(error) {
    this.problem.textContent = `The data could not be read: ${error.message}`;
    this.problem.hidden = false;
  }
}

/** The training steps that all heat maps show, so that a line means the same in each. */
function stepRange(pictures) {
  const ends = pictures.flatMap(({ edges, rows }) => [edges.from[0], edges.to[rows - 1]]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  return ends.length && high > low ? [low, high] : [0, 1];
}

export function render() {
  document.title = 'Gradient Flow';
  document.documentElement.lang = 'en';
  const style = el('link', { rel: 'stylesheet', href: new URL('style.css', import.meta.url) });
  const tags = fetchTags();
  tags.catch(() => {}); // `refresh` reports it
  // Sizes are measured from the first drawing on, so the style must be there.
  style.addEventListener('load', () => new Dashboard().start(tags), { once: true });
  document.head.append(style);
}
