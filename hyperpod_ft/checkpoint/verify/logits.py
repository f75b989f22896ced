"""Compares a merged model's logits with those of the unmerged adapter on its base, on a fixed prompt.

How much may they differ? In fp32, as much as a different order of summation explains. A merged model in a narrower
dtype also differs by the rounding of its weights. The effect of rounding on logits depends on the model, so it is
measured: the merged model's logits are computed again with each rounded weight changed at random, by at most the
rounding error.
"""

import math
import re
import time
import warnings
import zlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from hyperpod_ft.checkpoint.adapters.lora_config import saved_name
from hyperpod_ft.checkpoint.formats.located import locate, untie_head
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.checkpoint.verify.file_checks import read_tensors
from hyperpod_ft.checkpoint.verify.streaming import Change, Find, Weights, skeleton, stream
from hyperpod_ft.errors import UserError, first_sentence
from hyperpod_ft.progress import ByteProgress

_TOKENS = 48
# Relative to the logits' root mean square; a different order of summation changes it by 1e-6 in small models, by 1e-5
# in deep ones.
_ARITHMETIC_TOLERANCE = 1e-4
# Differences up to this many times those of random rounding are attributed to rounding.
_ROUNDING_FACTOR = 1.5
# The distance from 1 to the next number.
_EPSILON = {"BF16": 2.0**-7, "F16": 2.0**-10}
# What a live PEFT model inserts between the names of a base module and its parameter.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)")

_ADAPTER = "default"  # PEFT's name for the only one

Tensors = Mapping[str, LogicalTensor]


@dataclass(frozen=True)
class Logits:
    """Absolute differences between a merged model's logits (M) and those of the adapter on its base (A).

    `tolerance` is the largest accepted root mean square of M - A; `rounding` is the root mean square of the change that
    random rounding of the merged weights causes. `effect` is that of the change which the adapter causes; None if M - A
    is too large already or A is zero.
    """

    tokens: int
    scale: float  # root of the mean square of A
    largest_difference: float
    mean_difference: float
    rms_difference: float
    rounding: float
    effect: float | None
    tolerance: float
    top1_agreement: float  # share of positions with the same most likely token
    seconds: float

    def findings(self, directory: Path) -> tuple[str, ...]:
        """One line if rounding does not explain the difference, or if the base alone would pass too."""
        if self.effect is not None and self.effect > self.tolerance:
            return ()
        if self.scale == 0 or self.effect is not None:
            return (
                f"{directory}: the comparison cannot show whether the adapter was merged: it changes the base's"
                f" logits by {self.effect or 0:.3g} (root mean square), the tolerance is {self.tolerance:.3g}",
            )
        return (
            f"{directory}: its logits are not those of the adapter on the base: they differ by"
            f" {self.rms_difference:.3g} (root mean square), the tolerance is {self.tolerance:.3g}",
        )


def compare(merged: Path, adapter: Path, base: Path) -> Logits:
    """Compute both models' logits, streaming their weights.

    Raises UserError when a model cannot be built or its tensors do not fit.
    """
    clock = time.monotonic()
    bare, live = skeleton(merged), skeleton(base)
    merged_tensors, base_tensors = _located(merged), _located(base)
    factors = read_tensors(adapter, is_adapter=True)
    configs = [model.config.get_text_config() for model in (bare, live)]
    vocabulary = min(config.vocab_size for config in configs)
    # an embedding of positions has no row for further ones
    length = min(_TOKENS, *(getattr(config, "max_position_embeddings", None) or _TOKENS for config in configs))
    tokens = torch.arange(length).mul(7919).add(1).remainder(vocabulary).unsqueeze(0)

    find_merged, find_base = _find_in(merged, merged_tensors), _find_in(base, base_tensors)
    wrapped, touched = _with_adapter(live, adapter, factors)
    rounded = {
        tensor.name
        for name, tensor in merged_tensors.items()
        if tensor.dtype in _EPSILON
        and (name in touched or name not in base_tensors or base_tensors[name].dtype != tensor.dtype)
    }
    passes = 4 if rounded else 3
    merged_logits = _run(bare, find_merged, tokens, merged, f"1/{passes}: merged model")
    live_logits = _run(wrapped, _find_live(factors, find_base), tokens, adapter, f"2/{passes}: adapter on base")
    scale, rounding, effect = _rms(live_logits), 0.0, None
    if rounded:
        change = _round_at_random(rounded)
        moved_logits = _run(skeleton(merged), find_merged, tokens, merged, f"3/{passes}: rounding", change)
        rounding = _rms(moved_logits - merged_logits)
    tolerance = _ARITHMETIC_TOLERANCE * scale + _ROUNDING_FACTOR * rounding
    difference = (merged_logits - live_logits).abs()
    if _rms(difference) <= tolerance and scale > 0:  # false for NaN
        base_logits = _run(skeleton(base), find_base, tokens, base, f"{passes}/{passes}: base")
        effect = _rms(live_logits - base_logits)
    return Logits(
        tokens=len(live_logits),
        scale=scale,
        largest_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        rms_difference=_rms(difference),
        rounding=rounding,
        effect=effect,
        tolerance=tolerance,
        top1_agreement=float((merged_logits.argmax(-1) == live_logits.argmax(-1)).float().mean()),
        seconds=round(time.monotonic() - clock, 3),
    )


