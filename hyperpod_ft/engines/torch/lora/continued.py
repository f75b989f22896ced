"""The factors of an adapter that training continues, as PEFT saved them."""

from pathlib import Path

from torch import nn

from hyperpod_ft.checkpoint.adapters.lora import PREFIX, WEIGHTS
from hyperpod_ft.checkpoint.adapters.lora_config import is_frozen_base
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError

_MAGNITUDE = ".lora_magnitude_vector"


def starting_factors(adapter: Path, model: nn.Module) -> dict[str, LogicalTensor]:
    """The tensors of the adapter in a directory, by the names of the trained parameters of `model`, which is whole.

    Raises UserError unless these are all of them, each with its shape.
    """
    file = adapter / WEIGHTS
    stored = {_name(tensor.name): tensor for tensor in read_file(file) if not is_frozen_base(tensor.name)}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name in sorted(shapes.keys() ^ stored.keys()):
        raise UserError(
            f"model.adapter.source: {file} has {'no' if name in shapes else 'a'} {name}, and the model has"
            f" {'one' if name in shapes else 'none'}",
            "give an adapter of model.source, or leave model.adapter out",
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise UserError(
                f"model.adapter.source: {name} has shape {list(stored[name].shape)} in {file}, and {list(shape)} in the"
                " model",
                "give an adapter of model.source, or leave model.adapter out",
            )
    return stored


def _name(saved: str) -> str:
    """A parameter's name in the model. Some versions of PEFT save a DoRA magnitude as a module's weight."""
    name = saved.removeprefix(PREFIX)
    return name.removesuffix(".weight") if name.endswith(f"{_MAGNITUDE}.weight") else name
