// The dashboard: TensorBoard imports this module into an iframe and calls `render`.

import { fetchBinary, fetchTags } from './data/api.js';
import { Catalogue, POSITIONS, shortNames } from './data/catalogue.js';
import { Channel } from './data/channel.js';
import { RunColours } from './draw/colours.js';
import { Credit } from './views/credit.js';
import { Dock } from './views/dock.js';
import { el } from './draw/dom.js';
import { emptyState, noTimeSteps } from './views/empty.js';
import { download, downloadCsv, fileName, renderPng } from './controls/export.js';
import { Grid } from './views/grid.js';
import { Health } from './views/health.js';
import { Legend } from './controls/legend.js';
import { Overviews } from './data/overviews.js';
import { Picture, RELATIVE_RANGE, sharedRange } from './data/picture.js';
import { Profile } from './views/profile.js';
import { Scrubber } from './controls/scrubber.js';
import { Shares } from './views/shares.js';
import { Sidebar } from './controls/sidebar.js';
import { State } from './data/state.js';
import { Strip } from './views/strip.js';
import { themeColours, watchTheme } from './draw/theme.js';
import { Toolbar } from './controls/toolbar.js';
import { Tooltip } from './controls/tooltip.js';
import { Verdicts } from './data/verdicts.js';
import { extent, makeView } from './data/view.js';

// Imported by the modules above; named here so that the browser asks for all files at once.
import './draw/axes.js';
import './draw/heatmap.js';
import './draw/numbers.js';
import './draw/sparkline.js';
import './draw/units.js';
import './data/rows.js';
import './views/loss_mix.js';
import './views/losses.js';
import './views/tile.js';
import './views/layer_map.js';
import './views/measures.js';
import './views/positions.js';

