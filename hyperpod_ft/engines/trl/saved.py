"""Whether a model that TRL trains whole could be consolidated: by the names of what is saved, before it is trained."""

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.engines.checkpoint_directory import check_consolidable
from hyperpod_ft.errors import UserError


def check_saved(model: PreTrainedModel, directory: Path) -> None:
    """Raise UserError unless what `save_pretrained` makes of a model loaded from `directory` has its files' tensors.

    `model`: on the meta device; reads headers only. Names depend on those that were loaded: transformers reverts its
    conversions of these, but adds prefixes that the files lack, and leaves out what its class has not.
    """
    stored = {tensor.name: torch.empty(tensor.shape, device="meta") for tensor in read_model(directory)}
    loaded: PreTrainedModel = type(model).from_pretrained(
        None, config=model.config, state_dict=stored, device_map="meta", dtype=torch.float32
    )
    written = revert_weight_conversion(loaded, remove_tied_weights_from_state_dict(loaded.state_dict(), loaded))
    try:
        _check(written, directory)
    except UserError as error:
        raise UserError(error.problem, "set training.method to lora, or use engine torch") from error


def why_not_sharded(model: PreTrainedModel, directory: Path) -> str:
    """Why ranks would not shard all weights: their checkpoints have the names of transformers' class."""
    try:
        _check(model.state_dict(), directory)
    except UserError:
        return "what its ranks save could not be consolidated"
    return ""


def _check(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    check_consolidable({name: tuple(tensor.shape) for name, tensor in tensors.items()}, None, directory, {})
