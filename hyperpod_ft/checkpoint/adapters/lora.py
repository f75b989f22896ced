"""The tensors of a LoRA adapter as PEFT saves them, and the effect of each on the base model.

PEFT saves `base_model.model.<module>.lora_A.weight` with shape (r, in) and `.lora_B.weight` with (out, r) for the
base's `<module>.weight` with (out, in), which transformers' Conv1D stores as (in, out); of an embedding with
(vocabulary, width) `.lora_embedding_A` with (r, vocabulary) and `.lora_embedding_B` with (width, r); parameters that
were trained whole (`modules_to_save`, biases, resized embeddings) under their own names (PEFT 0.17,
utils/save_and_load.py, `get_peft_model_state_dict`). What it saves for the experts of a layer is in experts.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters import experts
from hyperpod_ft.checkpoint.adapters.experts import ExpertFiles, ExpertSlice
from hyperpod_ft.checkpoint.adapters.live_names import modules, with_live_names
from hyperpod_ft.checkpoint.adapters.lora_config import (
    CONFIG,
    PREFIX,
    AdapterConfig,
    ends_with,
    is_second_copy,
    parse_config,
)
from hyperpod_ft.checkpoint.formats.model_directory import with_tied_output
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

_PART = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A\.weight|B\.weight|B\.bias|embedding_A|embedding_B|magnitude_vector)(\.weight)?"
)
_INCOMPLETE = "the adapter is incomplete: save it again"
_WRONG_BASE = "use the base that the adapter was trained on"


@dataclass(frozen=True)
class Update:
    """What an adapter adds to a weight: scale * (b @ a), or to a bias: scale * b.

    `magnitude` is DoRA's (arXiv 2402.09353): each output of the module is then rescaled to it. `experts`: a and b are
    those of all experts, and the weight is one's, or with three dimensions all of them.
    """

    where: Path
    a: LogicalTensor | None  # (r, in), of experts (experts * r, in)
    b: LogicalTensor  # (out, r), of experts (out, r * experts); of a bias (out,)
    scale: float
    transposed: bool = False  # the weight is stored as (in, out)
    magnitude: LogicalTensor | None = None  # (out,)
    embedding: bool = False
    experts: ExpertSlice | None = None


@dataclass(frozen=True)
class AdapterEffect:
    """What an adapter does to each tensor of the base, by name. A tensor may be both replaced and updated."""

    where: Path
    updates: Mapping[str, Update]
    replaced: Mapping[str, LogicalTensor]


def classify_tensors(
    where: Path,
    config: AdapterConfig,
    tensors: Sequence[LogicalTensor],
    base: Mapping[str, LogicalTensor],
    *,
    conv1d: bool = False,
    model_type: str = "",
) -> AdapterEffect:
    """Classify an adapter's tensors by their effect on `base`, whose tensors have the names of the live model.

    `conv1d`: square linear layers of the base are stored as (in, out). `model_type`: config.json's.

    Raises UserError when a tensor is not LoRA's, has no partner or does not fit the base, or one that the
    configuration requires is missing: PEFT would initialize it at random.
    """
    if not tensors:
        raise UserError(f"{where}: the adapter has no tensors", "train again")
    parts: dict[str, dict[str, LogicalTensor]] = {}
    replaced: dict[str, LogicalTensor] = {}
    for tensor in tensors:
        name = tensor.name.removeprefix(PREFIX)
        found = _PART.fullmatch(name)
        if name == tensor.name or tensor.dtype not in ARITHMETIC:
            raise UserError(
                f"{where}: tensor {tensor.name} ({tensor.dtype}) is not a LoRA tensor", "merge it with PEFT"
            )
        if found:
            parts.setdefault(found["module"], {})[found["part"]] = tensor
        elif not is_second_copy(name):
            replaced[name.replace(".base_layer.", ".")] = tensor
    _check_replaced(where, replaced, base)
    updates: dict[str, Update] = {}
    files = ExpertFiles({name: tensor.shape for name, tensor in base.items()})
    joined: set[str] = set()
    for nested, named in parts.items():
        if parameter := _joined_parameter(where, config, nested):
            joined.add(parameter)
            updates |= dict(_expert_updates(where, config, parameter, named, base, files, model_type))
        else:
            updates |= dict(_updates(where, config, nested, named, {**base, **replaced}, conv1d))
    _refuse_gaps(where, config, {name for name in parts if f"{name}.weight" in updates}, set(replaced), base)
    _refuse_missing_parameters(where, config, joined, base, files)
    return AdapterEffect(where, updates, replaced)


def check_fit(
    where: Path,
    config: Any,
    tensors: Sequence[LogicalTensor],
    base: Mapping[str, LogicalTensor],
    tied: bool,
    model_type: str,
) -> None:
    """Raise UserError unless an adapter fits the base; `config`: the contents of adapter_config.json.

    `tied`: the base's output layer is its embedding. Adapters that `merge` does not support are not checked.
    """
    parsed = parse_config(where / CONFIG, config)
    if not parsed.unsupported:
        base = with_live_names(modules(tensors), base)
        classify_tensors(where, parsed, tensors, with_tied_output(base) if tied else base, model_type=model_type)


def _not_in_base(where: Path, name: str) -> UserError:
    return UserError(f"{where}: the adapter does not fit the base model, which has no {name}", _WRONG_BASE)


def _check_replaced(where: Path, replaced: Mapping[str, LogicalTensor], base: Mapping[str, LogicalTensor]) -> None:
    for name, tensor in replaced.items():
        if name not in base:
            raise _not_in_base(where, name)
        # a resized vocabulary changes the number of rows
        if tensor.shape[1:] != base[name].shape[1:] or (len(tensor.shape) == 1 and tensor.shape != base[name].shape):
            raise UserError(
                f"{where}: the adapter does not fit the base model at {name}: {list(tensor.shape)} for"
                f" {list(base[name].shape)}",
                _WRONG_BASE,
            )


def _updates(
    where: Path,
    config: AdapterConfig,
    module: str,
    parts: Mapping[str, LogicalTensor],
    base: Mapping[str, LogicalTensor],
    conv1d: bool,
) -> Iterator[tuple[str, Update]]:
    """The updates of a module's tensors, each with the name of the base's tensor that it changes."""
    kind = "embedding_{}" if "embedding_A" in parts or "embedding_B" in parts else "{}.weight"
    a, b = parts.get(kind.format("A")), parts.get(kind.format("B"))
    if a is None or b is None:
        raise UserError(f"{where}: {module} has no lora_{'B' if b is None else 'A'}", _INCOMPLETE)
    name, rank = f"{module}.weight", config.rank(module)
    if name not in base:
        raise _not_in_base(where, name)
    weight = base[name]
    if weight.dtype not in ARITHMETIC:
        raise UserError(
            f"{where}: {name} of the base model is quantized ({weight.dtype})", "use the original weights as the base"
        )
    embedding = "embedding" in kind
    straight, flipped = (b.shape[:1] + a.shape[1:]), (a.shape[1:] + b.shape[:1])
    wanted = {flipped} if embedding else {straight, flipped}
    if len(weight.shape) != 2 or weight.shape not in wanted or (a.shape[:1], b.shape[1:]) != ((rank,), (rank,)):
        raise UserError(
            f"{where}: the adapter does not fit the base model at {name}: lora_B {list(b.shape)} x lora_A"
            f" {list(a.shape)} of rank {rank} on a weight {list(weight.shape)}",
            _WRONG_BASE,
        )
    transposed = weight.shape == flipped and (weight.shape != straight or conv1d or embedding)
    magnitude = parts.get("magnitude_vector")
    if (magnitude is not None) != config.use_dora or (magnitude is not None and magnitude.shape != b.shape[:1]):
        found = f"lora_magnitude_vector {list(magnitude.shape)}" if magnitude else "no lora_magnitude_vector"
        raise UserError(
            f"{where}: use_dora is {config.use_dora}, {module} has {found}", "the adapter is damaged: save it again"
        )
    scale = config.scale(module)
    yield name, Update(where, a, b, scale, transposed, magnitude, embedding)
    bias = parts.get("B.bias")
    if (bias is not None) != config.lora_bias and not embedding:
        raise UserError(
            f"{where}: lora_bias is {config.lora_bias}, {module} has {'a' if bias else 'no'} lora_B.bias",
            "the adapter is damaged: save it again",
        )
    if bias is not None:
        name = f"{module}.bias"
        if name not in base or base[name].shape != bias.shape:
            raise UserError(f"{where}: the base model has no {name} to add lora_B.bias to", _WRONG_BASE)
        yield name, Update(where, None, bias, scale)


def _joined_parameter(where: Path, config: AdapterConfig, nested: str) -> str | None:
    """The parameter of all experts that the factors with this name adapt; None for those of a module's weight."""
    module, depth = experts.module_of(nested)
    names = experts.parameters_of(module, config.target_parameters)
    if depth >= max(1, len(names)):
        raise UserError(
            f"{where}: {CONFIG} does not say which parameter of {module} the factors {nested} adapt",
            f"correct target_parameters in {CONFIG}",
        )
    return f"{module}.{names[len(names) - 1 - depth]}" if names else None


