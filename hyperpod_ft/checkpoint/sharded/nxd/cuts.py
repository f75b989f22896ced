"""How optimum-neuron shards a tensor over tensor parallel ranks: spans of ranks' parts that make logical tensors.

Every layout shards along one dimension only, so spans of rows (or columns) describe it. Formulas after optimum-neuron
0.4.5, optimum/neuron/models/training/transformations_utils.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from hyperpod_ft.checkpoint.sharded.nxd.rank_files import Shard
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_BYTES, LogicalTensor, Piece
from hyperpod_ft.errors import UserError


@dataclass(frozen=True)
class Span:
    """`length` rows of a rank's part, from `begin`, are the logical tensor's rows from `start`."""

    rank: int
    begin: int
    length: int
    start: int


@dataclass(frozen=True)
class Heads:
    """Attention heads over ranks when there are fewer key and value heads than ranks (GQAQKVColumnParallelLinearSpec).

    The key and value heads are repeated `multiplier` times in a row, and ranks take equal runs of it. Each
    copy of a key head serves an equal part of its query heads, so queries are permuted: slot t of the row, which is
    copy t // kv_heads of key head t % kv_heads, has the query heads from (t % kv_heads) * group + (t // kv_heads) *
    group / multiplier on, `group` being query heads per key head (compute_query_indices_for_rank).
    """

    queries: int
    keys: int
    multiplier: int
    tensor_parallel: int

    @property
    def slots(self) -> int:
        """Key heads of a rank, copies counted."""
        return self.keys * self.multiplier // self.tensor_parallel

    @property
    def queries_per_rank(self) -> int:
        return self.queries // self.tensor_parallel

    def are_divisible(self) -> bool:
        """Whether ranks divide the heads evenly, as the formulas assume."""
        return (
            min(self.queries, self.keys, self.multiplier, self.tensor_parallel) > 0
            and self.queries % (self.keys * self.multiplier) == 0
            and self.queries % self.tensor_parallel == 0
            and self.keys * self.multiplier % self.tensor_parallel == 0
            and self.keys % self.slots == 0
        )


def fused(tensor_parallel: int, sizes: Sequence[int], index: int) -> list[Span]:
    """Linear `index` of several fused ones: each rank has its part of the first, then of the second, and so on.

    `sizes` are of one rank's parts, which are equal and in order.
    """
    begin = sum(sizes[:index])
    return [Span(rank, begin, sizes[index], rank * sizes[index]) for rank in range(tensor_parallel)]


def query_spans(heads: Heads, rows: int) -> list[Span]:
    """`rows` of the query projection, or columns of the output projection, on each rank."""
    size = rows // heads.queries_per_rank
    per_slot = heads.queries // (heads.keys * heads.multiplier)
    spans = []
    for rank in range(heads.tensor_parallel):
        for slot in range(heads.slots):
            copy, key = divmod(rank * heads.slots + slot, heads.keys)
            first = key * per_slot * heads.multiplier + copy * per_slot
            spans.append(Span(rank, slot * per_slot * size, per_slot * size, first * size))
    return _joined(spans)


def key_spans(heads: Heads, rows: int) -> tuple[list[Span], list[Span]]:
    """The first copy of the key (or value) heads, and the others. `rows` of the projection on each rank."""
    size = rows // heads.slots
    spans: tuple[list[Span], list[Span]] = ([], [])
    for rank in range(heads.tensor_parallel):
        for slot in range(heads.slots):
            copy, key = divmod(rank * heads.slots + slot, heads.keys)
            spans[min(copy, 1)].append(Span(rank, slot * size, size, key * size))
    return _joined(spans[0]), _joined(spans[1])


def shifted(spans: Iterable[Span], begin: int) -> list[Span]:
    """The same spans in parts with `begin` rows before them."""
    return [replace(span, begin=span.begin + begin) for span in spans]


def assemble(
    name: str, shards: Sequence[Shard], dim: int, spans: Sequence[Span], copies: Sequence[Span] = ()
) -> LogicalTensor:
    """The tensor made of `spans` along `dim`; `copies`: spans of further copies."""
    local = shards[0].tensor
    length = sum(span.length for span in spans)
    shape = (*local.shape[:dim], length, *local.shape[dim + 1 :])
    return LogicalTensor(
        name,
        local.dtype,
        shape,
        tuple(_piece(shards[span.rank], dim, span) for span in spans),
        tuple(_piece(shards[span.rank], dim, span) for span in copies),
    )


def replicated(name: str, shards: Sequence[Shard]) -> LogicalTensor:
    """A tensor that every rank has all of."""
    tensor = shards[0].tensor
    first, *others = (
        Piece(shard.file, shard.tensor.offset, (0,) * len(tensor.shape), tensor.shape, shard.tensor.strides)
        for shard in shards
    )
    return LogicalTensor(name, tensor.dtype, tensor.shape, (first,), tuple(others))


def check_size(where: Path, name: str, shards: Sequence[Shard], dim: int, size: int) -> None:
    """Raise UserError unless each rank has `size` rows along `dim`."""
    shape = shards[0].tensor.shape
    if len(shape) <= dim or shape[dim] != size:
        raise UserError(
            f"{where}: {name} has shape {list(shape)} on each rank, the metadata gives dimension {dim} size {size}",
            "metadata and weights belong to different checkpoints: use an earlier checkpoint",
        )


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Merge spans that are adjacent in both the part and the logical tensor."""
    runs = groupby(spans, key=lambda span: (span.rank, span.begin - span.start))
    joined = []
    for _, run in runs:
        first, *others = run
        joined.append(replace(first, length=first.length + sum(span.length for span in others)))
    return joined


def _piece(shard: Shard, dim: int, span: Span) -> Piece:
    tensor = shard.tensor
    return Piece(
        shard.file,
        tensor.offset + span.begin * tensor.strides[dim] * DTYPE_BYTES[tensor.dtype],
        tuple(span.start if axis == dim else 0 for axis in range(len(tensor.shape))),
        (*tensor.shape[:dim], span.length, *tensor.shape[dim + 1 :]),
        tensor.strides,
    )
