"""The health of a model: norms and update ratios of every variable, noise scale, positions, spikes, verdicts."""
