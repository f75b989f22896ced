"""The estimate of what a layer keeps for the backward pass, beside what it keeps on this CPU.

    python -m scripts.activation_memory

prints them as a table. Measured is the memory of all tensors that exist after a forward pass and did not
before, of a model with four layers less that of one with two.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.engines.torch.lora import adapters
from hyperpod_ft.engines.torch.model import (
    activations,
    attention,
    context_parallel,
    gated_mlp,
    rms_norm,
    tensor_parallel,
)
from hyperpod_ft.planning.families import family_of
from hyperpod_ft.planning.model_fit import estimate, shape_of
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.torch.memory import has_sequence_parallel

ROWS, LENGTH = 2, 128
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}


# what differs in other families
_GPT = {"num_key_value_heads": None, "n_inner": 352, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"pad_token_id": 0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {"pad_token_id": 0},
    "gpt2": _GPT | {"n_embd": 128, "n_head": 8, "n_positions": LENGTH},
    "gpt_neox": {"num_key_value_heads": None, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "gptj": _GPT | {"n_embd": 128, "n_head": 8, "n_positions": LENGTH, "rotary_dim": 8},
    "phi3": {"num_key_value_heads": 8, "pad_token_id": 0},
}
_EXPERTS = {"pad_token_id": 0, "num_experts_per_tok": 4}
_WIDTHS = {"moe_intermediate_size": 96, "first_k_dense_replace": 0, "n_shared_experts": 1}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"head_dim": 8, "num_key_value_heads": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _EXPERTS | _WIDTHS | _LATENT | {"n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    "glm4_moe": _EXPERTS | _WIDTHS | {"n_routed_experts": 8},
    "granitemoe": _EXPERTS | {"num_local_experts": 8, "intermediate_size": 96},
    "mixtral": _EXPERTS | {"num_local_experts": 8, "intermediate_size": 96},
    "olmoe": _EXPERTS | {"num_experts": 8, "intermediate_size": 96},
    "qwen2_moe": _EXPERTS | _WIDTHS | {"num_experts": 8, "shared_expert_intermediate_size": 160},
    "qwen3_moe": _EXPERTS | _WIDTHS | {"num_experts": 8},
}


@dataclass(frozen=True)
class Choice:
    """What the memory of activations depends on."""

    checkpointing: str = "none"
    method: str = "full"
    precision: str = "bf16"
    family: str = "llama"
    dropout: float = 0.0
    dora: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool | None = None
    context_parallel: int = 1

    def config(self) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "activations",
                "engine": "torch",
                "cluster": {"instance_type": "local"},
                "model": {"source": "any/model"},
                "dataset": {"source": "any/data", "format": "dolly", "max_length": LENGTH},
                "lora": {"r": 2, "dropout": self.dropout, "dora": self.dora},
                "training": {
                    "method": self.method,
                    "precision": self.precision,
                    "activation_checkpointing": self.checkpointing,
                    "micro_batch_size": ROWS,
                },
                "parallelism": {
                    "ranks_per_node": self.tensor_parallel * self.context_parallel,
                    "tensor_parallel": self.tensor_parallel,
                    "sequence_parallel": self.sequence_parallel,
                    "context_parallel": self.context_parallel,
                },
            }
        )


def estimated(choice: Choice) -> float:
    """Bytes of a layer."""
    return _per_layer(choice, _estimated)


def measured(choice: Choice) -> float:
    """Bytes of a layer."""
    return _per_layer(choice, _measured)


def _per_layer(choice: Choice, total: Any) -> float:
    values = MODEL | {"model_type": choice.family, "head_dim": 16} | (OWN | MIXTURES).get(choice.family, {})
    few, many = (total(choice, values | dict.fromkeys(("num_hidden_layers", "n_layer"), layers)) for layers in (2, 4))
    return float(many - few) / 2


def _estimated(choice: Choice, values: dict[str, Any]) -> float:
    config, shape = choice.config(), shape_of(values)
    assert shape is not None
    return estimate(config, degrees_of(config), shape).activations


def _measured(choice: Choice, values: dict[str, Any]) -> float:
    config = choice.config()
    dtype = torch.bfloat16 if choice.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**values, attn_implementation=attention.NAME), dtype=dtype
    ).train()
    gated_mlp.keep_less(model)
    rms_norm.keep_less(model)
    if choice.method == "lora":
        adapters.adapt(model, config.lora, seed=0)
        # as adapters of earlier layers do
        model.get_input_embeddings().register_forward_hook(lambda _, args, output: output.requires_grad_())
    family = family_of(choice.family)
    layers = family.layers if family else "model.layers"
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    with rank_of(choice) as (tp, chunk):
        if family and tp.size() > 1:
            sequence_parallel = has_sequence_parallel(config, degrees_of(config))
            tensor_parallel.parallelize(model, family, tp, sequence_parallel=sequence_parallel)
        activations.checkpoint_layers(list(model.get_submodule(layers)), config.training)
        with MadeTensors() as made:
            output = model.base_model(
                input_ids=chunk.take(positions) % values["vocab_size"],
                position_ids=chunk.take(positions),
                attention_mask=attention.document_bounds(positions),
                use_cache=False,
            )
            found = made.bytes()
    assert output.last_hidden_state.requires_grad
    return found


@contextlib.contextmanager
def rank_of(choice: Choice) -> Iterator[tuple[DeviceMesh, context_parallel.SequenceChunk]]:
    """The first of some ranks that share rows or layers; it receives nothing from the others, only memory."""
    degrees = (choice.context_parallel, choice.tensor_parallel)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(degrees))
    try:
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("cp", "tp"))
        context_parallel.divide_attention(mesh["cp"])
        yield mesh["tp"], context_parallel.chunk_of(mesh["cp"])
    finally:
        AttentionInterface.register(attention.NAME, attention.attend)
        dist.destroy_process_group()


class MadeTensors(TorchDispatchMode):
    """The memory of tensors made within the block."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_pointer(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs or {})
        for tensor in _tensors(result):
            if _pointer(tensor) not in given:
                storage = tensor.untyped_storage()
                self._storages[_pointer(tensor)] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes(self) -> int:
        """The bytes of the tensors that still exist."""
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors that have memory: what is still being communicated has none until it is waited for."""
    found = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return [tensor for tensor in found if not isinstance(tensor, AsyncCollectiveTensor)]


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def choices() -> list[Choice]:
    return [
        Choice(checkpointing, method, precision, family)
        for family in ("llama", "qwen3")
        for method in ("full", "lora")
        for precision in ("bf16", "fp32")
        for checkpointing in ("none", "selective", "full")
    ]


def main() -> None:
    print("| family | method | precision | activation_checkpointing | estimated | measured | |")
    print("|---|---|---|---|---|---|---|")
    for choice in choices():
        bytes_each = [total / (ROWS * LENGTH) for total in (estimated(choice), measured(choice))]
        print(
            f"| {choice.family} | {choice.method} | {choice.precision} | {choice.checkpointing} |"
            f" {bytes_each[0]:,.0f} | {bytes_each[1]:,.0f} | {bytes_each[0] / bytes_each[1] - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
