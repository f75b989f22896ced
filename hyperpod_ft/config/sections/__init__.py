"""The sections of a run file, a module each: every key with its meaning, unit and default."""

EXPERIMENTAL_ON_GPUS = "experimental on GPUs: never run on one."  # the end of a description
