// The server's findings per run (dashboard/rules/verdicts.py), fetched one run after the other, chosen runs first.

import { fetchVerdicts } from './api.js';

export class Verdicts {
  /** `onNews()` after each answer. `idle()`: a promise to wait for before runs that nobody chose are asked about. */
  constructor(onNews, idle) {
    this.onNews = onNews;
    this.idle = idle;
    this.answers = new Map(); // run → {version, findings, loss}
    this.wanted = [];
  }

  /** Asks for what is new of all runs, `chosen` first. */
  follow(catalogue, chosen) {
    const runs = [...chosen, ...catalogue.runs.filter((run) => !chosen.includes(run))];
    this.wanted = runs.map((run) => ({ run, version: catalogue.version(run), urgent: chosen.includes(run) }))
      .filter(({ run, version }) => this.answers.get(run)?.version !== version);
    if (!this.busy) this.work();
  }

  async work() {
    this.busy = true;
    while (this.wanted.length) {
      if (!this.wanted[0].urgent) await this.idle();
      const { run, version } = this.wanted.shift() ?? {};
      if (!run) break;
      try {
        this.answers.set(run, { version, ...await fetchVerdicts(run) });
      } catch {
        // A run that logged nothing to judge has no verdict; a server that is gone is reported by the heat maps.
        this.answers.set(run, { version, findings: [], loss: { steps: [], values: [] } });
      }
      this.onNews();
    }
    this.busy = false;
  }

  of(run) {
    return this.answers.get(run)?.findings ?? [];
  }

  /** What the table of runs shows: {known, word, tone, rank, loss, horizon}; null where it is not known. */
  summary(run) {
    const findings = this.of(run);
    const worst = findings[0];
    const values = (this.answers.get(run)?.loss.values ?? []);
    const reach = findings.map(({ horizon }) => horizon).filter((value) => value !== null);
    return {
      known: this.answers.has(run),
      word: worst?.word ?? null,
      tone: worst?.tone ?? 'none',
      rank: worst?.rank ?? null,
      text: findings.map(({ text }) => text).join('\n'),
      loss: values.length ? values[values.length - 1] ?? NaN : null,
      horizon: reach.length ? Math.min(...reach) : null,
    };
  }
}
