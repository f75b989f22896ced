"""Whether plain transformers and PEFT load what an engine made of a small model, and compute alike."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import load_peft_weights, set_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel

from hyperpod_ft.checkpoint.consolidate import consolidate_checkpoint
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.checkpoint.formats.pretrained import auto_class
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
from hyperpod_ft.config.sections.training import last_parts
from hyperpod_ft.engines.certificate.alone import TOLERANCE, difference
from hyperpod_ft.engines.certificate.model import documents
from hyperpod_ft.errors import UserError, printable

_REMEDY = "choose a model of another type"
_WHOLE = ".modules_to_save."  # in PEFT's names of modules that are trained whole


def check_result(
    base: Path, checkpoint: Path, directory: Path, before: torch.Tensor, after: torch.Tensor, *, adapters: bool
) -> None:
    """Consolidate the `checkpoint` of a small model, and load the result.

    `before`, `after`: what the model in training makes of `inputs()`, before the first step and after the last one.
    Raises UserError when they are alike, or what transformers or PEFT load is not what was trained.
    """
    if difference(after, before) < 10 * TOLERANCE:
        raise UserError("model.source: training does not change the logits of a small model of this type", _REMEDY)
    result = directory / "result"
    consolidate_checkpoint(checkpoint, result, base=base)
    if adapters:
        _check_alike(_with_peft(base, result), after, "PEFT makes of the adapter")
        merge(base, [WeightedAdapter(result)], directory / "merged")
        result = directory / "merged"
    _check_alike(_loaded(result), after, "transformers loads")


def inputs() -> dict[str, torch.Tensor]:
    """A document alone, as a model takes it."""
    ids = documents()[1]
    return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}


def check_gradients(start: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Raise UserError for an adapter that is as at the `start`: without weight decay, it got no gradient."""
    now = dict(model.named_parameters())
    if dead := [name for name, value in start.items() if torch.equal(now[name], value)]:
        if whole := [name.partition(_WHOLE)[0] for name in dead if _WHOLE in name]:
            raise UserError(
                f"lora.modules_to_save: {whole[0]} gets no gradient: the model does not use it", "remove it"
            )
        modules = [name.partition(".lora_")[0] for name in dead]
        names = ", ".join(sorted(last_parts(modules)))
        raise UserError(
            f"lora.target_modules: an adapter of {modules[0]} gets no gradient: the model reads its weight, or nothing",
            f"set it to modules without {names}",
        )


def _with_peft(base: Path, adapter: Path) -> nn.Module:
    """The model with an adapter as PEFT loads it. Raises UserError for keys that it does not know, or misses."""
    model: nn.Module = get_peft_model(_loaded(base), LoraConfig.from_pretrained(str(adapter)))
    result: Any = set_peft_model_state_dict(model, load_peft_weights(str(adapter), device="cpu"))
    missing = [key for key in result.missing_keys if "lora_" in key]
    _refuse_keys("PEFT", missing, result.unexpected_keys)
    return model


def _loaded(directory: Path) -> PreTrainedModel:
    """The model by transformers alone. Raises UserError for tensors that it does not know, or misses."""
    loader = auto_class(read_config(directory))
    model: PreTrainedModel
    model, info = loader.from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    _refuse_keys("transformers", info["missing_keys"], info["unexpected_keys"])
    return model


def _refuse_keys(reader: str, missing: Any, unexpected: Any) -> None:
    for names, what in ((missing, "misses"), (unexpected, "does not know")):
        if names:
            raise UserError(
                f"model.source: of a trained small model of this type, {reader} {what} {printable(min(names))}"
                f" and {len(names) - 1} others",
                _REMEDY,
            )


@torch.no_grad()
def _check_alike(model: nn.Module, expected: torch.Tensor, what: str) -> None:
    found = model(**inputs(), use_cache=False).logits[0]
    if (off := difference(found, expected)) > TOLERANCE:
        raise UserError(
            f"model.source: what {what} of a small model of this type is not what was trained: its logits are"
            f" {off:.0e} off",
            _REMEDY,
        )
