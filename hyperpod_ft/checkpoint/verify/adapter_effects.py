"""What a LoRA adapter does to each part of its base, and what of it no program would apply.

Read independently of `merge`, whose results are checked with it. Experts that are one parameter have joined factors
(PEFT 0.21, tuners/lora/layer.py, `ParamWrapper`): lora_A (experts x r, in), lora_B (out, r x experts). In lora_B the
experts of one rank are neighbours; Unsloth trains with the ranks of one expert as neighbours (unsloth#6930).
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ft.checkpoint.adapters.experts import is_transposed
from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG, PREFIX, WEIGHTS, AdapterConfig, ends_with, parse_config
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.checkpoint.tensors.elements import Floats
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.checkpoint.verify import forms
from hyperpod_ft.checkpoint.verify.forms import Line, ModelPart, some

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?")
# Of the parameters of all experts, the first in this order has the innermost factors.
_PARAMETERS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")

# `floats(tensor, first, last)`: its rows [first, last) as float32.
ReadFloats = Callable[[LogicalTensor, int, int], Floats]


@dataclass(frozen=True)
class LowRank:
    """scale x B A, or its transpose; with several experts, that of one. `first`: the row of it where a part begins."""

    a: LogicalTensor
    b: LogicalTensor
    scale: float
    flipped: bool = False
    experts: int = 1
    expert: int = 0
    first: int = 0

    def factors(self, rows: range, floats: ReadFloats, *, by_expert: bool) -> tuple[Floats, Floats]:
        """(rows, r) and (r, columns), whose product is added to the part. `by_expert`: Unsloth's order of lora_B."""
        rank = self.a.shape[0] // self.experts
        a = floats(self.a, self.expert * rank, (self.expert + 1) * rank)
        b = floats(self.b, 0, self.b.shape[0])
        b = b[:, self.expert * rank : (self.expert + 1) * rank] if by_expert else b[:, self.expert :: self.experts]
        left, right = (a.T, b.T) if self.flipped else (b, a)
        left = left[self.first + rows.start : self.first + rows.stop]
        return np.ascontiguousarray(left) * np.float32(self.scale), np.ascontiguousarray(right)


@dataclass(frozen=True)
class Effect:
    """What becomes of a part: `low` is added, then rows are scaled to `magnitude` (DoRA), or `whole` replaces it.

    With none of these the part changes in a way that is not computed here.
    """

    low: LowRank | None = None
    magnitude: LogicalTensor | None = None
    whole: LogicalTensor | None = None