const LIVE_SECS = 5;
const PATIENCE_SECS = 0.15;

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
    this.verdicts = new Verdicts(() => { this.showVerdicts(); this.showOverviews(); }, () => this.untilIdle());
    this.overviews = new Overviews(() => this.showOverviews());
    this.strip = new Strip((finding, run) => this.chooseFinding(finding, run));
    this.health = new Health(this.tooltip, { show: (...where) => this.showTimeSteps(...where),
      measure: (measure) => set({ measure }) });
    this.legend = new Legend((range) => set({ range }));
    this.grid = new Grid({
      choose: (step, tile) => set({ step, layer: tile.spec.layer }),
      pin: (pinned) => set({ pinned }),
      csv: (tile) => downloadCsv(tile.spec),
      zoom: (zoom) => set({ zoom }),
    }, (hovered) => this.showHover(hovered));
    const onColumn = (column) => this.grid.cross(column === null ? null : { column, step: this.chosen });
    this.profile = new Profile(this.tooltip, onColumn);
    const [shares, credit] = [new Shares(this.tooltip, onColumn), new Credit(this.tooltip)];
    const panels = { profile: this.profile, shares, credit };
    this.scrubber = new Scrubber((step, trail) => this.scrub(step, trail));
    this.dock = new Dock(panels, this.scrubber, {
      set,
      csv: () => this.saveProfile(),
      fail: (error) => this.complain(error),
      nextStep: (direction) => this.nextStep(direction),
    });
    this.problem = el('div', { class: 'banner', role: 'alert', hidden: true });
    this.nothing = el('div', { class: 'nothing', hidden: true });
    this.empty = emptyState();
    this.scroller = el('div', { class: 'scroller' }, this.grid.node, this.nothing);
    this.main = el('main', {}, this.strip.node, this.legend.node, this.scroller, this.health.node);
    this.app = el('div', { class: 'app', hidden: true },
      this.toolbar.node, this.sidebar.node, this.main, this.dock.node);
    document.body.append(this.problem, this.app, this.empty, this.tooltip.node, this.tooltip.spoken);
    this.state.subscribe((names) => this.follow(names));
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

  /** After the user changed something. Another training step moves lines and the panel; the heat maps stay. */
  follow(names) {
    if (!names.every((name) => ['step', 'pinned'].includes(name)) || !this.frame) {
      this.update();
      return;
    }
    const [step, pinned] = [this.state.get('step'), this.state.get('pinned')];
    this.view = { ...this.view, step, pinned };
    this.frame.view = this.view;
    this.chosen = step ?? this.latest;
    this.grid.mark(step, pinned);
    this.updateDock();
  }

  update() {
    const { catalogue, state } = this;
    if (!catalogue) return;
    this.app.hidden = catalogue.empty;
    this.empty.hidden = !catalogue.empty;
    document.body.dataset.ready = 'true';
    if (catalogue.empty) return;
    this.view = makeView(state, catalogue);
    this.runColours.assign([...catalogue.order, ...catalogue.runs]);
    this.names = shortNames(catalogue.runs);
    const { view } = this;
    const flow = view.page === 'flow';
    const bare = flow && !view.tiles.some((spec) => spec.series);
    this.app.dataset.sidebar = String(state.get('sidebar'));
    this.app.dataset.page = bare ? 'bare' : view.page;
    this.strip.node.hidden = !flow;
    for (const part of [this.legend, this.dock]) part.node.hidden = !flow || bare;
    this.scroller.hidden = !flow;
    this.health.node.hidden = flow;
    this.toolbar.update(view, catalogue.quantities(), state);
    this.showVerdicts();
    this.showOverviews();
    this.nothing.hidden = !bare;
    if (!flow || bare) {
      this.app.dataset.drawn = '0';
      this.overviews.follow(catalogue, view.runs);
      this.verdicts.follow(catalogue, view.runs);
    }
    if (!flow) return;
    if (bare) {
      this.nothing.replaceChildren(...noTimeSteps(view, catalogue, state.get('hiddenLayers'), (changes) => state.set(changes)));
    }
    this.grid.arrange(view, (run) => this.runColour(run));
    for (const tile of this.grid.tiles) this.loadTile(tile);
    this.redraw();
  }

  /** The table of runs and the strip: now with what is known, again when the server has answered. */
  showVerdicts() {
    const { catalogue, view, state, verdicts } = this;
    const rows = catalogue.runs.map((run) => ({ run, name: this.names.get(run), shown: view.runs.includes(run),
      colour: this.runColour(run), summary: verdicts.summary(run) }));
    this.sidebar.update(rows, catalogue.layers(view.runs), state.get('hiddenLayers'));
    const names = view.runs.length > 1 ? shortNames(view.runs) : this.names;
    this.strip.update(view, verdicts, (run) => this.runColour(run), (run) => names.get(run) ?? run);
  }

  /** Run health, and the loss beside the heat maps: what each run did as a whole. */
  showOverviews() {
    const { catalogue, view, overviews, verdicts } = this;
    const known = view.runs.map((run) => ({ run, name: this.names.get(run) ?? run, colour: this.runColour(run),
      overview: overviews.of(run) }));
    if (view.page === 'flow') {
      this.grid.showLosses(known.filter(({ overview }) => overview));
      return;
    }
    this.health.update(known.map((item) => ({ ...item, verdict: verdicts.summary(item.run),
      findings: verdicts.of(item.run), layers: catalogue.layersOf(item.run) })), catalogue, view.measure);
    // For `benchmarks/dashboard.py`: when, after the tab was opened, all cards were there.
    if (known.every(({ overview }) => overview)) performance.mark('gradient_flow.health');
    this.redraw();
  }

  /** From run health to the time steps or positions of a layer (by the run's own name of it), or of the whole run. */
  showTimeSteps(run, layer, step, quantity = this.quantityFor(run, layer)) {
    const runs = this.view.runs.includes(run) ? this.view.runs : [run];
    const titles = this.catalogue.layers(runs);
    const title = titles.find((known) => this.catalogue.nameIn(run, known) === layer) ?? null;
    this.state.set({ page: 'flow', layer: title, step, quantity, zoom: null });
    requestAnimationFrame(() => this.grid.sections.get(title)?.node.scrollIntoView({ block: 'nearest' }));
  }

  /** The present quantity if the layer has it, else its state gradient or its positions. */
  quantityFor(run, layer) {
    const present = this.state.get('quantity');
    const has = (quantity) => layer === null || this.catalogue.has(run, layer, quantity);
    return has(present) || !(has('state') || has(POSITIONS)) ? present : has('state') ? 'state' : POSITIONS;
  }

  /** A card leads to its layer: the panel shows it, and its heat map scrolls into sight. */
  chooseFinding(finding, run) {
    const layer = this.view.layers.find((title) => this.catalogue.nameIn(run, title) === finding.layer);
    if (layer === undefined || !finding.time) {
      this.state.set({ page: 'health' }); // it is about variables, losses or batches
      return;
    }
    this.state.set({ layer });
    this.grid.sections.get(layer)?.node.scrollIntoView({ block: 'nearest' });
  }

  async loadTile(tile) {
    const { spec } = tile;
    const { view } = this;
    if (!spec.series) return;
    const baseline = view.baseline && this.catalogue.find(view.baseline, spec.layer, view.quantity);
    const parameters = { run: spec.run, tag: spec.series.tag, align: view.align, minus: view.baseline,
      minus_tag: baseline?.tag, normalise: { normalised: 'last', relative: 'largest' }[view.mode] ?? 'none' };
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

  /** Resolves when no heat map is on its way: what nobody looks at can wait. */
  async untilIdle() {
    do await new Promise((done) => setTimeout(done, PATIENCE_SECS * 1000)); while (this.waiting() || !this.settled());
  }

  /** Whether the page has what it shows first. */
  settled() {
    return this.view?.page === 'flow' || this.view?.runs.every((run) => this.overviews.of(run) || this.overviews.failed(run));
  }

  waiting() {
    return this.grid.tiles.some((tile) => tile.spec.series && tile.pending);
  }

  /** Draws once per frame, however many answers arrive in it. */
  redraw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      if (window.innerHeight === 0 || !this.view) return;
      if (this.view.page === 'health') this.health.draw(themeColours());
      else if (this.view.tiles.length) this.draw();
    });
  }

  draw() {
    const { view } = this;
    const pictures = this.grid.tiles.map((tile) => tile.picture).filter((picture) => picture?.rows);
    const fixed = this.state.get('range');
    const maxTime = Math.max(1, ...pictures.map((picture) => picture.time));
    this.frame = {
      view,
      range: fixed ?? (view.mode === 'relative' ? RELATIVE_RANGE : sharedRange(pictures, view.diverging)),
      ...extent(pictures, maxTime, view.zoom),
      maxTime,
      colours: themeColours(),
    };
    this.legend.draw(this.frame, fixed === null);
    this.grid.draw(this.frame, this.scroller.clientHeight);
    this.latest = Math.max(0, ...pictures.map((picture) => picture.steps[picture.steps.length - 1]));
    this.chosen = view.step ?? this.latest;
    this.dock.colours = this.frame.colours;
    // The panel's rows can wait until the heat maps are there: both ask the same server.
    if (pictures.length && !this.waiting()) {
      this.updateDock();
      this.verdicts.follow(this.catalogue, view.runs);
      this.overviews.follow(this.catalogue, view.runs);
    }
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
      time: this.frame.time,
      trail: this.trail,
      runColour: (run) => this.runColour(run),
      shortName: (run) => this.names.get(run) ?? run,
    };
    const [panel, height] = [state.get('panel'), state.get('dock')];
    const key = JSON.stringify([view, layer, this.chosen, this.frame.maxTime, panel, height, this.signature]);
    this.scrubber.update(this.keptSteps(), this.chosen);
    if (key === this.dockKey) this.dock.draw(this.frame.colours);
    else this.loading = this.dock.update(context, panel, view.layers, height);
    this.dockKey = key;
  }

  /** Shows a training step from the scrubber; settles when the panel shows it. */
  async scrub(step, trail) {
    this.trail = trail;
    this.state.set({ step });
    this.trail = false;
    await this.loading;
  }

  /** The kept training steps of all heat maps, within the zoom, increasing. */
  keptSteps() {
    const [low, high] = this.frame.steps;
    const steps = this.grid.tiles.flatMap(({ picture }) => (picture?.rows ? [...picture.steps] : []));
    return [...new Set(steps)].filter((step) => step >= low && step <= high).sort((a, b) => a - b);
  }

  /** The kept training step before or after the chosen one, in any of the heat maps. */
  nextStep(direction) {
    const steps = this.keptSteps();
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
