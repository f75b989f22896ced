"""Tensor parallelism of T5: as model/tensor_parallel.py for others, in two stacks with three kinds of attention.

Each rank has some heads of all attentions, with their columns of the relative position bias, and some units of the
MLPs. Cross-attention reads the encoder's output too, whose gradients add up over the ranks as those of its own input.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hyperpod_ft.engines.torch.model import vocabulary_parallel
from hyperpod_ft.engines.torch.model.tensor_collectives import copy_to_ranks, divide_dropout, sum_over_ranks
from hyperpod_ft.engines.torch.model.tensor_parallel import Splitting
from hyperpod_ft.engines.torch.sharding.shards import TensorSplit
from hyperpod_ft.planning.families import Family

_ATTENTION = Family(("t5",), columns=dict.fromkeys("qkv", ("queries",)), rows=("o",))


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, TensorSplit]:
    """Split a T5 over the 1-D `mesh`, in place; returns what became of parameters, by FQN.

    As that of other families, without sequence parallelism.
    """
    splits: dict[nn.Parameter, TensorSplit] = {}
    for module in model.modules():
        if hasattr(module, "SelfAttention") or hasattr(module, "EncDecAttention"):
            attention: Any = getattr(module, "EncDecAttention", None) or module.SelfAttention
            splitting = _split(attention, Splitting(model.config, _ATTENTION, mesh))
            if attention.has_relative_attention_bias:
                splitting.divide(attention.relative_attention_bias, ("queries",), {"weight": 1})
            splits |= splitting.splits
        elif hasattr(module, "DenseReluDense"):
            mlp: Any = module.DenseReluDense
            inputs = [name for name in ("wi", "wi_0", "wi_1") if hasattr(mlp, name)]
            family = Family(("t5",), columns=dict.fromkeys(inputs, ("units",)), rows=("wo",))
            splits |= _split(mlp, Splitting(model.config, family, mesh)).splits
            divide_dropout(mlp.dropout, mesh.get_group(), dim=-1)
    embeddings = [model.get_submodule(name) for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
    splits |= vocabulary_parallel.divide(
        embeddings, model.get_output_embeddings(), model.config.vocab_size, mesh.get_group()
    )
    return {name: splits[parameter] for name, parameter in model.named_parameters() if parameter in splits}


def _split(block: nn.Module, splitting: Splitting) -> Splitting:
    block.register_forward_pre_hook(_enter(splitting.group), with_kwargs=True)
    splitting.linears(block, sum_over_ranks)
    return splitting


def _enter(group: dist.ProcessGroup) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states = {name: copy_to_ranks(kwargs[name], group) for name in ("key_value_states",) if name in kwargs}
        return (copy_to_ranks(args[0], group), *args[1:]), kwargs | states

    return hook
