// The verdict strip above the heat maps: a card per run and layer, worst first, with a sentence that answers.

import { address } from '../data/api.js';
import { el } from '../draw/dom.js';
import { sparkline } from '../draw/sparkline.js';


export class Strip {
  /** `onChoose(finding, run)`: a card was pressed. */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.node = el('div', { class: 'strip', role: 'region', 'aria-label': 'Verdicts', tabindex: '0' });
  }

  update(view, verdicts, runColour, shortName) {
    // Praise that is not about time steps stands in run health; here it would push the others out.
    const cards = view.runs.flatMap((run) => verdicts.of(run).filter(({ time, tone }) => time || tone !== 'good')
      .map((finding) => ({ run, finding })));
    cards.sort((a, b) => a.finding.rank - b.finding.rank);
    const reading = !view.runs.every((run) => verdicts.summary(run).known);
    this.node.dataset.empty = String(!cards.length && !reading);
    const signature = JSON.stringify([reading, cards, cards.map(({ run }) => runColour(run))]);
    if (signature === this.signature) return;
    this.signature = signature;
    this.node.replaceChildren(...cards.map(({ run, finding }) => this.card(run, finding, runColour, shortName)));
    if (!cards.length && reading) this.node.append(el('span', { class: 'muted' }, 'Reading the rows for a verdict …'));
  }

  card(run, finding, runColour, shortName) {
    return el('article', { class: 'card', data: { tone: finding.tone, run, layer: finding.layer ?? '' } },
      el('button', { type: 'button', class: 'card-head', title: finding.time ? `Show ${finding.layer} in the panel below` : 'Show the health of this run',
        onclick: () => this.onChoose(finding, run) },
        el('i', { class: 'dot' }), el('b', {}, finding.word),
        el('span', { class: 'swatch', style: { background: runColour(run) } }),
        el('span', { class: 'run-name' }, shortName(run))),
      el('p', {}, finding.text, finding.advice && el('span', { class: 'advice' }, ` Try: ${finding.advice}`),
        ' ', whyLink(finding)),
      horizonLine(finding));
  }
}

/** A link to why a finding is made and what to do. */
export function whyLink({ word, why }) {
  return el('a', { class: 'why', href: `${address('why')}#${why}`, target: '_blank', rel: 'noopener',
    'aria-label': `${word}: why, and what to do` }, 'Why?');
}

/** The horizon over training, from 0 to all time steps; gaps where it is not defined. */
function horizonLine({ horizons, steps, time, source }) {
  const points = horizons.map((value, i) => [steps[i], value]).filter(([, value]) => value !== null);
  if (points.length < 2 || !time) return null;
  const label = `Horizon over training, from the ${source}: ${points[0][1]} to ${points[points.length - 1][1]}`;
  return sparkline(points, { width: 72, height: 20, range: [0, time], label });
}