@dataclass
class AdapterEffects:
    """`of(key, part)` is what the adapter does to a part. `lines`: about the adapter itself."""

    unsloth: bool  # whether it says that Unsloth trained it
    model_type: str
    config: AdapterConfig
    prefix: str
    modules: dict[str, dict[str, LogicalTensor]] = field(default_factory=dict)
    joined: dict[tuple[str, str], dict[str, LogicalTensor]] = field(default_factory=dict)
    whole: dict[str, LogicalTensor] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def of(self, name: str, part: ModelPart) -> Effect | None:
        """None if the adapter does not change the part of the base, whose key in its files is `name`."""
        return self._of(self.prefix + name, part) or self._of(name, part)

    def _of(self, name: str, part: ModelPart) -> Effect | None:
        if name in self.whole:
            return Effect(whole=self.whole[name])
        module, _, parameter = name.rpartition(".")
        if module in self.modules and parameter == "weight":
            return self._linear(module, part)
        one, whole = forms.ONE.fullmatch(name), forms.PART_OF_JOINED.fullmatch(name)
        if one:
            return self._expert(one["at"], one["projection"], int(one["expert"]), part)
        if whole:
            return self._expert(whole["at"], whole["projection"], int(whole["expert"]), part)
        bias = parameter == "bias" and self.config.lora_bias and module in self.modules
        return Effect() if bias else None

    def _linear(self, module: str, part: ModelPart) -> Effect:
        found = self.modules[module]
        kind = "embedding_{}" if "embedding_A" in found else "{}"
        a, b = found.get(kind.format("A")), found.get(kind.format("B"))
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or len(part.shape) != 2:
            return Effect()
        straight, flipped = (b.shape[0], a.shape[1]), (a.shape[1], b.shape[0])
        turned = (
            "embedding_A" in found
            or part.shape != straight
            or (self.model_type in model_directory.CONV1D and straight == flipped)
        )
        magnitude = found.get("magnitude_vector")
        if part.shape != (flipped if turned else straight) or (magnitude and turned):
            return Effect()
        return Effect(LowRank(a, b, self.config.scale(module), turned), magnitude)

    def _expert(self, at: str, projection: str, expert: int, part: ModelPart) -> Effect | None:
        """Of a part of one expert, by the factors of all experts or, in a joined form, by its own ones."""
        for parameter, halves in (*forms.HALVES.items(), (projection, (projection,))):
            found = self.joined.get((at, parameter))
            if found is None or (projection not in halves and projection != parameter):
                continue
            a, b = found["A"], found["B"]
            first = halves.index(projection) * part.shape[0] if projection in halves else 0
            rows = part.shape[0] * (len(halves) if projection in halves else 1)
            experts = a.shape[0] // self.config.rank(f"{at}.{parameter}")
            flipped = is_transposed(
                (experts, rows, part.shape[1]), a.shape, b.shape, self.model_type, self.config.peft_version
            )
            scale = self.config.scale(f"{at}.{parameter}")
            return Effect(LowRank(a, b, scale, bool(flipped), experts, expert, first))
        halves = forms.HALVES.get(projection, (projection,))
        return Effect() if any(f"{at}.{expert}.{half}" in self.modules for half in halves) else None


def read_effects(
    where: Path,
    tensors: Mapping[str, LogicalTensor],
    base: Mapping[str, LogicalTensor],
    config: Mapping[str, Any],
    prefix: str,
) -> AdapterEffects:
    """`base`: all tensors of the base, by the live model's names, which have `prefix` before those in files.

    `config`: the base's config.json.

    Raises UserError when adapter_config.json is damaged or not that of a LoRA adapter.
    """
    values = read_object(where / CONFIG, "save the adapter again")
    parsed = parse_config(where / CONFIG, values)
    unsloth = "unsloth" in str(values.get("auto_mapping"))
    model_type = str(model_directory.of_language_model(config).get("model_type"))
    effects = AdapterEffects(unsloth, model_type, parsed, prefix)
    known = _Known.of(base, has_modalities=model_directory.is_image_text(config))
    factors: dict[str, dict[str, LogicalTensor]] = {}
    unprefixed, unknown = set(), set()
    for name, tensor in tensors.items():
        own = name.removeprefix(PREFIX)
        if own == name:
            unprefixed.add(name)
        elif match := _FACTOR.fullmatch(own):
            factors.setdefault(match["module"], {})[match["part"]] = tensor
        elif (
            ".modules_to_save." not in own and ".original_module." not in own and not own.endswith(".base_layer.weight")
        ):
            if at := known.find(forms.key(own.replace(".base_layer.", ".")), known.names):
                effects.whole[at] = tensor
            else:
                unknown.add(own)
    misfits = set()
    for module, found in factors.items():
        placed = _place(effects, module, found, known)
        if placed is None:
            unknown.add(module)
        elif not placed:
            misfits.add(module)
    faults = [*_unapplied(where, unprefixed, unknown, len(factors) + len(effects.whole), known)]
    if misfits:
        faults.append(
            f"{where / WEIGHTS}: the factors of {len(misfits)} of {len(factors)} modules do not fit the base:"
            f" {some(misfits)}"
        )
    faults += _untargeted(where, parsed, factors.keys() & {*known.modules}, len(factors))
    faults += _without_factors(where, parsed, effects.modules, known)
    effects.lines += [(True, line) for line in faults]
    effects.lines += [(False, line) for line in _unmatched_targets(where, parsed, known)]
    return effects


