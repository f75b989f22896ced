"""The degrees of parallelism of a run."""

from dataclasses import dataclass

from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Degrees:
    """How `nodes * ranks_per_node` processes divide into data-, tensor- and pipeline-parallel groups."""

    nodes: int
    ranks_per_node: int
    tensor_parallel: int
    pipeline_parallel: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def data_parallel(self) -> int:
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel)


def check_divides(tensor_parallel: int, what: str, size: int) -> None:
    """Raise UserError when a tensor-parallel degree does not divide the size of a part of the model."""
    if size % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} does not divide the model's {what} {size}",
            "choose a divisor",
        )
