"""Random numbers by sample: what a forward draws depends on the sample, not on the rank that runs it."""
