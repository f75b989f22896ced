"""Degrees of parallelism chosen for a run file with `parallelism.degrees: auto`: those that fit, the fastest first."""
