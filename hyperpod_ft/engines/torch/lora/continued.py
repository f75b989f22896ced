"""What an adapter that training continues has been trained to: factors and whole modules, as PEFT saved them."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from hyperpod_ft.checkpoint.adapters.lora_config import PREFIX, WEIGHTS, is_frozen_base, is_second_copy
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

_MAGNITUDE = ".lora_magnitude_vector"


def starting_factors(adapter: Path, model: nn.Module, stored_names: Mapping[str, str]) -> dict[str, LogicalTensor]:
    """The tensors of the adapter in a directory, by the names of the trained parameters of `model`, which is whole.

    `stored_names`: those in files, where they are not the model's. Raises UserError unless these are all of
    them, each with its shape.
    """
    file = adapter / WEIGHTS
    saved = (tensor for tensor in read_file(file) if not is_frozen_base(tensor.name))
    stored = {_name(tensor.name): tensor for tensor in saved if not is_second_copy(tensor.name)}
    trained = (each for each in model.named_parameters() if each[1].requires_grad)
    names = {stored_names.get(name, name): (name, tuple(parameter.shape)) for name, parameter in trained}
    for name in sorted(names.keys() ^ stored.keys()):
        raise UserError(
            f"model.adapter.source: {file} has {'no' if name in names else 'a'} {name}, and the model has"
            f" {'one' if name in names else 'none'}",
            "give an adapter of model.source, or leave model.adapter out",
        )
    for name, (_, shape) in names.items():
        if stored[name].shape != shape:
            raise UserError(
                f"model.adapter.source: {name} has shape {list(stored[name].shape)} in {file}, and {list(shape)} in the"
                " model",
                "give an adapter of model.source, or leave model.adapter out",
            )
    return {own: stored[name] for name, (own, _) in names.items()}


def _name(saved: str) -> str:
    """A parameter's name in the model. Some versions of PEFT save a DoRA magnitude as a module's weight."""
    name = saved.removeprefix(PREFIX)
    return name.removesuffix(".weight") if name.endswith(f"{_MAGNITUDE}.weight") else name
