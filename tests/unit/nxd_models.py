"""Models, layouts and adapters that tests write as optimum-neuron's sharded checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama."""

    heads: int = 4
    key_heads: int = 2
    head_size: int = 2
    intermediate: int = 16
    vocabulary: int = 16
    layers: int = 2
    hidden: int = 6
    tied: bool = False
    dtype: torch.dtype = torch.float32

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face's names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        rows, key_rows = self.heads * self.head_size, self.key_heads * self.head_size
        for layer in (f"model.layers.{index}" for index in range(self.layers)):
            shapes |= {
                f"{layer}.self_attn.q_proj.weight": (rows, self.hidden),
                f"{layer}.self_attn.k_proj.weight": (key_rows, self.hidden),
                f"{layer}.self_attn.v_proj.weight": (key_rows, self.hidden),
                f"{layer}.self_attn.o_proj.weight": (self.hidden, rows),
                f"{layer}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{layer}.mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{layer}.mlp.down_proj.weight": (self.hidden, self.intermediate),
                f"{layer}.input_layernorm.weight": (self.hidden,),
                f"{layer}.post_attention_layernorm.weight": (self.hidden,),
            }
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return shapes

    def random(self, seed: int = 0) -> dict[str, Tensor]:
        return {name: random(shape, self.dtype, f"{seed} {name}") for name, shape in self.shapes().items()}


@dataclass(frozen=True)
class Layout:
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    xser: bool = True
    fuse_qkv: bool = False
    multiplier: int | None = None  # kv_size_multiplier; None: what upstream takes


@dataclass(frozen=True)
class Lora:
    """One adapter. Patterns go by the names of the trained modules, which may be fused."""

    name: str = "default"
    r: int = 2
    alpha: int = 4
    targets: tuple[str, ...] = PROJECTIONS
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, int] = field(default_factory=dict)
    rslora: bool = False
    bias: bool = False  # lora_bias


def random(shape: Sequence[int], dtype: torch.dtype, seed: str) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(seed.encode(), "little") % 2**63)
    return torch.randn(tuple(shape), generator=generator).to(dtype)