def _expert_updates(
    where: Path,
    config: AdapterConfig,
    parameter: str,
    parts: Mapping[str, LogicalTensor],
    base: Mapping[str, LogicalTensor],
    files: ExpertFiles,
    model_type: str,
) -> Iterator[tuple[str, Update]]:
    """The updates of the tensors that make up a parameter of all experts."""
    if parts.keys() != {"A.weight", "B.weight"}:
        raise UserError(f"{where}: {parameter} has {', '.join(sorted(parts))}, not lora_A and lora_B", _INCOMPLETE)
    a, b = parts["A.weight"], parts["B.weight"]
    slices, shape = files.slices(parameter)
    if not slices:
        raise UserError(
            f"{where}: which tensors of the base model are {parameter} is not known",
            "use the base that the adapter was trained on, or merge it with PEFT",
        )
    if dtypes := {base[one.name].dtype for one in slices} - ARITHMETIC:
        raise UserError(
            f"{where}: {parameter} of the base model is quantized ({dtypes.pop()})",
            "use the original weights as the base",
        )
    rank = config.rank(parameter) * shape[0]
    transposed = experts.is_transposed(shape, a.shape, b.shape, model_type, config.peft_version)
    widths = sorted((*a.shape[1:], *b.shape[:1]))
    if (a.shape[0], b.shape[1]) != (rank, rank) or widths != sorted(shape[1:]):
        raise UserError(
            f"{where}: the adapter does not fit the base model at {parameter}: lora_B {list(b.shape)} x lora_A"
            f" {list(a.shape)} of rank {config.rank(parameter)} on {list(shape)}",
            _WRONG_BASE,
        )
    if transposed is None:
        raise UserError(
            f"{where}: {CONFIG} has no peft_version, and versions of PEFT arrange the factors of {parameter}"
            f" {list(shape)} differently",
            "add the version that saved it: 0.17.0, if that was before 0.18",
        )
    scale = config.scale(parameter)
    for one in slices:
        yield one.name, Update(where, a, b, scale, transposed, experts=one)


