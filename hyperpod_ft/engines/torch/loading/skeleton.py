"""A base model for this rank alone: built without memory on the meta device, then filled with this rank's shards.

Between the two, the caller adds adapters, splits over tp and shards over dp, for which shapes are enough. A rank thus
never holds more than its own shards and one block of a file, and reads nothing else: the host memory of a node is
what its ranks hold, however many there are.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel, initialization
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import logging

from hyperpod_ft.checkpoint.formats import image_text
from hyperpod_ft.checkpoint.formats.model_directory import read_config, refuse_undecodable
from hyperpod_ft.checkpoint.formats.pretrained import auto_class
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.loading.slices import SliceReader
from hyperpod_ft.engines.torch.sharding.shards import Box, RankShard, local
from hyperpod_ft.errors import UserError, printable

_REMEDY = "make or download the model again"


def build(directory: Path, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """The language model of `directory`, causal or an encoder-decoder, with its parameters on the meta device.

    Of an image-text model, it is the language model alone (image_text.py); a quantized one is built as stage download
    decodes it. Buffers that no file holds are real. Parameters have `dtype`, except those that the model's class keeps
    in fp32. The model's own code is not run. Raises UserError when config.json describes no model that can be built.
    """
    # it warns, on every rank, that a directory named model@revision is not a Python module
    logging.set_verbosity_error()
    described = read_config(directory)
    model_type = str(described.get("model_type", ""))
    # of one with code of its own, transformers says so
    if model_type and model_type not in CONFIG_MAPPING and "auto_map" not in described:
        raise UserError(
            f"{directory}: engine torch's transformers {transformers.__version__} does not know models of type"
            f" {printable(model_type)}",
            "choose another model, or a release of hyperpod-ft with a newer transformers",
        )
    refuse_undecodable(described)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        inner = image_text.language_model(directory)
        config = inner.config if inner else config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        loader = auto_class(config.to_dict())
        with torch.device("meta"), initialization.meta_device_safe_creation_ops():
            model: PreTrainedModel = loader.from_config(
                config, trust_remote_code=False, attn_implementation=attention, dtype=dtype
            )
        _keep_in_fp32(model, dtype)
        _compute_buffers(model)
    except UserError:
        raise
    except Exception as error:  # a damaged config.json raises errors of any type
        reason = " ".join(str(error).split())
        raise UserError(f"{directory}: cannot load the model: {type(error).__name__}: {reason}", _REMEDY) from error
    return model


def materialize(module: nn.Module, device: torch.device, parameters_on: torch.device | None = None) -> None:
    """Give every meta parameter and buffer of `module` memory on `device`, uninitialized; tied ones stay tied.

    `nn.Module.to_empty` would give each name of a tied parameter its own memory. Real buffers move to `device`.
    `parameters_on`: where parameters are instead, for FSDP2 to offload.
    """
    parameters_on = parameters_on or device
    made: dict[torch.Tensor, torch.Tensor] = {}
    for submodule in module.modules():
        tensors_of_kinds: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
        for owned in tensors_of_kinds:
            for name, tensor in owned.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    empty = torch.empty_like(tensor, device=parameters_on if is_parameter else device)
                    made[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                owned[name] = made[tensor]
    # FSDP pads uneven shards, which moves them: now rather than in the first forward pass, while they are empty
    module.to(parameters_on)
    if parameters_on != device:
        for submodule in module.modules():
            for name, buffer in submodule._buffers.items():
                submodule._buffers[name] = None if buffer is None else buffer.to(device)


def fill(module: nn.Module, weights: Mapping[str, LogicalTensor], shards: Mapping[str, RankShard]) -> None:
    """Read this rank's shards of `weights` into the parameters and persistent buffers of `module` with these names.

    `shards`: of its parameters; what has none is whole. Raises UserError when a file cannot be read.
    """
    found = {}
    for name, tensor in _stored(module):
        values = local(tensor.detach())
        found[name] = shards[name].boxes(values) if name in shards else [((0,) * values.ndim, values)]
    fill_boxes(found, weights)


@torch.no_grad()
def fill_boxes(boxes: Mapping[str, list[Box]], weights: Mapping[str, LogicalTensor]) -> None:
    """Read `weights` into the boxes with these names; as `fill`."""
    with SliceReader() as reader:
        for name, own in boxes.items():
            for start, values in own if name in weights else ():
                if devices.fixed_shapes(values.device):
                    # one copy: a copy to each place in it would be compiled
                    whole = torch.empty(values.shape, dtype=values.dtype, device="cpu")
                    reader.copy(weights[name], start, whole)
                    values.copy_(whole)
                else:
                    reader.copy(weights[name], start, values)


def _stored(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name, each once."""
    seen: set[torch.Tensor] = set()
    for path, submodule in module.named_modules():
        buffers = {k: b for k, b in submodule._buffers.items() if k not in submodule._non_persistent_buffers_set}
        for name, tensor in (submodule._parameters | buffers).items():
            if tensor is not None and tensor not in seen:
                seen.add(tensor)
                yield f"{path}.{name}" if path else name, tensor


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What `from_pretrained` does by its `dtype_plan`: some classes keep tensors such as router biases in fp32."""
    if kept := list(model._get_dtype_plan(dtype)):
        pattern, _, _ = build_glob_alternation(kept)
        for name, tensor in _stored(model):
            if pattern.search(name):
                tensor.data = tensor.data.float()


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds, such as rotary frequencies, by the class's own `_init_weights`."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = torch.empty_like(buffer, device="cpu")
    # so that initialization leaves them alone
    for _, tensor in _stored(model):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined] # what transformers looks at
    model.initialize_weights()
