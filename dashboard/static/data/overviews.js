// What each run did as a whole (dashboard/overview.py), fetched one run after the other.

import { fetchOverview } from './api.js';

export class Overviews {
  /** `onNews()` after each answer. */
  constructor(onNews) {
    this.onNews = onNews;
    this.answers = new Map(); // run → {version, …}
    this.wanted = [];
  }

  /** Asks for what is new of `runs`. */
  follow(catalogue, runs) {
    this.wanted = runs.map((run) => ({ run, version: catalogue.version(run) }))
      .filter(({ run, version }) => this.answers.get(run)?.version !== version);
    if (!this.busy) this.work();
  }

  async work() {
    this.busy = true;
    while (this.wanted.length) {
      const { run, version } = this.wanted.shift();
      try {
        this.answers.set(run, { version, ...await fetchOverview(run) });
      } catch {
        this.answers.set(run, { version, failed: true }); // the list of runs reports a server that is gone
      }
      this.onNews();
    }
    this.busy = false;
  }

  failed(run) {
    return Boolean(this.answers.get(run)?.failed);
  }

  /** The answer about a run, or null as long as there is none. */
  of(run) {
    const answer = this.answers.get(run);
    return answer && !answer.failed ? answer : null;
  }
}