def _refuse_missing_parameters(
    where: Path, config: AdapterConfig, have: set[str], base: Mapping[str, LogicalTensor], files: ExpertFiles
) -> None:
    """A target parameter has factors in all layers that it names, if it has them in one. `have`: those of experts."""
    for target in config.target_parameters:
        if not any(ends_with(name, target) for name in (*have, *base)):
            raise UserError(f"{where}: target parameter {target} matches nothing that has factors", _INCOMPLETE)
    wanted = {name for parameter in have for name in files.in_layers(parameter)}
    for name in sorted(wanted - have):
        if any(ends_with(name, target) for target in config.target_parameters):
            raise UserError(f"{where}: the adapter has no factors for {name}", _INCOMPLETE)


def _refuse_gaps(
    where: Path, config: AdapterConfig, have: set[str], replaced: set[str], base: Mapping[str, LogicalTensor]
) -> None:
    weights = [name for name in base if name.endswith(".weight") and len(base[name].shape) == 2]
    matrices = [name.removesuffix(".weight") for name in weights]
    if config.all_linear:
        # a shape does not show a linear layer: targets are the modules with the same last name as one with factors
        kinds = {module.rpartition(".")[2] for module in have}
        targets = [module for module in matrices if module.rpartition(".")[2] in kinds]
    else:
        targets = [module for module in matrices if config.targets(module)]
        if strange := sorted(have - set(targets)):
            raise UserError(
                f"{where}: {CONFIG} does not target {strange[0]}, which has factors",
                f"correct target_modules in {CONFIG}",
            )
    if isinstance(config.target_modules, str) and not targets:
        raise UserError(f"{where}: target module {config.target_modules} matches nothing", _WRONG_BASE)
    for target in () if isinstance(config.target_modules, str) else config.target_modules:
        if not any(ends_with(module, target) for module in matrices):
            raise UserError(f"{where}: target module {target} matches nothing in the base model", _WRONG_BASE)
    # transformers 5 has no modules for single experts, which an adapter from before has all of
    single = any(experts.is_of_one_expert(module) for module in have)
    needed = [module for module in targets if single or not experts.is_of_one_expert(module)]
    if missing := [module for module in needed if module not in have]:
        raise UserError(f"{where}: the adapter has no factors for {missing[0]}.weight", _INCOMPLETE)
    for name in sorted(base.keys() - replaced):
        module, _, parameter = name.rpartition(".")
        if config.saves(module):
            raise UserError(f"{where}: modules_to_save: the adapter has no {name}", _INCOMPLETE)
        trained = config.bias == "all" or (config.bias == "lora_only" and module in have)
        if parameter == "bias" and len(base[name].shape) == 1 and trained:
            raise UserError(
                f"{where}: bias is {config.bias}, but the adapter has no {name}: PEFT did not save it",
                f"set bias to none in {CONFIG} to merge without the trained biases",
            )
