// A heat map's data as it came from the server (dashboard/server/binning.py), and how it becomes pixels.

export const CODES = { padding: 0, zero: 1, first: 2, last: 65533, inf: 65534, nan: 65535 };

export class Picture {
  /** `answer` is a decoded /heatmap (or /matrix, which has no steps). */
  constructor(answer) {
    Object.assign(this, answer);
    [this.rows, this.columns] = answer.codes_shape;
    this.centre = this.merged_by === 'magnitude' && this.high > this.low
      ? CODES.first - (this.low * (CODES.last - CODES.first)) / (this.high - this.low) : null;
    if (answer.step_gaps) {
      this.steps = new Float64Array(answer.step_gaps.length);
      let step = answer.first_step;
      for (let i = 0; i < this.steps.length; i++) this.steps[i] = step += answer.step_gaps[i];
      this.edges = rowEdges(this);
      this.whole = this.rows > 0 && !this.codes.includes(CODES.padding)
        && this.edges.to.every((to, row) => row + 1 === this.rows || to >= this.edges.from[row + 1]);
    }
  }

  /** What a code stands for: {kind: 'number' | 'zero' | 'inf' | 'nan' | 'padding', number}. */
  read(code) {
    if (code >= CODES.first && code <= CODES.last) {
      const share = (code - CODES.first) / (CODES.last - CODES.first);
      return { kind: 'number', number: this.low + share * (this.high - this.low) };
    }
    return { kind: { 0: 'padding', 1: 'zero', 65534: 'inf', 65535: 'nan' }[code] };
  }

  at(row, column) {
    return this.read(this.codes[row * this.columns + column]);
  }

  /** The first and last training step that went into a row, and how many kept rows. */
  extent(row) {
    const end = row + 1 < this.rows ? this.starts[row + 1] : this.steps.length;
    return { first: this.steps[this.starts[row]], last: this.steps[end - 1], count: end - this.starts[row] };
  }

  /** The row drawn at a training step, or -1 in a gap. */
  rowAt(step) {
    let [low, high] = [0, this.rows - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.edges.from[middle] <= step) low = middle;
      else high = middle - 1;
    }
    return this.rows && step >= this.edges.from[low] && step <= this.edges.to[low] ? low : -1;
  }

  get nonfiniteRows() {
    return this.nonfinite.reduce((sum, count) => sum + count, 0);
  }

  /** How often numbers occur, in 1,024 classes: [[number, count]…]. Computed once. */
  histogram() {
    if (!this.counts) {
      const counts = new Uint32Array(1024);
      for (const code of this.codes) if (code >= CODES.first && code <= CODES.last) counts[(code - CODES.first) >> 6]++;
      const perClass = ((this.high - this.low) * 64) / (CODES.last - CODES.first);
      this.counts = [];
      counts.forEach((count, i) => count && this.counts.push([this.low + (i + 0.5) * perClass, count]));
    }
    return this.counts;
  }
}

/** Each row reaches half-way to its neighbours, but not across a long stretch in which nothing was logged. */
function rowEdges(picture) {
  const { rows, steps } = picture;
  const gaps = Float64Array.from(steps.subarray(1), (step, i) => step - steps[i]).sort();
  const usual = gaps.length ? gaps[gaps.length >> 1] : Math.max(1, steps[0] / 2 || 1);
  const from = new Float64Array(rows);
  const to = new Float64Array(rows);
  let previousLast = null;
  for (let row = 0; row < rows; row++) {
    const { first, last } = picture.extent(row);
    // Kept rows are a random sample: gaps of ten times the usual one happen by chance.
    const half = previousLast === null ? usual / 2 : Math.min((first - previousLast) / 2, usual * 12);
    from[row] = row ? first - half : Math.max(first - half, Math.min(first, 0));
    if (row) to[row - 1] = previousLast + half;
    to[row] = last + usual / 2;
    previousLast = last;
  }
  return { from, to };
}

/** The colours of rows relative to their largest value, in log10; what lies below has vanished. */
export const RELATIVE_RANGE = [-6, 0];

/** The colours' range over all pictures: 1st to 99th percentile, symmetric about 0 for a diverging map. */
export function sharedRange(pictures, diverging) {
  const classes = pictures.flatMap((picture) => (picture.low === null ? [] : picture.histogram()));
  if (!classes.length) return diverging ? [-1, 1] : [-1, 0];
  classes.sort((a, b) => a[0] - b[0]);
  const total = classes.reduce((sum, [, count]) => sum + count, 0);
  const percentile = (share) => {
    let seen = 0;
    for (const [number, count] of classes) if ((seen += count) >= share * total) return number;
    return classes[classes.length - 1][0];
  };
  let [low, high] = [percentile(0.01), percentile(0.99)];
  if (diverging) {
    const reach = Math.max(Math.abs(low), Math.abs(high), 0.1);
    return [-reach, reach];
  }
  // At least two decades: a factor of 1.5 must not fill the whole scale.
  if (high - low < 2) [low, high] = [(low + high) / 2 - 1, (low + high) / 2 + 1];
  return [low, high];
}

/**
 * Paints a picture into `image` (ImageData). Several cells in one pixel are merged as on the server, so that a
 * single bad row stays visible however small the picture is. `rowsAt(pixel)` and `columnsAt(pixel)` give the
 * cells [from, to) of a pixel; an empty interval stays transparent.
 */
export function paint(picture, colours, image, rowsAt, columnsAt) {
  const pixels = new Uint32Array(image.data.buffer);
  const { codes, columns, centre } = picture;
  const line = new Uint16Array(columns);
  const spans = Array.from({ length: image.width }, (_, x) => columnsAt(x));
  let [lastFrom, lastTo] = [-1, -1];
  for (let y = 0; y < image.height; y++) {
    const [from, to] = rowsAt(y);
    if (from >= to) {
      lastFrom = -1;
      continue;
    }
    if (from === lastFrom && to === lastTo) {
      pixels.copyWithin(y * image.width, (y - 1) * image.width, y * image.width);
      continue;
    }
    [lastFrom, lastTo] = [from, to];
    line.set(codes.subarray(from * columns, (from + 1) * columns));
    for (let row = from + 1; row < to; row++) {
      for (let column = 0; column < columns; column++) {
        line[column] = merge(line[column], codes[row * columns + column], centre);
      }
    }
    for (let x = 0; x < image.width; x++) {
      const [start, end] = spans[x];
      if (start >= end) continue;
      let code = line[start];
      for (let column = start + 1; column < end; column++) code = merge(code, line[column], centre);
      pixels[y * image.width + x] = colours[code];
    }
  }
}

function merge(a, b, centre) {
  if (centre !== null && a >= CODES.first && a <= CODES.last && b >= CODES.first && b <= CODES.last) {
    return Math.abs(b - centre) > Math.abs(a - centre) ? b : a;
  }
  return a > b ? a : b;
}
