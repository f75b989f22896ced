"""What `mp_metadata_pp_rank_P.json` says of a pipeline stage: its parameters, and which modules were fused or permuted.

optimum-neuron 0.4.5 writes one a stage (optimum/neuron/models/training/transformations_utils.py,
`create_parameter_metadata`): `parameters` by their live names with the dimension that tensor parallelism cuts, and
`model_weight_transformation_specs`, by module, how its parameters come from Hugging Face's. A checkpoint holds names of
all stages; the values of other stages' are meaningless, so this is also the list of what a stage's files are good for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.sharded.nxd.cuts import Heads
from hyperpod_ft.errors import UserError

_DAMAGED = "the file is damaged: use another checkpoint"


@dataclass(frozen=True)
class FusedLinears:
    """One linear module stands for several, whose names and output sizes these are."""

    linears: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class GroupedQueries:
    """One module stands for the query, key and value projections. Rows are those that a rank has."""

    query: str
    key: str
    value: str
    heads: Heads
    query_rows: int
    key_rows: int

    @property
    def linears(self) -> tuple[str, ...]:
        return self.query, self.key, self.value


@dataclass(frozen=True)
class GroupedOutput:
    """The projection whose inputs are the heads of a GroupedQueries, in their order."""

    heads: Heads


Transformation = FusedLinears | GroupedQueries | GroupedOutput


@dataclass(frozen=True)
class PipelineStage:
    """One pipeline stage. `parameters`: by live name, the dimension that is cut, or None where ranks have all of it.

    `transformations`: by name of the module that the training had. `degrees`: tensor parallel sizes that it names.
    """

    file: Path
    parameters: Mapping[str, int | None]
    transformations: Mapping[str, Transformation]
    degrees: frozenset[int]


def read_stages(directory: Path) -> tuple[list[PipelineStage], int]:
    """Every stage, in order, and the tensor parallel size. Raises UserError when any is missing or they disagree."""
    found = {_rank(path): path for path in directory.glob("mp_metadata_pp_rank_*.json")}
    if not found:
        raise UserError(
            f"{directory}: no mp_metadata_pp_rank_0.json in it", "the checkpoint is incomplete: use another"
        )
    for rank in range(max(found) + 1):
        if rank not in found:
            raise UserError(
                f"{directory}: mp_metadata_pp_rank_{rank}.json is missing", "the checkpoint is incomplete: use another"
            )
    stages = [_read(found[rank]) for rank in sorted(found)]
    # a last stage may hold nothing that is cut, and say nothing
    degrees = {degree: stage.file.name for stage in stages for degree in stage.degrees}
    if len(degrees) != 1 or min(degrees) < 1:
        says = ", ".join(f"{name} says {degree}" for degree, name in sorted(degrees.items()))
        raise UserError(
            f"{directory}: tensor parallel size: {says or 'no metadata says it'}",
            "files of different checkpoints are mixed: use another",
        )
    return stages, next(iter(degrees))


def _rank(file: Path) -> int:
    number = file.stem.removeprefix("mp_metadata_pp_rank_")
    if not number.isdecimal():
        raise UserError(f"{file}: is no metadata of a pipeline stage", "remove it")
    return int(number)


def _read(file: Path) -> PipelineStage:
    values = read_object(file, _DAMAGED)
    try:
        parameters = {str(name): _cut(file, name, entry) for name, entry in values["parameters"].items()}
        degrees = {int(entry["num_partitions"]) for entry in values["parameters"].values() if _is_cut(entry)}
        transformations: dict[str, Transformation] = {}
        for specs in values["model_weight_transformation_specs"]:
            for kind, spec in specs["specs"]:
                transformations |= _transformations(file, specs["module_fully_qualified_name"], kind, spec)
                degrees.add(int(spec["tp_size"]))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{file}: does not describe a pipeline stage: {error!r}", _DAMAGED) from error
    return PipelineStage(file, parameters, transformations, frozenset(degrees))


def _is_cut(entry: Mapping[str, Any]) -> bool:
    return bool(entry["tensor_model_parallel"])


def _cut(file: Path, name: str, entry: Mapping[str, Any]) -> int | None:
    if not _is_cut(entry):
        return None
    if entry["partition_dim"] not in (0, 1):
        raise UserError(f"{file}: {name} is cut along dimension {entry['partition_dim']}", "this kit does not know how")
    return int(entry["partition_dim"])


def _transformations(file: Path, module: str, kind: str, spec: Mapping[str, Any]) -> dict[str, Transformation]:
    if spec["peft_type"] not in (None, "lora"):
        raise UserError(f"{file}: {module}: PEFT type {spec['peft_type']}", "only LoRA can be read")
    if kind == "FusedLinearsSpec":
        return _fused(file, module, spec)
    if kind == "GQAQKVColumnParallelLinearSpec":
        return _grouped(file, module, spec)
    raise UserError(f"{file}: {module}: transformation {kind} is not known", "a newer version of this kit may know it")


def _fused(file: Path, module: str, spec: Mapping[str, Any]) -> dict[str, Transformation]:
    sizes = tuple(int(size) for size in spec["original_dims"])
    if spec["fuse_axis"] != 0 or len(sizes) != len(spec["linear_names"]):
        raise UserError(
            f"{file}: {module}.{spec['fused_linear_name']}: linears {spec['linear_names']} of sizes {list(sizes)} are"
            f" fused along dimension {spec['fuse_axis']}",
            "only whole outputs can be read",
        )
    if rest := [size for size in sizes if size % int(spec["tp_size"])]:
        raise UserError(f"{file}: {module}: tensor parallel {spec['tp_size']} does not divide {rest[0]}", _DAMAGED)
    linears = tuple(f"{module}.{name}" for name in spec["linear_names"])
    return {f"{module}.{spec['fused_linear_name']}": FusedLinears(linears, sizes)}


def _grouped(file: Path, module: str, spec: Mapping[str, Any]) -> dict[str, Transformation]:
    heads = Heads(
        int(spec["num_attention_heads"]),
        int(spec["num_key_value_heads"]),
        int(spec["kv_size_multiplier"]),
        int(spec["tp_size"]),
    )
    rows = int(spec["q_output_size_per_partition"]), int(spec["kv_output_size_per_partition"])
    if not heads.divide() or rows[0] % heads.queries_per_rank or rows[1] % heads.slots:
        raise UserError(
            f"{file}: {module}: {heads.queries} query heads and {heads.keys} key heads x {heads.multiplier} do not"
            f" divide over tensor parallel {heads.tensor_parallel} with {rows[0]} and {rows[1]} rows a rank",
            _DAMAGED,
        )
    query, key, value, output = (
        f"{module}.{spec[name]}"
        for name in (
            "query_projection_name",
            "key_projection_name",
            "value_projection_name",
            "output_projection_name",
        )
    )
    return {
        f"{module}.{spec['gqa_qkv_projection_name']}": GroupedQueries(query, key, value, heads, *rows),
        output: GroupedOutput(heads),
    }
