"""Streams the weights of a transformers model from their files, block by block, when a layer is called.

The model is built on the meta device: structure without weights. A linear layer then computes its outputs one block of
weight rows at a time, and an embedding reads only the rows it needs, so that memory holds one or two blocks. All other
parameters (norms, biases) are small and loaded whole. Everything is computed in fp32.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from hyperpod_ft.checkpoint.formats.pretrained import auto_class
from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.checkpoint.tensors.elements import ARITHMETIC, STORED, widen
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError, first_sentence
from hyperpod_ft.progress import ByteProgress

_BLOCK_BYTES = 16 << 20  # in fp32

# `find(name)`: the stored tensor of a parameter, by its name in the model. Raises UserError if it is missing.
Find = Callable[[str], LogicalTensor]
# `change(tensor, first, rows)`: change rows, fp32, in place; the first one is row `first` of the tensor.
Change = Callable[[LogicalTensor, int, torch.Tensor], None]


def skeleton(directory: Path) -> PreTrainedModel:
    """The model that config.json describes.

    Its parameters are on the meta device, its buffers are real.

    Raises UserError when transformers cannot build it, or its weights are quantized.
    """
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise UserError(f"{directory}: its weights are quantized", "compare logits of unquantized models")
        loader = auto_class(config.to_dict())
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = loader.from_config(
                config, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
            )
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{directory}: transformers cannot build the model: {first_sentence(error)}",
            "correct config.json, or use the version of transformers that wrote it",
        ) from error
    model.eval()
    return model


class Weights:
    """Reads weights as fp32; `change` modifies them after reading."""

    def __init__(self, change: Change | None = None) -> None:
        self._change = change
        # one thread for all layers: each thread that runs torch operations keeps its own memory and threads
        self._ahead = ThreadPoolExecutor(1, "weights")
        self.progress: ByteProgress | None = None

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.shutdown(cancel_futures=True)

    def rows(self, tensor: LogicalTensor, first: int, last: int) -> torch.Tensor:
        """Rows [first, last), (last - first, ...), fp32."""
        if tensor.dtype not in ARITHMETIC:
            raise UserError(
                f"tensor {tensor.name} is {tensor.dtype}, for which logits cannot be computed here",
                "compare with another program",
            )
        row = tensor.elements // max(1, tensor.shape[0])
        stored = np.empty((last - first) * row, STORED[tensor.dtype])
        reading.fill(tensor, first * row, last * row, stored)
        values = torch.from_numpy(widen(stored, tensor.dtype)).float().reshape(last - first, *tensor.shape[1:])
        if self._change:
            self._change(tensor, first, values)
        return values

    def blocks(self, tensor: LogicalTensor) -> Iterator[torch.Tensor]:
        """All rows in order; the next block is read while the current one is used."""
        step = max(1, _BLOCK_BYTES * tensor.shape[0] // (4 * tensor.elements))
        coming = None
        for first in range(0, tensor.shape[0], step):
            ready = coming
            coming = self._ahead.submit(self.rows, tensor, first, min(first + step, tensor.shape[0]))
            if ready:
                yield ready.result()
        if coming:
            yield coming.result()
        if self.progress:
            self.progress.add(tensor.nbytes)


def stream(model: nn.Module, find: Find, weights: Weights, users: Mapping[str, nn.Module]) -> int:
    """Make all parameters on the meta device come from `weights`. Returns the bytes that one call of the model reads.

    `users`: by layer name, the module that reads the layer's weight directly; the weight is loaded during its call, and
    so are the parameters of all experts of a layer.
    Raises UserError when a parameter has no tensor, or one of a different shape.
    """
    total = 0
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            tensor = find(f"{prefix}.{name}")
            if tensor.shape != tuple(parameter.shape):
                raise UserError(
                    f"{tensor.pieces[0].file}: tensor {tensor.name} is {list(tensor.shape)}, config.json requires"
                    f" {list(parameter.shape)}",
                    "use the config.json that belongs to these weights",
                )
            if prefix in users and (name == "weight" or parameter.ndim == 3):
                _load_for(users[prefix], module, name, weights, tensor)
            elif parameter.ndim == 3 and prefix.endswith(".experts"):
                _load_for(module, module, name, weights, tensor)
                total += tensor.nbytes
            # subclasses may do more than look up or multiply
            elif name == "weight" and type(module) is nn.Linear:
                module.forward = partial(_linear, module, weights, tensor)  # type: ignore[method-assign]
                total += tensor.nbytes
            elif name == "weight" and type(module) is nn.Embedding:
                module.forward = partial(_embedding, weights, tensor)  # type: ignore[method-assign]
            else:
                module.register_parameter(name, _loaded(weights, tensor))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                with suppress(UserError):  # the class computes one that no file holds
                    tensor = find(f"{prefix}.{name}")
                    module._buffers[name] = weights.rows(tensor, 0, tensor.shape[0]).to(buffer.dtype)
    return total


def _loaded(weights: Weights, tensor: LogicalTensor) -> nn.Parameter:
    return nn.Parameter(weights.rows(tensor, 0, tensor.shape[0]), requires_grad=False)


def _load_for(user: nn.Module, module: nn.Module, name: str, weights: Weights, tensor: LogicalTensor) -> None:
    missing = module.get_parameter(name)

    def load(*_: object) -> None:
        setattr(module, name, _loaded(weights, tensor))
        if user is module and weights.progress:
            weights.progress.add(tensor.nbytes)

    def drop(*_: object) -> None:
        setattr(module, name, missing)

    user.register_forward_pre_hook(load)
    user.register_forward_hook(drop)


def _linear(module: nn.Linear, weights: Weights, tensor: LogicalTensor, inputs: torch.Tensor) -> torch.Tensor:
    outputs = torch.cat([inputs @ rows.T for rows in weights.blocks(tensor)], dim=-1)
    return outputs if module.bias is None else outputs + module.bias


def _embedding(weights: Weights, tensor: LogicalTensor, tokens: torch.Tensor) -> torch.Tensor:
    rows = [weights.rows(tensor, token, token + 1) for token in tokens.flatten().tolist()]
    return torch.cat(rows).reshape(*tokens.shape, -1)
