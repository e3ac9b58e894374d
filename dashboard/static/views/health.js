// Run health, the landing view: a card per run, how far updates move each layer, and what the losses do to each other.

import { el } from '../draw/dom.js';
import { formatStep, formatValue } from '../draw/numbers.js';
import { sparkline } from '../draw/sparkline.js';
import { whyLink } from './strip.js';
import { LossMix } from './loss_mix.js';
import { pointsOf } from './losses.js';
import { DEAD, LayerMap } from './layer_map.js';
import { Measures } from './measures.js';
import { Positions } from './positions.js';

const MOST = 3; // findings on a card

export class Health {
  /** `actions`: show(run, layer or null, step or null) opens the time steps; measure(field) chooses the map of layers. */
  constructor(tooltip, actions) {
    this.actions = actions;
    this.cards = el('div', { class: 'health-cards' });
    this.measures = new Measures(tooltip, actions);
    this.dead = new LayerMap(DEAD, tooltip, actions);
    this.positions = new Positions(tooltip, actions);
    this.mix = new LossMix(tooltip);
    this.note = el('p', { class: 'muted health-note' });
    this.node = el('div', { class: 'health', role: 'region', 'aria-label': 'Run health', tabindex: '0' },
      this.cards, this.measures.node, this.mix.node, this.positions.node, this.dead.node, this.note);
  }

  /** `runs`: [{run, name, colour, overview or null, verdict: {known, word, tone}, findings, layers}]. */
  update(runs, catalogue, measure) {
    const signature = JSON.stringify(runs.map(({ run, colour, overview, findings, verdict }) =>
      [run, colour, overview?.version, verdict.known, findings.map(({ text }) => text)]));
    if (signature !== this.signature) {
      this.signature = signature;
      this.cards.replaceChildren(...runs.map((item) => this.card(item)));
    }
    const known = runs.filter(({ overview }) => overview);
    this.measures.update(known, catalogue, measure);
    this.dead.update(known, catalogue);
    this.positions.update(runs.map((item) => ({ ...item, series: catalogue.positions(item.run) }))
      .filter(({ series }) => series.length));
    this.mix.update(known.filter(({ overview }) => Object.keys(overview.shares).length > 1));
    this.note.textContent = advice(runs, known);
    this.note.hidden = !this.note.textContent;
    this.node.dataset.known = String(known.length);
  }

  draw(colours) {
    for (const map of [this.measures, this.dead]) map.draw(colours);
    this.positions.draw(colours);
    this.mix.draw(colours);
  }

  card({ run, name, colour, overview, verdict, findings, layers }) {
    const waiting = verdict.known ? (layers.length ? 'no verdict' : 'no time steps') : 'reading …';
    const head = el('h2', {}, el('span', { class: 'swatch', style: { background: colour } }),
      el('span', { class: 'run-name', title: run }, name),
      el('span', { class: 'verdict', data: { tone: verdict.tone } }, el('i', { class: 'dot' }),
        verdict.word ?? waiting));
    const timed = findings.find(({ time }) => time);
    const open = layers.length > 0 && el('button', { type: 'button', class: 'quiet',
      onclick: () => this.actions.show(run, timed?.layer ?? null, null) }, timed ? 'Time steps →' : 'Positions →');
    const figures = overview ? numbers(overview, colour) : [el('p', { class: 'muted' }, 'reading …')];
    return el('article', { class: 'health-card', data: { run, tone: verdict.tone } }, head, ...figures,
      ...sentences(findings), open);
  }
}

/** The worst findings of a run, each with its own dot and word after the first; what to try stands once for each word. */
function sentences(findings) {
  // One of each word first: of three layers without a gradient and one whose units are dead, the last is the reason.
  const isFirst = new Set(new Map([...findings].reverse().map((finding) => [finding.word, finding])).values());
  const order = [...findings.filter((one) => isFirst.has(one)), ...findings.filter((one) => !isFirst.has(one))];
  const chosen = new Set(order.slice(0, MOST));
  const shown = findings.filter((one) => chosen.has(one)).map((one, i) => {
    const { word, tone, text, advice: hint, why } = one;
    return el('p', { class: 'finding' },
      i > 0 && el('span', { class: 'verdict', data: { tone } }, el('i', { class: 'dot' }), el('b', {}, `${word}:`)), text,
      isFirst.has(one) && hint && el('span', { class: 'muted' }, ` Try: ${hint}`), ' ',
      isFirst.has(one) && tone !== 'good' && whyLink({ word, why }));
  });
  const more = findings.length - shown.length;
  return more > 0 ? [...shown, el('p', { class: 'muted' }, `and ${more} more: see Verdicts in Time steps, or the report`)] : shown;
}

/** The loss as a small curve, and the numbers of a run. */
function numbers(overview, colour) {
  const losses = [[overview.loss_tag ?? 'loss', overview.loss], ...Object.entries(overview.other_losses ?? {})]
    .map(([name, curve]) => [name, pointsOf(curve)]);
  const last = (points) => points[points.length - 1]?.[1];
  const evaluated = last(pointsOf(overview.evaluations));
  const speed = pointsOf(overview.speed).slice(-5).map(([, value]) => value).sort((a, b) => a - b);
  const entries = [
    ...losses.map(([name, points]) => [name, points.length ? formatValue(last(points)) : '–']),
    ['evaluation', evaluated === undefined ? '–' : formatValue(evaluated)],
    ['skipped', formatStep(overview.skipped), overview.skipped > 0],
    ['NaN losses', formatStep(overview.nonfinite), overview.nonfinite > 0],
    ['examples/s', speed.length ? formatStep(speed[speed.length >> 1]) : '–'],
    ...Object.entries(overview.acted ?? {}).map(([layer, curve]) => [`${layer} steered`, `${percent(meanOf(curve))} of the time steps`]),
  ];
  return [
    ...losses.map(([name, points]) => lossLine(name, points, colour)),
    el('dl', {}, ...entries.map(([name, value, alarming]) => el('div', {}, el('dt', {}, name),
      el('dd', { class: alarming ? 'alarming' : '' }, value)))),
  ];
}

/** A loss as a small curve, logarithmic where it can be. */
function lossLine(name, points, colour) {
  const logarithmic = points.every(([, value]) => value > 0);
  const drawn = points.map(([step, value]) => [step, logarithmic ? Math.log10(value) : value]);
  const label = points.length ? `${name} over training: ${formatValue(points[0][1])} to ${formatValue(points[points.length - 1][1])}` : '';
  return sparkline(drawn, { width: 240, height: 40, label, colour })
    ?? el('p', { class: 'muted' }, `${name}: fewer than two logged losses`);
}

export function meanOf(curve) {
  const values = pointsOf(curve).map(([, value]) => value);
  return values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
}

export function percent(share) {
  return `${formatValue(Number((100 * share).toPrecision(2)))} %`;
}

/** What could be logged besides, for who sees little. */
function advice(runs, known) {
  if (!runs.length) return 'Choose at least one run.';
  const hints = [];
  if (known.length && !known.some(({ overview }) => overview.updates)) {
    hints.push('Trainer(…, health_every=50), or --health_every=50, adds how far each update moves each layer.');
  }
  if (runs.every(({ layers }) => !layers.length)) {
    hints.push('Time steps need a recurrent layer, or probe(name, state, t) in a loop of your own, and probe_every. '
      + 'With several losses and without a loop, probe_every measures their gradients: see shares and conflicts here.');
  }
  return hints.join(' ');
}
