// Talking to the plugin's server. Addresses are relative to this module, so a path prefix does not matter.

const ROOT = new URL('../../../', import.meta.url);
const ARRAYS = { float32: Float32Array, uint16: Uint16Array, uint32: Uint32Array };
const MAX_CACHED = 150;

export function address(route, parameters = {}) {
  const url = new URL(route, ROOT);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  return url;
}

async function request(route, parameters) {
  const response = await fetch(address(route, parameters));
  if (!response.ok) throw new Error((await response.text()) || `The server answered ${response.status}.`);
  return response;
}

/** Reads the container that `dashboard/server/payload.py` describes; returns {header fields…, name: typed array…}. */
export function decode(buffer) {
  const magic = new TextDecoder().decode(new Uint8Array(buffer, 0, 4));
  if (magic !== 'GFLW') throw new Error(`Expected data, got something that begins with ${JSON.stringify(magic)}.`);
  const length = new DataView(buffer).getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  for (const { name, dtype, shape, offset } of header.arrays) {
    const size = shape.reduce((product, side) => product * side, 1);
    header[name] = new ARRAYS[dtype](buffer, Number(offset), size);
    header[`${name}_shape`] = shape;
  }
  return header;
}

export async function fetchTags() {
  return (await request('tags')).json();
}

export async function fetchVerdicts(run) {
  return (await request('verdicts', { run })).json();
}

/** The gradient at each position of each layer, at the kept step nearest to `step`; the last one for null. */
export async function fetchPositions(run, step) {
  return (await request('positions', { run, step })).json();
}

/** A health quantity of every variable of a run over training, in the form of the overview's `updates`. */
export async function fetchVariables(run, quantity) {
  return (await request('variables', { run, quantity })).json();
}

export async function fetchOverview(run) {
  return (await request('overview', { run })).json();
}

const answers = new Map();

/** Fetches a binary route once per (parameters, version); `version` only tells new data from old. */
export function fetchBinary(route, parameters, version) {
  const key = JSON.stringify([route, parameters, version]);
  if (!answers.has(key)) {
    const answer = request(route, parameters).then((response) => response.arrayBuffer()).then(decode);
    answers.set(key, answer);
    answer.catch(() => answers.delete(key));
    if (answers.size > MAX_CACHED) answers.delete(answers.keys().next().value);
  }
  return answers.get(key);
}
