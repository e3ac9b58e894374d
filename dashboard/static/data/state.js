// What the user chose: one object, remembered in localStorage and carried by links.

const PLUGIN = 'gradient_flow';
const STORAGE_KEY = `${PLUGIN}.view`;
const LINK_KEY = `p.${PLUGIN}.view`;

export const DEFAULTS = {
  page: 'health', // or 'flow': the gradients of every time step
  measure: 'updates', // what the map of layers in run health shows; see `layer_map.js`
  quantity: 'state',
  align: 'start', // or 'end': time steps counted back from the end
  mode: 'relative', // to the row's largest value; or 'absolute', 'normalised', 'difference'
  baseline: null, // the run that is subtracted in 'difference'
  runs: null, // names; null means "the newest few"
  hiddenLayers: [],
  layer: null, // the one that the panel below shows
  panel: 'profile', // a name among the dock's panels
  step: null, // null means "the latest"
  pinned: null,
  zoom: null, // {steps: [first, last], time: [first column, last column)} of the heat maps
  range: null, // [low, high] of the colours; null means automatic
  live: true,
  sidebar: window.innerWidth >= 600, // on a telephone it would cover everything
  dock: 250,
};

// What a link does not carry: how somebody arranges their window is nobody else's business.
const PRIVATE = ['live', 'sidebar', 'dock'];
// What is remembered from one log directory to the next; names and steps belong to one of them.
const REMEMBERED = [...PRIVATE, 'quantity', 'align', 'panel'];

const CHECKS = {
  page: (value) => ['health', 'flow'].includes(value),
  zoom: (value) => value === null || (isRange(value?.steps) && isRange(value?.time)),
  measure: (value) => ['updates', 'ratio', 'gradient', 'weight', 'zeros'].includes(value),
  quantity: isText,
  align: (value) => ['start', 'end'].includes(value),
  mode: (value) => ['relative', 'absolute', 'normalised', 'difference'].includes(value),
  baseline: (value) => value === null || isText(value),
  runs: (value) => value === null || isTexts(value),
  hiddenLayers: isTexts,
  layer: (value) => value === null || isText(value),
  panel: isText,
  step: isStep,
  pinned: isStep,
  range: (value) => value === null || isRange(value),
  live: (value) => typeof value === 'boolean',
  sidebar: (value) => typeof value === 'boolean',
  dock: (value) => Number.isFinite(value) && value >= 120 && value <= 2000,
};

function isRange(value) {
  return Array.isArray(value) && value.length === 2 && value.every(Number.isFinite) && value[0] < value[1];
}

function isText(value) {
  return typeof value === 'string';
}

function isTexts(value) {
  return Array.isArray(value) && value.every(isText);
}

function isStep(value) {
  return value === null || (Number.isSafeInteger(value) && value >= 0);
}

/** Keeps of `candidate` what is known and well-formed: it may come from an old version or a mistyped link. */
export function sanitise(candidate) {
  const clean = {};
  if (candidate === null || typeof candidate !== 'object') return clean;
  for (const [name, check] of Object.entries(CHECKS)) {
    if (name in candidate && check(candidate[name])) clean[name] = candidate[name];
  }
  return clean;
}

function parse(text) {
  try {
    return sanitise(JSON.parse(text));
  } catch {
    return {};
  }
}

function fromParentHash() {
  try {
    for (const part of window.parent.location.hash.slice(1).split('&')) {
      const [name, value] = part.split('=');
      if (decodeURIComponent(name) === LINK_KEY && value) return decodeURIComponent(value);
    }
  } catch {
    // Another origin, or a malformed escape: then there is no link to follow.
  }
  return null;
}

export class State {
  constructor() {
    this.listeners = [];
    let remembered = {};
    try {
      remembered = parse(localStorage.getItem(STORAGE_KEY));
    } catch {
      // Storage may be forbidden; the dashboard works without.
    }
    this.values = { ...DEFAULTS, ...remembered };
    this.followLink(fromParentHash());
  }

  /** Takes over a link's view. What it does not name goes back to its default; a link without a page is to time steps. */
  followLink(text) {
    if (!text) return;
    const kept = Object.fromEntries(PRIVATE.map((name) => [name, this.values[name]]));
    this.values = { ...DEFAULTS, page: 'flow', ...kept, ...parse(text) };
  }

  get(name) {
    return this.values[name];
  }

  set(changes) {
    this.values = { ...this.values, ...sanitise(changes) };
    try {
      const remembered = Object.fromEntries(REMEMBERED.map((name) => [name, this.values[name]]));
      localStorage.setItem(STORAGE_KEY, JSON.stringify(remembered));
    } catch {
      // As above.
    }
    this.writeHash();
    for (const listener of this.listeners) listener(Object.keys(changes));
  }

  subscribe(listener) {
    this.listeners.push(listener);
  }

  /** The address of this view: what the "Copy link" button copies. */
  link() {
    const shared = Object.entries(this.values).filter(([name, value]) =>
      !PRIVATE.includes(name) && JSON.stringify(value) !== JSON.stringify(DEFAULTS[name]));
    if (shared.length && this.values.page === DEFAULTS.page) shared.unshift(['page', DEFAULTS.page]);
    const view = encodeURIComponent(JSON.stringify(Object.fromEntries(shared)));
    let base = window.location.href;
    try {
      base = window.parent.location.href;
    } catch {
      // Another origin.
    }
    const url = new URL(base);
    url.hash = shared.length ? `${PLUGIN}&${encodeURIComponent(LINK_KEY)}=${view}` : PLUGIN;
    return url.toString();
  }

  /** Keeps the address bar in step, so that reloading the page shows the same view. */
  writeHash() {
    try {
      const hash = window.parent.location.hash.slice(1);
      if (hash === PLUGIN || hash.startsWith(`${PLUGIN}&`)) {
        window.parent.history.replaceState(window.parent.history.state, '', this.link());
      }
    } catch {
      // Another origin: links then come from the button only.
    }
  }
}
