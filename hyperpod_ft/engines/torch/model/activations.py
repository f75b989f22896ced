"""What decoder layers keep for the backward pass: everything, or less and compute it again, or in host memory.

Each function replaces `forward` of the layers, not the layers, so that the names of parameters stay, and hooks of FSDP
run once: they are outside. Results and gradients stay the same bits, random numbers included.
"""

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operation
from torch import nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.lora import product
from hyperpod_ft.engines.torch.sharding.shards import local
from hyperpod_ft.planning.memory import OFFLOADED_BYTES

_aten = torch.ops.aten
# Matrix products, attention and its exchanges: nearly all the time of a forward pass, for a part of its memory.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.torch_attn._varlen_attn.default,
    product.OPERATION,
    # what ranks have exchanged for attention, and for experts
    torch.ops._c10d_functional.all_to_all_single.default,
}
_CHANGED = {_aten._grouped_mm.default, _aten.bmm.default}


def checkpoint_layers(layers: Sequence[nn.Module], training: Training) -> None:
    """Let every k-th layer keep its input, or with `selective` its products too, and compute the rest again."""
    if training.activation_checkpointing == "none":
        return
    contexts: dict[str, Any] = {}
    if training.activation_checkpointing == "selective":
        policy = _policy(_KEPT - _CHANGED if any(_change_products(layer) for layer in layers) else _KEPT)
        contexts["context_fn"] = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
    for layer in layers[:: training.activation_checkpointing_every]:
        layer.forward = _checkpointed(layer.forward, contexts)


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # use_reentrant=False works with frozen inputs, and with collectives inside the layer
        return checkpoint.checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return run


def _change_products(layer: nn.Module) -> bool:
    """Whether it has experts with biases, which transformers adds to their products in place."""
    return any(getattr(module, "has_bias", False) for module in layer.modules())


def _policy(kept: Collection[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(_context: Any, operation: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        if operation not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operation is _aten.bmm.default:
            left, right = args[:2]
            if left.shape[:2].numel() * right.shape[2] > left.numel() + right.numel():
                # attention scores without a kernel for attention: [length, length] for each head
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return policy


def offload_layers(layers: Sequence[nn.Module], device: torch.device, at_least: int = OFFLOADED_BYTES) -> None:
    """Move what autograd keeps of each layer, in tensors of at least that many bytes, to host memory.

    Copies overlap with computation: a layer's tensors leave while the next layer computes, and return while the layer
    after it is in its backward pass. Parameters stay, and so does what layers share: the arguments after the first.
    """
    host = _ActivationStore(device)
    for layer in layers:
        layer.forward = _Offloaded(layer, layer.forward, host, at_least)


class _Offloaded:
    """A layer's forward pass whose kept tensors move to host memory."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any], host: "_ActivationStore", at_least: int) -> None:
        self._layer, self._forward, self._store, self._at_least = layer, forward, host, at_least

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        call = _Call(self._store, self._staying(args[1:], kwargs), self._at_least)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
            result = self._forward(*args, **kwargs)
        call.finish()
        return result

    def _staying(self, *arguments: Any) -> set[int]:
        # looked up in every call: FSDP gathers parameters into other memory
        shared = (value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor))
        tensors = (*self._layer.parameters(), *self._layer.buffers(), *shared)
        return {local(tensor).untyped_storage().data_ptr() for tensor in tensors}


class _OffloadedStorage:
    """The memory of one or several kept tensors: a copy on the host, and the bytes on the device while they are there.

    Both uint8 [bytes].
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.host = host
        self.device: torch.Tensor | None = device


class _Call:
    """What autograd keeps of one call of a layer."""

    def __init__(self, host: "_ActivationStore", staying: set[int], at_least: int) -> None:
        self._store, self._staying, self._at_least = host, staying, at_least
        self._storages: dict[int, _OffloadedStorage] = {}
        # weak: autograd frees each as soon as it has used it, and all of them if there is no backward pass
        self._moved: list[weakref.ref[_OffloadedStorage]] = []
        self.before: weakref.ref[_Call] | None = None  # the call before this one, as long as autograd needs it
        self.returning = False

    def pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) is not torch.Tensor or tensor.device.type != self._store.device.type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._at_least or storage.data_ptr() in self._staying:
            return tensor
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = self._store.take(_bytes(storage))
        kept = self._storages[storage.data_ptr()]
        return self, kept, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        call, kept, dtype, *where = packed
        self._store.bring_back(call)
        assert kept.device is not None
        return torch.empty(0, dtype=dtype, device=kept.device.device).set_(kept.device.untyped_storage(), *where)

    def finish(self) -> None:
        self._moved = [weakref.ref(storage) for storage in self._storages.values()]
        self._store.leave(self, list(self._storages.values()))
        self._storages = {}

    def moved(self) -> list[_OffloadedStorage]:
        """What autograd still needs."""
        return [storage for reference in self._moved if (storage := reference()) is not None]


class _ActivationStore:
    """Copies to host memory and back, on a separate stream where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._newest: weakref.ref[_Call] | None = None
        self._leaving: list[_OffloadedStorage] = []  # of the newest call
        self._left: torch.Event | None = None  # recorded when `_leaving` has been copied

    def take(self, source: torch.Tensor) -> _OffloadedStorage:
        """Start to copy these bytes."""
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=devices.pins(self.device))
        self._copy(host, source)
        return _OffloadedStorage(host, source)

    def leave(self, call: _Call, storages: list[_OffloadedStorage]) -> None:
        """Release on the device what the layer before kept; called after a layer's forward pass."""
        if self._left:
            # memory that the computing stream frees is used again by that stream
            torch.accelerator.current_stream(self.device).wait_event(self._left)
        for storage in self._leaving:
            storage.device = None
        self._leaving = storages
        if self._stream:
            self._left = torch.Event(self.device)
            self._left.record(self._stream)
        call.before, self._newest = self._newest, weakref.ref(call)

    def bring_back(self, call: _Call) -> None:
        """Fetch the tensors of a layer and of the one that is next; called before the layer's backward pass.

        That is the layer called before it, also when other micro batches of a pipeline were called since.
        """
        if call.returning:
            return
        call.returning = True
        # the last layer's are still on the device
        self._leaving = []
        self._fetch(call)
        if self._stream:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)
        if call.before and (before := call.before()):
            self._fetch(before)

    def _fetch(self, call: _Call) -> None:
        for storage in call.moved():
            if storage.device is None:
                # allocated by the computing stream, which may use the memory again as soon as it is free
                storage.device = torch.empty_like(storage.host, device=self.device)
                self._copy(storage.device, storage.host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            target.copy_(source, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
