"""Cuts modules for each rank as optimum-neuron 0.4.5 on neuronx-distributed 0.15 does, from a Hugging Face state dict.

It goes the way upstream goes: full weights are cut, fused and permuted for each rank as when a model is loaded
(optimum/neuron/models/training/transformations_utils.py). A function of the full tensors of a module's
linears gives each rank's tensors by suffix. Nothing of the reader is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.unit.nxd_models import Layout, Model


@dataclass(frozen=True)
class Module:
    """A module of the trained model: the linears that it stands for, and how their tensors are cut."""

    name: str
    linears: tuple[str, ...]
    kind: str  # column, row, fused, grouped, grouped_output, embedding, norm

    @property
    def own(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Cut:
    """A tensor as the ranks have it, and what metadata says of it."""

    ranks: list[Tensor]
    dim: int | None = None
    stride: int = 1


class Sharder:
    """A model over ranks."""

    def __init__(self, model: Model, layout: Layout) -> None:
        self.model, self.layout = model, layout
        ranks, keys = layout.tensor_parallel, model.key_heads
        self.grouped = keys < ranks or keys % ranks != 0
        wanted = max(1, ranks // keys) if layout.multiplier is None else layout.multiplier
        self.multiplier = wanted if self.grouped else 1

    def modules(self, layer: int) -> list[Module]:
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        projections = tuple(f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        if self.grouped:
            first = [Module(f"{attention}.qkv_proj", projections, "grouped")]
        elif self.layout.fuse_qkv and self.model.heads == self.model.key_heads:
            first = [Module(f"{attention}.qkv_proj", projections, "fused")]
        else:
            first = [Module(name, (name,), "column") for name in projections]
        output, down = f"{attention}.o_proj", f"{mlp}.down_proj"
        norms = [f"model.layers.{layer}.{name}" for name in ("input_layernorm", "post_attention_layernorm")]
        return [
            *first,
            Module(output, (output,), "grouped_output" if self.grouped else "row"),
            Module(f"{mlp}.gate_up_proj", (f"{mlp}.gate_proj", f"{mlp}.up_proj"), "fused"),
            Module(down, (down,), "row"),
            *(Module(name, (name,), "norm") for name in norms),
        ]

    def stages(self) -> list[list[Module]]:
        """The modules of each pipeline stage."""
        count = self.layout.pipeline_parallel
        per_stage = -(-self.model.layers // count)
        stages: list[list[Module]] = [[] for _ in range(count)]
        stages[0].append(Module("model.embed_tokens", ("model.embed_tokens",), "embedding"))
        for layer in range(self.model.layers):
            stages[min(layer // per_stage, count - 1)] += self.modules(layer)
        stages[-1] += [Module("model.norm", ("model.norm",), "norm"), Module("lm_head", ("lm_head",), "column")]
        return stages

    def weights(self, module: Module, full: Mapping[str, Tensor]) -> dict[str, Cut]:
        """Each rank's weights of a module, by the parameter's own name."""
        return self.cut_outputs(module, [full[f"{name}.weight"] for name in module.linears], "weight")

    def cut_outputs(self, module: Module, full: Sequence[Tensor], parameter: str) -> dict[str, Cut]:
        """Cut base weights, or what has their outputs as rows (lora_B), or, for kinds cut by inputs, as columns."""
        ranks = self.layout.tensor_parallel
        if module.kind in ("column", "embedding"):
            return {parameter: Cut(list(full[0].chunk(ranks)), 0)}
        if module.kind == "row":
            return {parameter: Cut(list(full[0].chunk(ranks, 1)), 1)}
        if module.kind == "grouped_output":
            return {parameter: Cut([part.t() for part in self.queries(full[0].t())], 1)}
        if module.kind == "fused":
            parts = zip(*(tensor.chunk(ranks) for tensor in full), strict=True)
            return {parameter: Cut([torch.cat(part) for part in parts], 0, len(full))}
        if module.kind == "grouped":
            q, k, v = self.queries(full[0]), self.keys(full[1]), self.keys(full[2])
            if self.layout.fuse_qkv:
                return {f"{parameter}_qkv": Cut([torch.cat(part) for part in zip(q, k, v, strict=True)])}
            return {f"{parameter}_q": Cut(q, 0), f"{parameter}_k": Cut(k, 0), f"{parameter}_v": Cut(v, 0)}
        assert module.kind == "norm"
        return {parameter: Cut([full[0]] * ranks)}

    def keys(self, full: Tensor) -> list[Tensor]:
        return list(torch.cat([full] * self.multiplier).chunk(self.layout.tensor_parallel))

    def queries(self, full: Tensor) -> list[Tensor]:
        """Rows by head, dealt out: each slot for a key head takes the next of that head's queries."""
        heads = full.chunk(self.model.heads)
        group = self.model.heads // self.model.key_heads
        waiting = {key: list(heads[key * group : (key + 1) * group]) for key in range(self.model.key_heads)}
        slots = [key for _ in range(self.multiplier) for key in range(self.model.key_heads)]
        share = group // self.multiplier
        dealt = [[waiting[key].pop(0) for _ in range(share)] for key in slots]
        per_rank = len(slots) // self.layout.tensor_parallel
        return [
            torch.cat([head for slot in dealt[rank * per_rank : (rank + 1) * per_rank] for head in slot])
            for rank in range(self.layout.tensor_parallel)
        ]

    def specs(self, modules: Sequence[Module], prefix: str, lora: set[str]) -> list[dict[str, Any]]:
        """`model_weight_transformation_specs` of a stage: every layer is there, with what is in the stage."""
        here = {module.name for module in modules}
        described = []
        for layer in range(self.model.layers):
            specs: dict[str, list[Any]] = {}
            for module in self.modules(layer):
                parent = module.name.rpartition(".")[0]
                if parent.endswith(("self_attn", "mlp")):
                    spec = self.spec(module)
                    found = (
                        [(spec[0], spec[1] | {"peft_type": "lora" if module.name in lora else None})] if spec else []
                    )
                    specs.setdefault(parent, []).extend(found if module.name in here else [])
            described += [
                {"module_fully_qualified_name": prefix + parent, "specs": found} for parent, found in specs.items()
            ]
        return described

    def spec(self, module: Module) -> tuple[str, dict[str, Any]] | None:
        model, ranks = self.model, self.layout.tensor_parallel
        if module.kind == "fused":
            size = model.intermediate if module.own == "gate_up_proj" else model.heads * model.head_size
            return "FusedLinearsSpec", {
                "fused_linear_name": module.own,
                "linear_names": [linear.rpartition(".")[2] for linear in module.linears],
                "bias": False,
                "fuse_axis": 0,
                "original_dims": [size] * len(module.linears),
                "tp_size": ranks,
            }
        if module.kind == "grouped":
            return "GQAQKVColumnParallelLinearSpec", {
                "gqa_qkv_projection_name": "qkv_proj",
                "query_projection_name": "q_proj",
                "key_projection_name": "k_proj",
                "value_projection_name": "v_proj",
                "output_projection_name": "o_proj",
                "num_attention_heads": model.heads,
                "num_key_value_heads": model.key_heads,
                "kv_size_multiplier": self.multiplier,
                "q_output_size_per_partition": model.heads * model.head_size // ranks,
                "kv_output_size_per_partition": model.key_heads * model.head_size * self.multiplier // ranks,
                "fuse_qkv": self.layout.fuse_qkv,
                "bias": False,
                "tp_size": ranks,
            }
        return None