def _place(effects: AdapterEffects, module: str, found: dict[str, LogicalTensor], known: "_Known") -> bool | None:
    """Note the effect of a module's factors. False if they do not fit the base; None if the base has no such module."""
    at = known.place(module)
    if at is None:
        return None
    if at in known.modules:
        effects.modules[at] = found
        return _fits(found, known.names[f"{at}.weight"])
    parameter = _parameter(effects.config, at, module.count(".base_layer"), known)
    if parameter is None or not {"A", "B"} <= found.keys():
        return None
    if not _fits_joined(found, known.containers[at][parameter], effects.config.rank(f"{at}.{parameter}")):
        return False
    effects.joined[at, parameter] = found
    return True


def zero_updates(where: Path, tensors: Mapping[str, LogicalTensor]) -> Iterator[Line]:
    """A line for modules whose update is zero, since one of their factors is; a fault if nothing was learned."""
    pairs: dict[str, dict[str, LogicalTensor]] = {}
    for name, tensor in tensors.items():
        if (found := _FACTOR.fullmatch(name)) and found["part"] != "magnitude_vector":
            pairs.setdefault(found["module"], {})[found["part"]] = tensor
    zero = {module.removeprefix(PREFIX) for module, found in pairs.items() if any(map(_is_zero, found.values()))}
    others = any(_FACTOR.fullmatch(name) is None or "magnitude" in name for name in tensors)
    if zero:
        line = f"{where / WEIGHTS}: the update of {len(zero)} of {len(pairs)} modules is zero (lora_B): {some(zero)}"
        yield len(zero) == len(pairs) and not others, line


