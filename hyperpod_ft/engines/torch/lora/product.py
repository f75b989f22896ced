"""The matrix products of a layer with a LoRA adapter, as one operation."""

import platform
from typing import Any

import torch
from torch import nn

from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.lora import nf4

# x86 processors without bf16 instructions convert bf16 inside each product, at a quarter of the speed of fp32.
_WIDENS = platform.machine() == "x86_64" and not (
    torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
)


@torch.no_grad()
def squared_row_norms(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """The squared norm of each row of W + s B A, [out], in fp32 (fp64 for fp64), without computing that matrix.

    |w + s b A|^2 = |w|^2 + 2 s (w A^T) . b + s^2 (b A A^T) . b, for a row w of W and b of B. Over ranks that each have
    some columns of W and A, it is the sum of their parts.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    wide_a, wide_b = a.to(dtype), b.to(dtype)
    squares: torch.Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
    cross = (weight @ a.to(weight.dtype).T).to(dtype)
    return squares + (wide_b * (2 * scale * cross + scale**2 * (wide_b @ (wide_a @ wide_a.T)))).sum(1)


def product(
    x: torch.Tensor,
    dropped: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """x W^T + b + s (d A^T) B^T with frozen W and b, where d is the input after dropout (None: x itself).

    x [..., in], A [r, in], B [out, r] -> [..., out]. Both products of the output's size accumulate in one tensor. What
    is kept for the backward pass, beside the parameters: d, and d A^T of [..., r]. Gradients have their input's dtype.

    If W is in NF4, `weight` and `scales` are its codes and scales, decoded in each pass.

    Where shapes are fixed, it is written in torch's own operations, which the device's compiler knows.
    """
    if not devices.fixed_shapes(x.device):
        output: torch.Tensor = _operation(x, dropped, weight, scales, bias, a, b, scale)[0]
        return output
    narrow = nn.functional.linear(x if dropped is None else dropped, a.to(x.dtype)) * scale
    matrix = _decoded(weight, scales, a, b, x.dtype)
    frozen = nn.functional.linear(x, matrix, None if bias is None else bias.to(x.dtype))
    return frozen + nn.functional.linear(narrow, b.to(x.dtype))


def forward(
    x: torch.Tensor,
    dropped: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of `product`, and s d A^T."""
    adapted, dtype = x if dropped is None else dropped, _arithmetic(x)
    narrow = nn.functional.linear(adapted.to(dtype), a.to(dtype)) * scale
    matrix = _decoded(weight, scales, a, b, dtype)
    output = nn.functional.linear(x.to(dtype), matrix, None if bias is None else bias.to(dtype))
    flat(output).addmm_(flat(narrow), b.to(dtype).T)
    return output.to(x.dtype), narrow


def _shapes(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, _, _, _, _, a, b, _ = given
    output = x.new_empty(*x.shape[:-1], b.shape[0])
    return output, x.new_empty(*x.shape[:-1], a.shape[0], dtype=_arithmetic(x))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, dropped, weight, scales, _, a, b, scale = inputs
    ctx.save_for_backward(x if dropped is None else dropped, output[1], weight, scales, a, b)
    ctx.scale, ctx.has_dropout = scale, dropped is not None


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    adapted, narrow, weight, scales, a, b = ctx.saved_tensors
    dtype = narrow.dtype
    wide = flat(gradient).to(dtype)
    through_b = (wide @ b.to(dtype)) * ctx.scale
    of_a = (through_b.T @ flat(adapted).to(dtype)).to(a.dtype)
    of_b = (wide.T @ flat(narrow)).to(b.dtype)
    of_x = of_dropped = None
    if ctx.needs_input_grad[0]:
        of_x = _input_gradient_operation(wide, None if ctx.has_dropout else through_b, weight, scales, a, b)
        of_x = of_x.view(adapted.shape).to(adapted.dtype)
    if ctx.needs_input_grad[1]:
        of_dropped = (through_b @ a.to(dtype)).view(adapted.shape).to(adapted.dtype)
    return of_x, of_dropped, None, None, None, of_a, of_b, None


def input_gradient(
    gradient: torch.Tensor,
    through_b: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor:
    """g W + (s g B) A for the output's gradient g [tokens, out].

    `through_b`: s g B; None with dropout, since what was dropped has a gradient of its own.
    """
    of_x = gradient @ _decoded(weight, scales, a, b, gradient.dtype)
    return of_x if through_b is None else of_x.addmm_(through_b, a.to(gradient.dtype))


# An operation too: of torch's own ones the compiler makes a sum that first copies what it adds to, 2.5 % of the step of
# an 8B model on a GPU.
_input_gradient_operation = torch.library.custom_op("hyperpod_ft::lora_input_gradient", input_gradient, mutates_args=())
_input_gradient_operation.register_fake(
    lambda gradient, _, __, ___, a, ____: gradient.new_empty(len(gradient), a.shape[1])
)

# one operation, so that selective checkpointing can keep its results: it cannot keep what is changed in place
_operation = torch.library.custom_op("hyperpod_ft::lora_product", forward, mutates_args=())
_operation.register_fake(_shapes)
_operation.register_autograd(_backward, setup_context=_keep)
OPERATION = torch.ops.hyperpod_ft.lora_product.default


def flat(values: torch.Tensor) -> torch.Tensor:
    """[..., n] as a matrix, which shares memory where it can."""
    return values.view(-1, values.shape[-1]) if values.is_contiguous() else values.reshape(-1, values.shape[-1])


def _decoded(
    weight: torch.Tensor, scales: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return weight.to(dtype) if scales is None else nf4.dequantize(weight, scales, (b.shape[0], a.shape[1]), dtype)


def _arithmetic(x: torch.Tensor) -> torch.dtype:
    """The dtype to multiply in: fp32 in place of bf16 on a CPU that has no bf16 products, where it is faster."""
    return torch.float32 if _WIDENS and x.dtype == torch.bfloat16 and x.device.type == "cpu" else x.dtype
