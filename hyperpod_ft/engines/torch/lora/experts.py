"""LoRA adapters of parameters that hold a matrix for each expert of a layer, in place of PEFT's `target_parameters`.

While the module computes, such a parameter is W + s B A, expert by expert: whatever the module does with it, in a loop
or in grouped products, stays as it is. That sum is rounded to W's dtype, as PEFT's and that of a merged model are. It
is not kept for the backward pass, but computed again there, so that memory has it for one module at a time.

Names and layout of the factors are in checkpoint/adapters/experts.py. Like all factors, they are fp32.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hyperpod_ft.checkpoint.adapters.experts import nested_paths


def adapt_parameters(module: nn.Module, names: list[str], r: int, scale: float) -> None:
    """Give these parameters of a module adapters, in place; `names` in the order in which its class has them.

    Each is [experts, outputs, inputs], or [experts, inputs, outputs] where the module says `is_transposed`.
    """
    transposed = bool(getattr(module, "is_transposed", False))
    holders = {}
    for name, path in nested_paths(names).items():
        parameter = module.get_parameter(name)
        experts, *shape = parameter.shape
        inputs, outputs = shape if transposed else reversed(shape)
        options: dict[str, Any] = {"bias": False, "device": parameter.device, "dtype": torch.float32}
        holder: Any = module
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = getattr(holder, part)
        holder.lora_A = nn.Linear(inputs, r * experts, **options)
        holder.lora_B = nn.Linear(r * experts, outputs, **options)
        holders[name] = holder
    module.forward = _AdaptedForward(module, module.forward, holders, transposed, scale)


class _AdaptedForward:
    """A module's forward pass in which parameters have their adapters' updates. `holders`: of the factors, by name."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        holders: Mapping[str, nn.Module],
        transposed: bool,
        scale: float,
    ) -> None:
        self._module, self._forward, self._holders = module, forward, holders
        self._transposed, self._scale = transposed, scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        updated = {name: self.updated(name) for name in self._holders}
        # found before the parameters, which keep their names and places
        own = self._module.__dict__
        own.update(updated)
        try:
            with self._not_keeping(updated):
                return self._forward(*args, **kwargs)
        finally:
            for name in updated:
                del own[name]

    def _not_keeping(self, updated: Mapping[str, torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """The context in which the module computes. A compiler decides by itself what it keeps."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        again = _Again(self, updated)
        return torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack)

    def updated(self, name: str) -> torch.Tensor:
        """A parameter with its update, in its dtype. FSDP may have replaced it since the last call."""
        holder: Any = self._holders[name]
        a, b = holder.lora_A.weight, holder.lora_B.weight
        result: torch.Tensor = _operation(self._module._parameters[name], a, b, self._scale, self._transposed)
        return result


class _View(NamedTuple):
    """A view of an updated parameter that autograd needs."""

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int | torch.SymInt


class _Again:
    """Computes updated parameters again when autograd needs them, instead of keeping them until then.

    What becomes of other tensors, the context outside decides: they may go to host memory.
    """

    def __init__(self, adapted: _AdaptedForward, updated: Mapping[str, torch.Tensor]) -> None:
        self._adapted = adapted
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in updated.items()}
        self._packed = dict.fromkeys(updated, 0)  # views that autograd still needs
        self._computed: dict[str, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        name = self._names.get(tensor.untyped_storage().data_ptr())
        if name is None:
            return self._outer[0](tensor) if self._outer else tensor
        self._packed[name] += 1
        return _View(name, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _View):
            other: torch.Tensor = self._outer[1](packed) if self._outer else packed
            return other
        name = packed.name
        if name not in self._computed:
            with torch.no_grad():
                self._computed[name] = self._adapted.updated(name)
        result = self._computed[name].as_strided(packed.shape, packed.strides, packed.offset)
        self._packed[name] -= 1
        if not self._packed[name]:
            del self._computed[name]
        return result


def _factors(a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [experts, r, inputs] and B [experts, outputs, r]; views."""
    return a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)


def forward(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, transposed: bool) -> torch.Tensor:
    """W + s B A of each expert, [experts, outputs, inputs], or with `transposed` [experts, inputs, outputs]."""
    of_a, of_b = (each.to(weight.dtype) for each in _factors(a, b, len(weight)))
    left, right = (of_a.mT, of_b.mT) if transposed else (of_b, of_a)
    return torch.baddbmm(weight, left, right, alpha=scale)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, a, b, ctx.scale, ctx.transposed = inputs
    ctx.experts = len(weight)
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, b = ctx.saved_tensors
    of_a, of_b = (each.to(gradient.dtype) for each in _factors(a, b, ctx.experts))
    by_outputs = gradient.mT if ctx.transposed else gradient
    to_a = (of_b.mT @ by_outputs).to(a.dtype) * ctx.scale
    to_b = (by_outputs @ of_a.mT).to(b.dtype) * ctx.scale
    return None, to_a.reshape(a.shape), to_b.permute(1, 2, 0).reshape(b.shape), None, None


# One operation, which selective checkpointing computes again: torch's own ones are matrix products, which it keeps.
_operation = torch.library.custom_op("hyperpod_ft::updated_experts", forward, mutates_args=())
_operation.register_fake(lambda weight, *_: torch.empty_like(weight))
_operation.register_autograd(_backward, setup_context=_keep)
