"""From a tensor as ranks saved it to the Hugging Face tensors that it replaces.

The inverse of what optimum-neuron does when it loads a model (optimum-neuron 0.4.5, transformations_utils.py,
`FusedLinearsSpec` and `GQAQKVColumnParallelLinearSpec`). Which of a module's tensors are changed follows from the
module alone, not from the metadata's `peft_type`: the output projection's LoRA factor sees permuted heads even where
the query projection has no LoRA, and a fused module without LoRA has no tensors in an adapter.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperpod_ft.checkpoint.sharded.description import DAMAGED
from hyperpod_ft.checkpoint.sharded.nxd import cuts
from hyperpod_ft.checkpoint.sharded.nxd.cuts import Heads, Span, assemble, check_size, replicated
from hyperpod_ft.checkpoint.sharded.nxd.metadata import FusedLinears, GroupedQueries, Transformation
from hyperpod_ft.checkpoint.sharded.nxd.rank_files import Shard
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

_NAME = re.compile(r"(?P<module>.+?)(?P<part>\.base_layer|\.lora_A|\.lora_B)?\.(?P<parameter>[^.]+)")
_GROUPED = re.compile(r"(?P<parameter>weight|bias)_(?P<kind>q|k|v|qkv)")


def logical(
    where: Path, name: str, shards: Sequence[Shard], dim: int | None, transformations: Mapping[str, Transformation]
) -> list[LogicalTensor]:
    """The Hugging Face tensors in what ranks saved as `name`: one, or one for each linear that was fused.

    `dim`: the dimension that tensor parallelism shards, None if each rank has the whole tensor. Raises UserError when
    shapes do not fit.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"{where}: {name} is not the name of a parameter", DAMAGED)
    module, part, parameter = match["module"], match["part"] or "", match["parameter"]
    transformation = transformations.get(module)
    if isinstance(transformation, FusedLinears | GroupedQueries) and part == ".lora_A":
        return [replicated(f"{linear}{part}.{parameter}", shards) for linear in transformation.linears]
    if isinstance(transformation, FusedLinears):
        sizes = [size // len(shards) for size in transformation.sizes]
        check_size(where, name, shards, 0, sum(sizes))
        return [
            assemble(f"{linear}{part}.{parameter}", shards, 0, cuts.fused(len(shards), sizes, index))
            for index, linear in enumerate(transformation.linears)
        ]
    if isinstance(transformation, GroupedQueries):
        return _grouped(where, name, shards, transformation, part, parameter)
    # a bias and lora_B belong to the output side, of which each rank has all
    if isinstance(transformation, Heads) and part != ".lora_B" and parameter == "weight":
        columns = shards[0].tensor.shape[-1]
        if len(shards[0].tensor.shape) != 2 or columns % transformation.queries_per_rank:
            check_size(where, name, shards, 1, transformation.queries_per_rank)
        return [assemble(name, shards, 1, cuts.query_spans(transformation, columns))]
    if dim is None:
        return [replicated(name, shards)]
    if len(shards[0].tensor.shape) <= dim:
        raise UserError(f"{where}: {name} has no dimension {dim} to shard", DAMAGED)
    return [assemble(name, shards, dim, cuts.fused(len(shards), [shards[0].tensor.shape[dim]], 0))]


def _grouped(
    where: Path, name: str, shards: Sequence[Shard], grouped: GroupedQueries, part: str, parameter: str
) -> list[LogicalTensor]:
    match = _GROUPED.fullmatch(parameter)
    if match is None:
        raise UserError(f"{where}: {name} is not part of fused queries, keys and values", DAMAGED)
    query_rows, key_rows = grouped.query_rows, grouped.key_rows
    queries: tuple[list[Span], list[Span]] = (cuts.query_spans(grouped.heads, query_rows), [])
    keys = cuts.key_spans(grouped.heads, key_rows)
    # linear, its spans and their copies, rows before it on each rank, its rows
    held = {
        "q": [(grouped.query, queries, 0, query_rows)],
        "k": [(grouped.key, keys, 0, key_rows)],
        "v": [(grouped.value, keys, 0, key_rows)],
        # sharded, although the metadata marks it as not parallel
        "qkv": [
            (grouped.query, queries, 0, query_rows),
            (grouped.key, keys, query_rows, key_rows),
            (grouped.value, keys, query_rows + key_rows, key_rows),
        ],
    }[match["kind"]]
    check_size(where, name, shards, 0, sum(rows for *_, rows in held))
    return [
        assemble(
            f"{linear}{part}.{match['parameter']}",
            shards,
            0,
            cuts.shifted(spans, begin),
            cuts.shifted(copies, begin),
        )
        for linear, (spans, copies), begin, _ in held
    ]
