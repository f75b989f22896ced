"""LoRA adapters (Hu et al., arXiv:2106.09685) and their variants, on a Hugging Face model's own modules.

A target keeps its place and the names of its parameters, so that weights are found under the names in the model's
files: `adapt` replaces an nn.Linear, or a Conv1D as GPT-2 has, by a `LoraLinear`, and adds the factors to an
nn.Embedding. The factors have the names in PEFT's files, without their prefix `base_model.model.`:

    <module>.lora_A.weight         (r, in)      of a linear layer
    <module>.lora_B.weight         (out, r)
    <module>.lora_embedding_A      (r, vocabulary)      of an embedding
    <module>.lora_embedding_B      (width, r)
    <module>.lora_magnitude_vector (out,)       DoRA

All of them are fp32, and used in the dtype of the layer's input, or in the one it is multiplied in.

Definitions and initial values are PEFT's (0.21, tuners/lora/layer.py and dora.py), with scale s = alpha / r, or
alpha / sqrt(r) with rsLoRA (arXiv:2312.03732):

    LoRA  y = x W^T + b + s (d(x) A^T) B^T                  d: dropout
    DoRA  y = b + x W^T - d(x) W^T + m / |W + s B A| * (d(x) W^T + s (d(x) A^T) B^T)

DoRA (arXiv:2402.09353): |.| is the norm of each row and constant in the backward pass (section 4.3).

LoRA+ (arXiv:2402.12354) changes the learning rate of B only: `learning_rate_factor`.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hyperpod_ft.checkpoint.adapters.experts import parameters_of
from hyperpod_ft.checkpoint.adapters.lora_config import ends_with
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.torch.lora import nf4
from hyperpod_ft.engines.torch.lora.experts import adapt_parameters
from hyperpod_ft.engines.torch.lora.product import flat, product, squared_row_norms
from hyperpod_ft.engines.torch.tensor_collectives import dropout_of_part
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.lora import refuse_unknown, refuse_unknown_parameters, targets, whole_modules

# Names of linear layers that PEFT 0.21 takes for those of experts, wherever they are, in `target_modules` of a mixture
# (utils/transformers_weight_conversion.py). In `target_parameters` they mean themselves; the factors are the same.
_TAKEN_FOR_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def adapt(model: PreTrainedModel, lora: Lora, seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Freeze `model`, but for what is trained whole, and give the targets adapters, in place; on the meta device too.

    Factors are on their module's device. On a real device they have their initial values; on the meta device,
    `initial_value` and `initial_magnitude` give those later, and `LoraLinear.quantize` takes a 4-bit weight.

    Returns what has adapters, as PEFT's `target_modules` and `target_parameters` name it. Raises UserError when a
    target matches nothing, or PEFT could not load it.
    """
    model.requires_grad_(False)
    joined = joined_parameters(model)
    candidates = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)
    }
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if joined and lora.target_modules is None:
        wanted = _linears_beside(len(model.get_parameter(joined[0])), model, candidates)
    else:
        wanted = targets(lora, model.config.model_type)
        refuse_unknown(wanted, candidates)
    refuse_unknown_parameters(lora.target_parameters, joined)
    _adapt_parameters(model, [name for name in joined if _is_named(name, lora.target_parameters)], lora)
    for name, module in candidates.items():
        if not _is_named(name, wanted):
            continue
        if isinstance(module, nn.Embedding):
            _adapt_embedding(module, lora)
        else:
            # like bitsandbytes, keep the output layer's precision
            quantized = lora.quantization == "nf4" and module is not output
            model.set_submodule(name, LoraLinear(module, lora, quantized))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_meta:
            value = initial_value(name, parameter.shape, seed)
            if value is None:
                value = initial_magnitude(model.get_submodule(name.rpartition(".")[0]))
            parameter.data.copy_(value)
    for name in _whole_modules(model, lora):
        model.get_submodule(name).requires_grad_(True)
    mistaken = {name for name in wanted if joined and name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS}
    if mistaken and lora.dora:
        raise UserError(
            f"lora.dora: PEFT cannot load an adapter with DoRA of {min(mistaken)} beside experts",
            "set it to false, or name other modules in lora.target_modules",
        )
    weights = (f"{name}.weight" for name in sorted(mistaken))
    return tuple(name for name in wanted if name not in mistaken), (*lora.target_parameters, *weights)


def _whole_modules(model: PreTrainedModel, lora: Lora) -> tuple[str, ...]:
    """The paths of what `lora.modules_to_save` names. Raises UserError as `planning.lora.whole_modules` does."""
    if not lora.modules_to_save:
        return ()
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [name for name, module in model.named_modules() if module in (embedding, output)]
    return whole_modules(lora.modules_to_save, ends, tied=embedding.weight is output.weight)


