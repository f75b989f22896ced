"""Streams the weights of a transformers model from their files, block by block, when a layer is called.

The model is built on the meta device: structure without weights. A linear layer then computes its outputs one block of
weight rows at a time, and an embedding reads only the rows it needs, so that memory holds one or two blocks. Another
module that computes with such a weight itself, as DoRA's and Mamba's do, gets it whole for that operation. All other
parameters (norms, biases) are small and loaded whole. Everything is computed in fp32.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from torch.utils._pytree import tree_map_only
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
        row = math.prod(tensor.shape[1:])
        stored = np.empty((last - first) * row, STORED[tensor.dtype])
        reading.fill(tensor, first * row, last * row, stored)
        values = torch.from_numpy(widen(stored, tensor.dtype)).float().reshape(last - first, *tensor.shape[1:])
        if self._change:
            self._change(tensor, first, values)
        return values

    def whole(self, tensor: LogicalTensor) -> torch.Tensor:
        """All of it, also of one without dimensions, fp32."""
        return self.rows(tensor, 0, tensor.shape[0] if tensor.shape else 1).reshape(tensor.shape)

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

    `users`: by a module's name, another one that changes its parameters before it computes; they are loaded during the
    other's call, and those of all experts of a layer during theirs.
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
            if prefix in users:
                _load_for(users[prefix], module, name, weights, tensor)
            elif parameter.ndim == 3 and prefix.endswith(".experts"):
                _load_for(module, module, name, weights, tensor)
                total += tensor.nbytes
            # subclasses may do more than look up or multiply
            elif name == "weight" and type(module) in (nn.Linear, nn.Embedding):
                module.weight = _Streamed.of(weights, tensor)
                if isinstance(module, nn.Linear):
                    module.forward = partial(_linear, module, weights, tensor)  # type: ignore[method-assign]
                    total += tensor.nbytes
                else:
                    module.forward = partial(_embedding, weights, tensor)
            else:
                module.register_parameter(name, _loaded(weights, tensor))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                with suppress(UserError):  # the class computes one that no file holds
                    tensor = find(f"{prefix}.{name}")
                    module._buffers[name] = weights.whole(tensor).to(buffer.dtype)
    return total


# What a weight that is not there can tell of itself.
_KNOWN = (
    torch.Tensor.size,
    torch.Tensor.dim,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn")),
)


class _Streamed(nn.Parameter):
    """A weight whose layer reads it in blocks. Every other operation on it reads it whole, and frees it again.

    On the meta device it would do harm: torch multiplies it with a tensor of the CPU, and returns uninitialized memory.
    """

    load: Callable[[], nn.Parameter]

    @classmethod
    def of(cls, weights: Weights, tensor: LogicalTensor) -> "_Streamed":
        streamed = cls(torch.empty(()).expand(tensor.shape), requires_grad=False)  # one element, whatever the shape
        streamed.load = partial(_loaded, weights, tensor)
        return streamed

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _KNOWN:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        args, kwargs = tree_map_only(cls, lambda streamed: streamed.load(), (args, kwargs or {}))
        return function(*args, **kwargs)


def _loaded(weights: Weights, tensor: LogicalTensor) -> nn.Parameter:
    return nn.Parameter(weights.whole(tensor), requires_grad=False)


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
