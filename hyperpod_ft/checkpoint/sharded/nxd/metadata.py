"""`mp_metadata_pp_rank_P.json`: the parameters of a pipeline stage, and which modules were fused or permuted.

optimum-neuron 0.4.5 writes one for each stage (optimum/neuron/models/training/transformations_utils.py,
`create_parameter_metadata`): `parameters` by their live names with the dimension that tensor parallelism shards, and
`model_weight_transformation_specs`, by module, how its parameters follow from Hugging Face's. A rank's file has the
names of all stages, but the values of other stages are meaningless: this is also the list of those that are valid.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from hyperpod_ft.checkpoint.formats.json_file import read, validate
from hyperpod_ft.checkpoint.sharded.description import DAMAGED_FILE, INCOMPLETE, MIXED
from hyperpod_ft.checkpoint.sharded.nxd.cuts import Heads
from hyperpod_ft.errors import UserError

_Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class FusedLinears:
    """One linear module that replaces several, with their names and output sizes."""

    linears: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class GroupedQueries:
    """One module that replaces the query, key and value projections. Rows are counted per rank."""

    query: str
    key: str
    value: str
    heads: Heads
    query_rows: int
    key_rows: int

    @property
    def linears(self) -> tuple[str, ...]:
        return self.query, self.key, self.value


Transformation = FusedLinears | GroupedQueries | Heads
"""The last: of the projection whose inputs are the heads of a GroupedQueries, in their order."""


@dataclass(frozen=True)
class PipelineStage:
    """`parameters`: by live name, the dimension that is sharded, or None where each rank has the whole parameter.

    `transformations`: by name of the module in training. `degrees`: the tensor parallel sizes that the file states.
    """

    file: Path
    parameters: Mapping[str, int | None]
    transformations: Mapping[str, Transformation]
    degrees: frozenset[int]


class _Parameter(BaseModel):
    tensor_model_parallel: bool


class _ShardedParameter(_Parameter):
    partition_dim: Literal[0, 1]
    num_partitions: _Positive


class _Spec(BaseModel):
    tp_size: _Positive
    peft_type: Literal["lora"] | None


class _FusedLinearsSpec(_Spec):
    fused_linear_name: str
    linear_names: tuple[str, ...]
    fuse_axis: Literal[0]
    original_dims: tuple[int, ...]

    def transformations(self, file: Path, module: str) -> dict[str, Transformation]:
        """The transformations, by the name of a module in training. Raises UserError when sizes do not divide."""
        sizes = self.original_dims
        if len(sizes) != len(self.linear_names) or any(size % self.tp_size for size in sizes):
            raise UserError(
                f"{file}: {module}: original_dims {list(sizes)} do not fit linears {list(self.linear_names)} and tensor"
                f" parallel {self.tp_size}",
                DAMAGED_FILE,
            )
        linears = tuple(f"{module}.{name}" for name in self.linear_names)
        return {f"{module}.{self.fused_linear_name}": FusedLinears(linears, sizes)}


class _GroupedQueriesSpec(_Spec):
    gqa_qkv_projection_name: str
    query_projection_name: str
    key_projection_name: str
    value_projection_name: str
    output_projection_name: str
    num_attention_heads: int
    num_key_value_heads: int
    kv_size_multiplier: int
    q_output_size_per_partition: int
    kv_output_size_per_partition: int

    def transformations(self, file: Path, module: str) -> dict[str, Transformation]:
        """Likewise."""
        heads = Heads(self.num_attention_heads, self.num_key_value_heads, self.kv_size_multiplier, self.tp_size)
        rows = self.q_output_size_per_partition, self.kv_output_size_per_partition
        if not heads.are_divisible() or rows[0] % heads.queries_per_rank or rows[1] % heads.slots:
            raise UserError(
                f"{file}: {module}: {heads.queries} query heads and {heads.keys} key heads x {heads.multiplier} do not"
                f" divide over tensor parallel {heads.tensor_parallel} with {rows[0]} and {rows[1]} rows per rank",
                DAMAGED_FILE,
            )
        projections = (self.query_projection_name, self.key_projection_name, self.value_projection_name)
        query, key, value = (f"{module}.{name}" for name in projections)
        return {
            f"{module}.{self.gqa_qkv_projection_name}": GroupedQueries(query, key, value, heads, *rows),
            f"{module}.{self.output_projection_name}": heads,
        }


_SPECS: Mapping[str, type[_FusedLinearsSpec | _GroupedQueriesSpec]] = {
    "FusedLinearsSpec": _FusedLinearsSpec,
    "GQAQKVColumnParallelLinearSpec": _GroupedQueriesSpec,
}


class _TransformedModule(BaseModel):
    module_fully_qualified_name: str
    specs: list[tuple[str, dict[str, Any]]]


class _Metadata(BaseModel):
    parameters: dict[str, dict[str, Any]]
    model_weight_transformation_specs: list[_TransformedModule]


def read_stages(directory: Path) -> tuple[list[PipelineStage], int]:
    """Every stage in order, and the tensor parallel size. Raises UserError when one is missing or they disagree."""
    found = {_rank(path): path for path in directory.glob("mp_metadata_pp_rank_*.json")}
    for rank in range(max(found, default=0) + 1):
        if rank not in found:
            raise UserError(f"{directory}: mp_metadata_pp_rank_{rank}.json is missing", INCOMPLETE)
    stages = [_read(found[rank]) for rank in sorted(found)]
    # the last stage may have no sharded parameter, and then states no degree
    degrees = {degree: stage.file.name for stage in stages for degree in stage.degrees}
    if len(degrees) != 1:
        says = ", ".join(f"{name} says {degree}" for degree, name in sorted(degrees.items()))
        raise UserError(
            f"{directory}: tensor parallel size: {says or 'the metadata does not state it'}",
            MIXED,
        )
    return stages, next(iter(degrees))


def _rank(file: Path) -> int:
    number = file.stem.removeprefix("mp_metadata_pp_rank_")
    if not number.isdecimal():
        raise UserError(f"{file}: its name has no pipeline rank", "remove the file")
    return int(number)


def _read(file: Path) -> PipelineStage:
    metadata = read(file, _Metadata, DAMAGED_FILE)
    parameters: dict[str, int | None] = {}
    degrees: set[int] = set()
    for name, values in metadata.parameters.items():
        parameters[name] = None
        if validate(file, values, _Parameter, DAMAGED_FILE).tensor_model_parallel:
            sharded = validate(file, values, _ShardedParameter, DAMAGED_FILE)
            parameters[name] = sharded.partition_dim
            degrees.add(sharded.num_partitions)
    transformations: dict[str, Transformation] = {}
    for module in metadata.model_weight_transformation_specs:
        for kind, values in module.specs:
            if kind not in _SPECS:
                raise UserError(
                    f"{file}: {module.module_fully_qualified_name}: transformation {kind} is not supported",
                    "use a newer version of hyperpod-ft",
                )
            spec = validate(file, values, _SPECS[kind], DAMAGED_FILE)
            transformations |= spec.transformations(file, module.module_fully_qualified_name)
            degrees.add(spec.tp_size)
    return PipelineStage(file, parameters, transformations, frozenset(degrees))