def is_factor(name: str) -> bool:
    """Whether a parameter is an adapter's own: others that are trained are the model's, which are trained whole."""
    return ".lora_" in name


def joined_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters that hold a matrix for each expert."""
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if name.endswith(".experts")
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def _is_named(path: str, names: Iterable[str]) -> bool:
    return any(ends_with(path, name) for name in names)


def _linears_beside(experts: int, model: PreTrainedModel, candidates: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The last names of a mixture's linear layers, but the output layer, routers and gates; `experts`: their number."""
    output = model.get_output_embeddings()
    linears = (
        name
        for name, module in candidates.items()
        if isinstance(module, nn.Linear) and module is not output and module.out_features not in (1, experts)
    )
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in linears))


def _adapt_parameters(model: nn.Module, names: Iterable[str], lora: Lora) -> None:
    of_modules: dict[str, list[str]] = {}
    for name in names:
        module, _, key = name.rpartition(".")
        of_modules.setdefault(module, []).append(key)
    for module, keys in of_modules.items():
        if keys != parameters_of(module, [f"{module}.{key}" for key in keys]):
            raise UserError(
                f"lora.target_parameters: how PEFT would nest {' and '.join(keys)} of {module} is not known",
                "leave it out, or name one of them",
            )
        adapt_parameters(model.get_submodule(module), keys, lora.r, _scale(lora))


def initial_value(name: str, shape: torch.Size, seed: int) -> torch.Tensor | None:
    """The whole initial factor with this name in the model, fp32 on the CPU; None for a DoRA magnitude.

    It depends on nothing else, so it is the same on every rank and in every layout.
    """
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big"))
    value = torch.zeros(shape)
    if name.endswith(".lora_A.weight"):
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    elif name.endswith(".lora_embedding_B"):
        nn.init.normal_(value, generator=generator)
    return None if name.endswith(".lora_magnitude_vector") else value


def initial_magnitude(module: Any) -> torch.Tensor:
    """DoRA's initial magnitude of an adapted module: the norms of the base weight's rows, fp32 [out].

    Of this rank's outputs, where tensor parallelism divides them. Collective if ranks have parts of rows, or the weight
    is sharded. An embedding's output is a column of its weight.
    """
    if isinstance(module, LoraLinear):
        weight = module.base_weight(torch.float32)
    else:
        weight = module.weight.detach().T
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    norms = norms.full_tensor() if isinstance(norms, DTensor) else norms
    return norms if module.row_group is None else _over_parts(norms.square(), module.row_group).sqrt()