@dataclass(frozen=True)
class _Known:
    """A base by keys: tensors, modules that have a weight, and the parameters of all experts with (rows, columns)."""

    names: Mapping[str, LogicalTensor]
    modules: frozenset[str]
    containers: Mapping[str, Mapping[str, tuple[int, int, int]]]  # (experts, rows, columns)
    by_bare: Mapping[str, str]
    has_modalities: bool

    @staticmethod
    def of(base: Mapping[str, LogicalTensor], *, has_modalities: bool) -> "_Known":
        names = {forms.key(name): tensor for name, tensor in base.items()}
        modules = frozenset(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
        containers: dict[str, dict[str, tuple[int, int, int]]] = {}
        for name, tensor in names.items():
            one, joined = forms.ONE.fullmatch(name), forms.JOINED.fullmatch(name)
            if one and len(tensor.shape) == 2:
                parameters = containers.setdefault(one["at"], {})
                experts = max(int(one["expert"]) + 1, parameters.get(one["projection"], (0,))[0])
                parameters[one["projection"]] = (experts, *tensor.shape)
            elif joined and len(tensor.shape) == 3:
                containers.setdefault(joined["at"], {})[joined["projection"]] = tensor.shape
        for parameters in containers.values():
            for whole, (gate, up) in forms.HALVES.items():
                if gate in parameters and parameters.get(gate) == parameters.get(up):
                    experts, rows, columns = parameters[gate]
                    parameters[whole] = (experts, 2 * rows, columns)
        by_bare = {forms.bare(name): name for name in (*names, *modules, *containers)}
        return _Known(names, modules, containers, by_bare, has_modalities)

    def find(self, name: str, among: Collection[str]) -> str | None:
        """The key in the files of a live model's tensor, module or experts."""
        # transformers calls the text part of a model with several modalities so, whatever its files do
        if name not in among and self.has_modalities and name.startswith(("model.language_model.", "lm_head")):
            name = self.by_bare.get(forms.bare(name), "")
        return name if name in among else None

    def place(self, module: str) -> str | None:
        """The module's key, or that of the experts whose factors these are; None if the base has neither."""
        name = forms.key(module)
        return self.find(name, self.modules) or self.find(name.replace(".base_layer", ""), self.containers)


def _parameter(config: AdapterConfig, at: str, depth: int, known: _Known) -> str | None:
    """The parameter of all experts whose factors are below `depth` wrappers: the first is the innermost."""
    parameters = [name for name in _PARAMETERS if name in known.containers[at]]
    targets = [forms.key(target) for target in config.target_parameters]
    found = [name for name in parameters if any(ends_with(f"{at}.{name}", target) for target in targets)]
    if not found:  # the halves are parameters only if they are not joined in the live model
        found = [
            name for name in parameters if name not in ("gate_proj", "up_proj") or "gate_up_proj" not in parameters
        ]
    return found[-1 - depth] if depth < len(found) else None


def _fits(found: Mapping[str, LogicalTensor], weight: LogicalTensor) -> bool:
    kind = "embedding_{}" if "embedding_A" in found else "{}"
    a, b = found.get(kind.format("A")), found.get(kind.format("B"))
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        return False
    # an embedding may have been resized with the vocabulary
    return "A" not in found or weight.shape in ((b.shape[0], a.shape[1]), (a.shape[1], b.shape[0]))


def _fits_joined(found: Mapping[str, LogicalTensor], shape: tuple[int, int, int], rank: int) -> bool:
    a, b = found["A"].shape, found["B"].shape
    experts, rows, columns = shape
    sizes = len(a) == len(b) == 2 and a[0] == b[1] == experts * rank
    return sizes and (b[0], a[1]) in ((rows, columns), (columns, rows))


def _unapplied(where: Path, unprefixed: set[str], unknown: set[str], total: int, known: _Known) -> Iterator[str]:
    """Lines for tensors that a loader skips, most of them without a word."""
    file = where / WEIGHTS
    if unprefixed:
        yield (
            f"{file}: {len(unprefixed)} tensors would not be applied: their names do not begin with {PREFIX}:"
            f" {some(unprefixed)}"
        )
    if not unknown:
        return
    moved = {name: there for name in unknown if (there := known.by_bare.get(forms.bare(forms.key(name))))}
    if moved:
        first = min(moved)
        yield (
            f"{file}: {len(moved)} of {total} modules would not be applied, and a server may not say so:"
            f" {first} is {moved[first]} in the base"
        )
    if lost := unknown - moved.keys():
        yield f"{file}: {len(lost)} modules would not be applied: the base has no {some(lost)}"


def _untargeted(where: Path, config: AdapterConfig, modules: set[str], total: int) -> Iterator[str]:
    """A line for modules whose factors PEFT skips, since it makes room for those of targeted modules only."""
    if not config.all_linear and (left := {module for module in modules if not config.targets(module)}):
        yield f"{where / CONFIG}: does not target {len(left)} of {total} modules that have factors: {some(left)}"


def _without_factors(where: Path, config: AdapterConfig, have: Mapping[str, Any], known: _Known) -> Iterator[str]:
    """A line for modules that lack factors, though modules of the same kind have them and they are targeted."""
    if config.all_linear or not have:
        return
    kinds = {forms.kind(module) for module in have}
    alike = [module for module in known.modules if forms.kind(module) in kinds and not forms.is_expert(module)]
    if missing := {module for module in alike if module not in have and config.targets(module)}:
        yield (
            f"{where / WEIGHTS}: {len(missing)} of {len(missing) + len(have)} modules that {CONFIG} targets have no"
            f" factors: {some(missing)}"
        )


def _unmatched_targets(where: Path, config: AdapterConfig, known: _Known) -> Iterator[str]:
    targets = () if isinstance(config.target_modules, str) else config.target_modules
    inner = {f"{at}.{name}" for at, names in known.containers.items() for name in names}
    places = [*known.modules, *known.names, *inner]
    wanted = {*targets, *config.target_parameters}
    if unmatched := {one for one in wanted if not any(ends_with(place, forms.key(one)) for place in places)}:
        yield f"{where / CONFIG}: targets that match nothing in the base: {some(unmatched)}"


def _is_zero(tensor: LogicalTensor) -> bool:
    return math.prod(tensor.shape) > 0 and not any(np.any(block) for block in reading.blocks(tensor))
