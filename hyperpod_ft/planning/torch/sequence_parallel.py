"""Whether the tensor-parallel ranks of engine torch also divide what lies between attention and MLP."""

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.degrees import Degrees


def has_sequence_parallel(config: RunConfig, degrees: Degrees) -> bool:
    """Whether tensor-parallel ranks divide what lies between attention and MLP by position."""
    given, ranks = config.parallelism.sequence_parallel, degrees.tensor_parallel
    divides = ranks > 1 and config.dataset.max_length // degrees.context_parallel % ranks == 0
    return divides and given is not False


def check_sequence_parallel(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError when the run file asks for sequence parallelism, but the ranks do not divide a row's tokens."""
    given, ranks = config.parallelism.sequence_parallel, degrees.tensor_parallel
    if given and ranks > 1 and not has_sequence_parallel(config, degrees):
        on_rank = " on each rank" if degrees.context_parallel > 1 else ""
        raise UserError(
            f"parallelism.sequence_parallel: tensor_parallel {ranks} does not divide the"
            f" {config.dataset.max_length // degrees.context_parallel} tokens of a row{on_rank}",
            f"set dataset.max_length to a multiple of {ranks * degrees.context_parallel}, or leave it out",
        )
