"""Reports of an update beside its new weights: the packed row of sums, probes, health."""