def _over_parts(squares: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Squared norms of rows from those of this rank's part of each row; `group` None: it has whole rows."""
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares


def _magnitude_over_norm(
    module: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """DoRA's m / |W + s B A| of each row, fp32 [out], of an adapted module with base weight W, `weight` [out, in]."""
    squares = _over_parts(squared_row_norms(weight, a, b, scale), module.row_group)
    ratio: torch.Tensor = module.lora_magnitude_vector / squares.sqrt()
    return ratio


def learning_rate_factor(name: str, lora: Lora) -> float:
    """What the learning rate of the parameter `name` is multiplied by: LoRA+ has a ratio for B of linear layers."""
    return lora.plus_ratio if name.endswith(".lora_B.weight") else 1.0


class LoraLinear(nn.Linear):
    """A frozen linear layer with a LoRA adapter: x [..., in] -> [..., out].

    `transposed`: `weight` is [in, out], as Conv1D stores it.
    """

    codes: torch.Tensor | None
    scales: torch.Tensor | None

    def __init__(self, base: nn.Linear | Conv1D, lora: Lora, quantized: bool = False) -> None:
        self.transposed = isinstance(base, Conv1D)
        inputs, outputs = base.weight.shape if self.transposed else reversed(base.weight.shape)
        super().__init__(inputs, outputs, bias=False, device="meta")
        device = base.weight.device
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = _scale(lora), lora.dropout
        self.row_group: dist.ProcessGroup | None = None
        self.lora_A = nn.Linear(self.in_features, lora.r, bias=False, device=device, dtype=torch.float32)
        self.lora_B = nn.Linear(lora.r, self.out_features, bias=False, device=device, dtype=torch.float32)
        self.lora_magnitude_vector = _new(self.out_features, device=device) if lora.dora else None
        self.train(base.training)
        codes, scales = nf4.empty(base.weight.numel(), device) if quantized else (None, None)
        # buffers, so that FSDP leaves them whole on each rank
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        if quantized:
            self.weight = None  # type: ignore[assignment]
            if not base.weight.is_meta:
                self.quantize(base.weight)

    def quantize(self, weight: torch.Tensor) -> None:
        """Keep the base weight, as stored, as NF4."""
        self.codes, self.scales = nf4.quantize(weight.T if self.transposed else weight)

    def divide_rows(self, group: dist.ProcessGroup) -> None:
        """Each rank of the group has a part of every row of the weight; the caller sums outputs and adds the bias."""
        self.row_group = group

    def base_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The frozen weight [out, in], a view of what is stored; one in 4 bits is decoded to `dtype`."""
        if self.codes is None or self.scales is None:
            return self.weight.detach().T if self.transposed else self.weight.detach()
        return nf4.dequantize(self.codes, self.scales, (self.out_features, self.in_features), dtype)

    def ratio(self, plain: torch.Tensor) -> torch.Tensor:
        """DoRA's magnitude over norm of each row, fp32 [out]; `plain`: the base weight."""
        return _magnitude_over_norm(self, plain, self.lora_A.weight, self.lora_B.weight, self.scale)

    def forward(self, input: torch.Tensor, ratio: torch.Tensor | None = None) -> torch.Tensor:
        """`ratio`: what the method of this name returns, for a caller that calls this more than once."""
        a, b = self.lora_A.weight, self.lora_B.weight
        weight = self.base_weight(input.dtype) if self.codes is None else self.codes
        bias = self.bias if self.row_group is None else None
        dropped = self._dropped(input) if self.training and self.dropout else None
        if self.lora_magnitude_vector is None:
            return product(input, dropped, weight, self.scales, bias, a, b, self.scale)
        plain = self.base_weight(input.dtype)
        ratio = (self.ratio(plain) if ratio is None else ratio).to(input.dtype)
        adapted = input if dropped is None else dropped
        unscaled = product(adapted, None, weight, self.scales, None, a, b, self.scale)
        result = unscaled * ratio if bias is None else torch.addcmul(bias, unscaled, ratio)
        # PEFT drops no input of the base layer itself
        return result if dropped is None else result + nn.functional.linear(input - dropped, plain)

    def _dropped(self, input: torch.Tensor) -> torch.Tensor:
        if self.row_group is None:
            return nn.functional.dropout(input, self.dropout)
        return dropout_of_part(input, self.dropout, -1, self.row_group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, r={self.lora_A.out_features}, scale={self.scale:g}"


def is_adapted(module: nn.Module) -> bool:
    """Whether `adapt` has given the module an adapter."""
    return hasattr(module, "lora_A") or hasattr(module, "lora_embedding_A")


def _scale(lora: Lora) -> float:
    return lora.alpha / (math.sqrt(lora.r) if lora.rslora else lora.r)


def _new(*shape: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=torch.float32))


def _adapt_embedding(module: Any, lora: Lora) -> None:
    device = module.weight.device
    module.lora_embedding_A = _new(lora.r, module.num_embeddings, device=device)
    module.lora_embedding_B = _new(module.embedding_dim, lora.r, device=device)
    module.lora_magnitude_vector = _new(module.embedding_dim, device=device) if lora.dora else None
    module.row_group, module.own_rows = None, slice(None)
    module.register_forward_hook(_EmbeddingUpdate(_scale(lora), module.padding_idx))


def divide_embedding(module: Any, own: range, group: dist.ProcessGroup) -> None:
    """Let each rank of the group have its `own` rows of an adapted embedding's base weight; the factors stay whole."""
    module.row_group, module.own_rows = group, slice(own.start, own.stop)


class _EmbeddingUpdate:
    """A forward hook that adds an embedding's adapter to its output: token ids [...] -> [..., width]."""

    def __init__(self, scale: float, padding: int | None) -> None:
        self._scale, self._padding = scale, padding

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        a, b = module.lora_embedding_A, module.lora_embedding_B
        narrow = nn.functional.embedding(args[0], a.T, self._padding).to(output.dtype)
        factor = getattr(module, "embed_scale", None)  # Gemma's embedding multiplies its output
        if factor is not None:
            narrow = narrow * factor.to(narrow.dtype)
        update = torch.addmm(flat(output), flat(narrow), b.to(output.dtype).T, alpha=self._scale).view_as(output)
        if module.lora_magnitude_vector is None:
            return update
        ratio = _magnitude_over_norm(module, module.weight.T, a[:, module.own_rows], b, self._scale)
        return update * ratio.to(update.dtype)
