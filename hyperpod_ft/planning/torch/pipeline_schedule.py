"""The schedule of a pipeline of engine torch: its micro batches, and the share of a step in which ranks are idle.

Each of the `gradient_accumulation_steps` micro batches of a step passes through all stages, forward and backward. With
`interleaved` a rank has several stages, p apart for p ranks (Narayanan et al., arXiv:2104.04473, section 2.2).
"""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.degrees import Degrees


def stages_per_rank(config: RunConfig) -> int:
    """How many stages a rank has."""
    return config.parallelism.virtual_pipeline_parallel if config.parallelism.pipeline_schedule == "interleaved" else 1


def stages_of(rank: int, config: RunConfig, degrees: Degrees) -> range:
    """The numbers of the stages that a rank of the pipeline has."""
    ranks = degrees.pipeline_parallel
    return range(rank, ranks * stages_per_rank(config), ranks)


def idle_share(config: RunConfig, degrees: Degrees) -> float:
    """The pipeline's bubble: the share of a step in which a rank waits for the others, if all stages take as long.

    (p - 1) / (v m + p - 1) for m micro batches on p ranks with v stages each (sections 2.1 and 2.2 of the paper above).
    """
    others = degrees.pipeline_parallel - 1
    return others / (stages_per_rank(config) * config.training.gradient_accumulation_steps + others)


def check_micro_batches(config: RunConfig, degrees: Degrees) -> None:
    """Refuse numbers of micro batches that leave ranks idle for long, or that the schedule cannot divide."""
    ranks, count = degrees.pipeline_parallel, config.training.gradient_accumulation_steps
    if ranks == 1:
        return
    if count < ranks:
        raise UserError(
            f"training.gradient_accumulation_steps: too few micro batches ({count}) for {ranks} pipeline stages, which"
            f" would be idle {idle_share(config, degrees):.0%} of the time",
            f"set it to at least {ranks}; {4 * ranks} would leave them idle"
            f" {(ranks - 1) / (stages_per_rank(config) * 4 * ranks + ranks - 1):.0%} of the time",
        )
    if config.parallelism.pipeline_schedule == "interleaved" and count % (count // ranks):
        # they go through a rank's stages in rounds of one size (torch's ScheduleInterleaved1F1B)
        raise UserError(
            f"training.gradient_accumulation_steps: schedule interleaved cannot divide {count} micro batches into"
            f" {count // ranks} equal rounds for {ranks} pipeline ranks",
            f"set it to a multiple of {ranks}",
        )


def in_flight(config: RunConfig, degrees: Degrees) -> list[float]:
    """How many micro batches have activations in memory at the same time, on each rank of the pipeline.

    1F1B begins with p - k forward passes on rank k of p, GPipe with all. `interleaved` begins with (v - 1) r + 2 (p - 1
    - k) + 1 passes through one of the rank's v stages, in rounds of r micro batches: each is 1/v of a micro batch.
    """
    ranks, count = degrees.pipeline_parallel, config.training.gradient_accumulation_steps
    schedule, stages = config.parallelism.pipeline_schedule, stages_per_rank(config)
    if schedule == "gpipe":
        return [count] * ranks
    if schedule == "1f1b" or ranks == 1:
        return [min(ranks - rank, count) for rank in range(ranks)]
    a_round = count // (count // ranks)
    passes = [(stages - 1) * a_round + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
    return [min(each / stages, count) for each in passes]
