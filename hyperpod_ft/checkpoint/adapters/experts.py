"""Adapters of parameters that hold a matrix for each expert, and the tensors of a model's files that those are.

transformers 5 keeps the experts of a layer in parameters of three dimensions, such as `mlp.experts.gate_up_proj` with
(E, outputs, inputs), which its classes for a few types store as (E, inputs, outputs). PEFT adapts them by
`target_parameters` (0.21, tuners/lora/layer.py, `ParamWrapper`), with the factors of all experts in two matrices:

    lora_A.weight  (E * r, inputs)    expert e has rows e * r to (e + 1) * r
    lora_B.weight  (outputs, r * E)   expert e has columns e, e + E, ..., e + (r - 1) * E

An adapter has no parameter's name: several of one module are nested. The last one in the class has the module's own
name, `mlp.experts.lora_A.weight`, the one before it `mlp.experts.base_layer.lora_A.weight`.

So does PEFT since 0.19.1. Before 0.19 it took every such parameter to be stored as (E, inputs, outputs); 0.19.0 took
exactly those to be that are not. Shapes tell, except where inputs and outputs are equal; there the version in
adapter_config.json does, which 0.18 is the first to write.

Files of models have a tensor for each expert and projection, or one for all experts. Both are found by their names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hyperpod_ft.checkpoint.adapters.lora_config import ends_with

# By a parameter's last name: those of one expert's matrices in files, joined along outputs in this order.
OF_ONE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
# Those of all experts in files that do not have the parameter's own name.
_OF_ALL = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
# The order of a module's parameters in the classes of transformers.
ORDER = tuple(OF_ONE)
# Types that store a parameter as (E, inputs, outputs).
TRANSPOSED = frozenset({"aria_text", "gpt_oss", "openai_privacy_filter"})
_EXPERT = re.compile(r"(?P<layer>.+?)\.[^.]+\.experts\.(?P<expert>\d+)\.(?P<part>[^.]+)\.weight")
_LAYER = re.compile(r".+\.\d+(?=\.)")
_NESTED = ".base_layer"


@dataclass(frozen=True)
class ExpertSlice:
    """What a tensor of the files is of a parameter that holds all `count` experts.

    It is [expert, row: row + its rows]; `expert` None: the whole parameter.
    """

    name: str
    count: int
    expert: int | None = None
    row: int = 0


class ExpertFiles:
    """The tensors of a model's files, by the parameters of which they are a part."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: of the files' tensors by name."""
        self._shapes = shapes
        # by layer and part
        self._of_one: dict[tuple[str, str], dict[int, str]] = {}
        for name in shapes:
            if found := _EXPERT.fullmatch(name):
                self._of_one.setdefault((found["layer"], found["part"]), {})[int(found["expert"])] = name

        layers = (_LAYER.match(name) for name, shape in shapes.items() if len(shape) == 3)
        self._layers = {layer for layer, _ in self._of_one} | {found[0] for found in layers if found}

    def in_layers(self, parameter: str) -> list[str]:
        """The parameters that all layers have with a parameter's name."""
        layer = _LAYER.match(parameter)
        names = [f"{other}{parameter[layer.end() :]}" for other in self._layers] if layer else []
        return [name for name in names if self.slices(name)[0]]

    def slices(self, parameter: str) -> tuple[tuple[ExpertSlice, ...], tuple[int, ...]]:
        """The tensors that make up a parameter, and its shape; none if that is not known."""
        if len(self._shapes.get(parameter, ())) == 3:
            return (ExpertSlice(parameter, self._shapes[parameter][0]),), self._shapes[parameter]
        module, _, last = parameter.rpartition(".")
        block = module.removesuffix(".experts")
        whole = f"{block}.{_OF_ALL.get(last)}"
        if len(self._shapes.get(whole, ())) == 3:
            return (ExpertSlice(whole, self._shapes[whole][0]),), self._shapes[whole]
        layer = block.rpartition(".")[0]
        for parts in OF_ONE.get(last, ()):
            of_experts = [self._of_one.get((layer, part), {}) for part in parts]
            if all(of_experts):
                return self._joined(of_experts)
        return (), ()

    def _joined(self, parts: list[dict[int, str]]) -> tuple[tuple[ExpertSlice, ...], tuple[int, ...]]:
        count = len(parts[0])
        shapes = [{self._shapes[name] for name in part.values()} for part in parts]
        alike = all(part.keys() == set(range(count)) for part in parts) and all(len(each) == 1 for each in shapes)
        matrices = [each.pop() for each in shapes] if alike else []
        if not matrices or any(len(shape) != 2 or shape[1] != matrices[0][1] for shape in matrices):
            return (), ()
        rows = [sum(shape[0] for shape in matrices[:part]) for part in range(len(parts) + 1)]
        found = [
            ExpertSlice(part[expert], count, expert, row)
            for expert in range(count)
            for part, row in zip(parts, rows, strict=False)
        ]
        return tuple(found), (count, rows[-1], matrices[0][1])


def module_of(nested: str) -> tuple[str, int]:
    """A module of the model, by the name that an adapter of one of its parameters has, and how deep it is nested."""
    module = nested
    while module.endswith(_NESTED):
        module = module.removesuffix(_NESTED)
    return module, (len(nested) - len(module)) // len(_NESTED)


def nested_paths(parameters: Iterable[str]) -> dict[str, list[str]]:
    """The modules below a parameter's own that lead to its factors, by its name; `parameters`: of one, in order."""
    names = list(parameters)
    return {name: [_NESTED[1:]] * (len(names) - 1 - index) for index, name in enumerate(names)}


def parameters_of(module: str, targets: Iterable[str]) -> list[str]:
    """The last names of a module's parameters that `target_parameters` name, in the order of its class."""
    wanted = tuple(targets) if ends_with(module, "experts") else ()
    return [name for name in ORDER if any(ends_with(f"{module}.{name}", target) for target in wanted)]


def is_of_one_expert(module: str) -> bool:
    """Whether a matrix of the files, without `.weight`, is of one expert: transformers 5 has no module for it."""
    return _EXPERT.fullmatch(f"{module}.weight") is not None


def is_transposed(
    shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], model_type: str, peft_version: str | None
) -> bool | None:
    """Whether factors take a parameter [E, m, n] to be (E, inputs, outputs); None if they do not fit, or nothing tells.

    `a`, `b`: the shapes of lora_A and lora_B.
    """
    _, m, n = shape
    fits = [transposed for transposed in (False, True) if (b[0], a[1]) == ((n, m) if transposed else (m, n))]
    if len(fits) < 2:
        return fits[0] if fits else None
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", peft_version or "")
    version = tuple(map(int, found.groups())) if found else ()
    stored = model_type in TRANSPOSED
    if version == (0, 19, 0):
        return not stored
    if stored:
        return True
    return version < (0, 19, 0) if version else None