def of_model(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """A model's logits for `tokens`, (1, length): (length, vocabulary), fp32. Raises UserError as `compare` does."""
    return _run(skeleton(directory), _find_in(directory, _located(directory)), tokens, directory, str(directory))


def of_adapter(adapter: Path, base: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The same of an adapter that PEFT applies to its base."""
    factors = read_tensors(adapter, is_adapter=True)
    wrapped, _ = _with_adapter(skeleton(base), adapter, factors)
    find = _find_live(factors, _find_in(base, _located(base)))
    return _run(wrapped, find, tokens, adapter, str(adapter))


def _located(directory: Path) -> Tensors:
    """The stored tensors of the model in a directory, by their names in the model."""
    model = skeleton(directory)
    model.tie_weights()  # moving parameters to the meta device has separated them
    untie_head(model, directory)
    return locate(model, directory, replicas=False)


def _find_in(directory: Path, tensors: Tensors) -> Find:
    def find(name: str) -> LogicalTensor:
        if name not in tensors:
            raise UserError(f"{directory}: tensor {name} is missing", "merge or download the model again")
        return tensors[name]

    return find


def _with_adapter(live: PreTrainedModel, adapter: Path, factors: Tensors) -> tuple[nn.Module, set[str]]:
    """The model with PEFT's layers, also on the meta device, and the names of the base tensors that they change.

    Raises UserError when PEFT cannot apply the adapter, or the model has no parameter for one of its tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = PeftConfig.from_pretrained(str(adapter))
            config.inference_mode = True
            wrapped = get_peft_model(live, config, low_cpu_mem_usage=True).eval()
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        raise UserError(
            f"{adapter}: PEFT cannot apply it: {first_sentence(error)}", "compare logits with another program"
        ) from error
    names = [name for name, _ in wrapped.named_parameters(remove_duplicate=False)]
    if unused := sorted(factors.keys() - {_saved_name(name) for name in names}):
        raise UserError(
            f"{adapter}: does not fit the base model, which has no parameter for {unused[0]}",
            "use the base that it was trained on",
        )
    touched = {_base_name(name) for name in names if ".base_layer." in name or ".modules_to_save." in name}
    touched = {name for name in touched if ".lora_" not in name}
    return wrapped, touched


def _base_name(live: str) -> str:
    return _WRAPPERS.sub("", live.removeprefix("base_model.model."))


def _saved_name(live: str) -> str:
    # PEFT omits `.weight` here (utils/save_and_load.py, get_peft_model_state_dict)
    return (saved_name(live, _ADAPTER) or "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _find_live(factors: Tensors, find_base: Find) -> Find:
    """The live tensors: as in PEFT, a tensor in the adapter's file replaces the base's."""

    def find(live: str) -> LogicalTensor:
        saved = _saved_name(live)
        return factors[saved] if saved in factors else find_base(_base_name(live))

    return find


def _run(
    model: Any, find: Find, tokens: torch.Tensor, where: Path, what: str, change: Change | None = None
) -> torch.Tensor:
    """Logits, (tokens, vocabulary), fp32."""
    with Weights(change) as weights:
        total = stream(model, find, weights, _users(model))
        # the decoder of an encoder-decoder reads other tokens than its encoder
        of_decoder = {"decoder_input_ids": tokens.flip(1)} if model.config.is_encoder_decoder else {}
        with ByteProgress(f"logits {what}", total) as weights.progress, torch.inference_mode():
            try:
                logits: torch.Tensor = model(input_ids=tokens, use_cache=False, **of_decoder).logits
            except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{where}: its logits cannot be computed layer by layer: {first_sentence(error)}",
                    "compare with another program",
                ) from error
    return logits.squeeze(0)


def _users(model: nn.Module) -> dict[str, nn.Module]:
    """PEFT's wrappers that change a module's parameters while it computes, by its name; of nested, the outermost."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            found[f"{name}.base_layer"] = found.get(name, module)
    return found


def _round_at_random(names: Set[str]) -> Change:
    """Change the elements of these tensors at random by up to half the dtype's epsilon, relative, as rounding does."""

    def change(tensor: LogicalTensor, first: int, rows: torch.Tensor) -> None:
        if tensor.name in names:
            random = torch.Generator().manual_seed(zlib.crc32(f"{tensor.name}:{first}".encode()))
            noise = torch.rand(rows.shape, generator=random)
            rows.addcmul_(rows, noise.sub_(0.5), value=_EPSILON[tensor.dtype])

    return change


def _rms(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) / math.sqrt(values.numel())
