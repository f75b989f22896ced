"""The parts of a model that two programs may store differently: experts one by one or joined, names under a prefix.

A part is a whole tensor, or one expert's matrix in a tensor of all experts. Its key does not depend on the form, if the
other model has the experts one by one: `...mlp.experts.7.up_proj.weight` is also rows of `...mlp.experts.gate_up_proj`,
(experts, 2 x inner, hidden), in which transformers 5 joins gate and up along the rows. Where rows and columns are
exchanged or interleaved (gpt-oss, Llama 4), only models of the same form are compared.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor

Tensors = Mapping[str, LogicalTensor]
Line = tuple[bool, str]
"""Whether it is a fault, or only worth a note; and what is so, in one line."""

ONE = re.compile(r"(?P<at>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")
JOINED = re.compile(r"(?P<at>.+\.experts)\.(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?")
PART_OF_JOINED = re.compile(r"(?P<at>.+\.experts)\.(?P<projection>\w+)\[(?P<expert>\d+)\]")
# Mixtral's names in files, and those of every other mixture.
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Granite's names of all experts come first.
_OTHER_NAMES = {
    ".block_sparse_moe.input_linear": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear": ".mlp.experts.down_proj",
    ".block_sparse_moe.": ".mlp.",
}
HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}
# What programs put before the names of a language model's modules, or leave out.
_WRAPPERS = frozenset({"base_model", "language_model", "model", "module", "text_model", "transformer", "_orig_mod"})


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Elements of a stored tensor from index `begin` on, row-major, in `shape`."""

    tensor: LogicalTensor
    begin: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def key(name: str) -> str:
    """The name of a tensor or a module with experts called as in most mixtures."""
    for stored, usual in _OTHER_NAMES.items():
        name = name.replace(stored, usual)
    at, dot, last = name.partition(".experts.")
    if not dot:
        return name
    return at + dot + ".".join(_MIXTRAL.get(part, part) for part in last.split("."))


def parts(tensors: Tensors, other: Tensors) -> dict[str, ModelPart]:
    """The parts of a model by key, so that those of `other`, the tensors of another model, have the same ones."""
    single = {key(name): tensor.shape for name, tensor in other.items() if ".experts." in name}
    found: dict[str, ModelPart] = {}
    for name, tensor in tensors.items():
        found |= dict(_parts(key(name), tensor, single))
    return found


def _parts(name: str, tensor: LogicalTensor, single: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, ModelPart]]:
    joined = JOINED.fullmatch(name)
    if joined is None or len(tensor.shape) != 3:
        yield name, ModelPart(tensor, 0, tensor.shape)
        return
    experts, rows, columns = tensor.shape
    halves = HALVES.get(joined["projection"], (joined["projection"],))
    one = (rows // len(halves), columns)
    if all(single.get(f"{joined['at']}.0.{half}.weight") == one for half in halves):
        for number in range(experts * len(halves)):
            expert, half = divmod(number, len(halves))
            yield f"{joined['at']}.{expert}.{halves[half]}.weight", ModelPart(tensor, number * math.prod(one), one)
        return
    for expert in range(experts):
        whole = f"{joined['at']}.{joined['projection']}[{expert}]"
        yield whole, ModelPart(tensor, expert * rows * columns, (rows, columns))


def is_expert(name: str) -> bool:
    return ".experts." in name


def bare(name: str) -> str:
    """The name without what programs put before or into it."""
    rest = name.replace(".base_layer.", ".").split(".")
    while len(rest) > 1 and rest[0] in _WRAPPERS:
        rest = rest[1:]
    return ".".join(rest)


def renamed(lost: Mapping[str, ModelPart], added: Mapping[str, ModelPart]) -> dict[str, str]:
    """The new key of each lost part that is among the added ones, in the same shape, under another prefix."""
    by_bare: dict[str, list[str]] = {}
    for name in added:
        by_bare.setdefault(bare(name), []).append(name)
    pairs = ((name, by_bare.get(bare(name), [])) for name in lost)
    return {name: new[0] for name, new in pairs if len(new) == 1 and added[new[0]].shape == lost[name].shape}


def kind(name: str) -> str:
    """The name without numbers of layers and experts."""
    return re.sub(r"\[\d+\]|(?<=\.)\d+\.", "", name)


def some(names: Collection[str]) -> str:
    """At most three of the names."""
    shown = sorted(names, key=_natural)[:3]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]
