"""The number of optimizer steps of a run, and the learning rate of each: pure functions."""

import math

from hyperpod_ft.config.sections.training import Training


def rows_per_step(training: Training, data_parallel: int) -> int:
    """Training rows per optimizer step, over all data-parallel ranks."""
    return training.micro_batch_size * training.gradient_accumulation_steps * data_parallel


def total_steps(training: Training, rows: int, rows_per_step: int) -> int:
    """Number of optimizer steps: `max_steps`, or that of `epochs` passes over `rows`, rounded up."""
    return training.max_steps or max(1, math.ceil(training.epochs * rows / rows_per_step))


def learning_rate(training: Training, step: int, steps: int) -> float:
    """The learning rate of step `step` (1 .. `steps`).

    Rises linearly over the first ceil(warmup_share * steps) steps, the last of which has the peak; then it is constant,
    or falls linearly or along half a cosine, peak * (1 + cos(pi * share)) / 2 (Loshchilov & Hutter, arXiv:1608.03983,
    without restarts). It would reach 0 on the step after the last, so that every step trains.
    """
    peak = training.learning_rate
    warmup = math.ceil(training.warmup_share * steps)
    if step <= warmup:
        return peak * step / warmup
    share = (step - warmup) / (steps - warmup + 1)
    if training.schedule == "constant":
        return peak
    if training.schedule == "linear":
        return peak * (1 - share)
    return peak * (1 + math.cos(math.pi * share)) / 2
