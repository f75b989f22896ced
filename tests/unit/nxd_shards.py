"""Writes sharded checkpoints as optimum-neuron 0.4.5 on neuronx-distributed 0.15 does, from a Hugging Face state dict.

It goes the way upstream goes: full weights are cut, fused and permuted for each rank as when a model is loaded
(optimum/neuron/models/training/transformations_utils.py), then saved (neuronx_distributed/trainer/checkpoint.py).
Nothing of the reader is used. Data parallel ranks leave no trace: they share out who writes which tensor file.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hyperpod_ft.checkpoint.tensors.layout import DTYPE_OF_TORCH_NAME, LogicalTensor, Piece

TORCH_DTYPE: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for torch_name, name in DTYPE_OF_TORCH_NAME.items()
}
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


def gather(tensor: LogicalTensor) -> Tensor:
    """The values that a description describes."""
    whole = torch.empty(tensor.shape, dtype=TORCH_DTYPE[tensor.dtype])
    for piece in tensor.pieces:
        whole[_box(piece)] = values(piece, tensor.dtype)
    return whole


def different_copies(tensor: LogicalTensor) -> int:
    """How many replicas differ from the tensor."""
    whole = gather(tensor)
    return sum(not torch.equal(values(copy, tensor.dtype), whole[_box(copy)]) for copy in tensor.replicas)


def values(piece: Piece, dtype: str) -> Tensor:
    content = bytearray(piece.file.read_bytes())
    count = (len(content) - piece.offset) // TORCH_DTYPE[dtype].itemsize
    flat = torch.frombuffer(content, dtype=TORCH_DTYPE[dtype], offset=piece.offset, count=count)
    return flat.as_strided(piece.shape, piece.strides).clone()


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))


# How modules are cut. A function of the full tensors of the linears in a module gives each rank's tensors by suffix.


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


# Checkpoints.


def save_model(directory: Path, model: Model, layout: Layout, full: Mapping[str, Tensor]) -> Path:
    """A full-parameter checkpoint."""
    sharder = Sharder(model, layout)
    if model.tied:
        full = {**full, "lm_head.weight": full["model.embed_tokens.weight"]}
    rows = Cut(list(full["model.embed_tokens.weight"].chunk(layout.tensor_parallel)), 0)
    tied = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), rows)
    stages = []
    for modules in sharder.stages():
        cuts = {
            f"{module.name}.{suffix}": cut
            for module in modules
            for suffix, cut in sharder.weights(module, full).items()
        }
        # named_parameters() says a tied parameter once; the first and the last stage save it under both names
        described = {name: cut for name, cut in cuts.items() if not (model.tied and name == "lm_head.weight")}
        if model.tied and cuts.keys() & tied.keys():
            cuts |= tied
        stages.append((cuts, _metadata(described, sharder.specs(modules, "", set()))))
    _save(directory / "shards", layout, stages)
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": model.tied}))
    degrees = {"tensor_parallel_size": layout.tensor_parallel, "pipeline_parallel_size": layout.pipeline_parallel}
    (directory / "trn_config.json").write_text(json.dumps(degrees))
    _trainer_state(directory)
    return directory


def save_adapters(
    directory: Path,
    model: Model,
    layout: Layout,
    full: Mapping[str, Tensor],
    adapters: Sequence[tuple[Lora, Mapping[str, Tensor]]],
) -> Path:
    """A LoRA checkpoint: of each adapter its tensors by PEFT's saved names, as `random_adapter` makes them."""
    sharder = Sharder(model, layout)
    if model.tied:
        full = {**full, "lm_head.weight": full["model.embed_tokens.weight"]}
    for lora, _ in adapters:
        stages = []
        for modules in sharder.stages():
            saved: dict[str, Cut] = {}
            described: dict[str, Cut] = {}
            for module in modules:
                _describe(sharder, module, full, adapters, lora.name, saved, described)
            if model.tied:
                described = {name: cut for name, cut in described.items() if not name.endswith("lm_head.weight")}
            touched = {module.name for module in modules for lora, _ in adapters if targeted(module, lora)}
            specs = sharder.specs(modules, "base_model.model.", touched)
            stages.append((saved, _metadata(described, specs)))
        _save(directory / f"adapter_{lora.name}" / "adapter_shards", layout, stages)
        (directory / f"adapter_{lora.name}" / "adapter_config.json").write_text(json.dumps(peft_config(lora)))
    _trainer_state(directory)
    return directory


def _describe(
    sharder: Sharder,
    module: Module,
    full: Mapping[str, Tensor],
    adapters: Sequence[tuple[Lora, Mapping[str, Tensor]]],
    wanted: str,
    saved: dict[str, Cut],
    described: dict[str, Cut],
) -> None:
    """Add a module's parameters: to `described` by live names, to `saved` those that adapter `wanted` saves."""
    base = f"base_model.model.{module.name}"
    touched = any(targeted(module, lora) for lora, _ in adapters)
    copied = any(saved_whole(module, lora) for lora, _ in adapters)
    middle = ".base_layer" if touched else ".original_module" if copied else ""
    for suffix, cut in sharder.weights(module, full).items():
        described[f"{base}{middle}.{suffix}"] = cut
        embedding = module.own in ("embed_tokens", "lm_head")
        if touched and embedding and any(targeted(module, lora) and lora.name == wanted for lora, _ in adapters):
            saved[f"{base}.base_layer.{suffix}"] = cut
    for lora, tensors in adapters:
        mine: dict[str, Cut] = {}
        if targeted(module, lora):
            for part, cuts in _factors(sharder, module, tensors).items():
                for suffix, cut in cuts.items():
                    described[".".join(filter(None, (base, part, lora.name, suffix)))] = cut
                    mine[".".join(filter(None, (base, part, suffix)))] = cut
        if saved_whole(module, lora):
            for suffix, cut in sharder.weights(module, _without_prefix(tensors)).items():
                # copying a module for modules_to_save loses what marks its parameters as cut
                described[f"{base}.modules_to_save.{lora.name}.{suffix}"] = Cut(cut.ranks)
                mine[f"{base}.{suffix}"] = cut
        if lora.name == wanted:
            saved |= mine


def _factors(sharder: Sharder, module: Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Cut]]:
    """The factors of one module on each rank, by part and suffix."""
    ranks = sharder.layout.tensor_parallel
    names = [f"base_model.model.{linear}" for linear in module.linears]
    if module.kind == "embedding":
        return {
            part: {"": Cut([tensors[f"{names[0]}.{part}"]] * ranks)}
            for part in ("lora_embedding_A", "lora_embedding_B")
        }
    # one lora_A for what is fused
    first = tensors[f"{names[0]}.lora_A.weight"]
    second = [tensors[f"{name}.lora_B.weight"] for name in names]
    bias = [tensors[f"{name}.lora_B.bias"] for name in names if f"{name}.lora_B.bias" in tensors]
    if module.kind in ("row", "grouped_output"):
        cuts = {"weight": Cut([second[0]] * ranks)} | ({"bias": Cut([bias[0]] * ranks)} if bias else {})
        return {"lora_A": sharder.cut_outputs(module, [first], "weight"), "lora_B": cuts}
    cuts = sharder.cut_outputs(module, second, "weight")
    if bias:
        cuts |= sharder.cut_outputs(module, bias, "bias")
    # fused by the specification alone: the module itself knows of no stride
    cuts = {suffix: replace(cut, stride=1) for suffix, cut in cuts.items()}
    return {"lora_A": {"weight": Cut([first] * ranks)}, "lora_B": cuts}


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def targeted(module: Module, lora: Lora) -> bool:
    return any(linear.rpartition(".")[2] in lora.targets for linear in module.linears)


def saved_whole(module: Module, lora: Lora) -> bool:
    """PEFT 0.17 goes by endings here: `norm` means every norm (utils/other.py, `_set_trainable`)."""
    return module.name.endswith(lora.modules_to_save)


def trained_with(module: Module, lora: Lora) -> tuple[int, int]:
    """Rank and alpha that PEFT gives a module of the trained model."""
    return lora.rank_pattern.get(module.own, lora.r), lora.alpha_pattern.get(module.own, lora.alpha)


def random_adapter(model: Model, layout: Layout, lora: Lora, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """An adapter by PEFT's saved names; linears that this layout fuses share one lora_A."""
    shapes = model.shapes()
    tensors = {}
    for module in (module for stage in Sharder(model, layout).stages() for module in stage):
        rank, _ = trained_with(module, lora)
        for linear in module.linears if targeted(module, lora) else ():
            name = f"base_model.model.{linear}"
            out, inputs = shapes[f"{linear}.weight"] if linear != "lm_head" else (model.vocabulary, model.hidden)
            if module.kind == "embedding":
                tensors[f"{name}.lora_embedding_A"] = random((rank, out), dtype, f"{seed} A {name}")
                tensors[f"{name}.lora_embedding_B"] = random((inputs, rank), dtype, f"{seed} B {name}")
                continue
            tensors[f"{name}.lora_A.weight"] = random((rank, inputs), dtype, f"{seed} A {module.name}")
            tensors[f"{name}.lora_B.weight"] = random((out, rank), dtype, f"{seed} B {name}")
            if lora.bias:
                tensors[f"{name}.lora_B.bias"] = random((out,), dtype, f"{seed} bias {name}")
        if saved_whole(module, lora):
            name = f"{module.name}.weight"
            tensors[f"base_model.model.{name}"] = random(shapes[name], dtype, f"{seed} saved {name}")
    return tensors


def peft_config(lora: Lora) -> dict[str, Any]:
    values = asdict(lora)
    return {
        "peft_type": "LORA",
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "modules_to_save": list(lora.modules_to_save) or None,
        "rank_pattern": values["rank_pattern"],
        "alpha_pattern": values["alpha_pattern"],
        "use_rslora": lora.rslora,
        "lora_bias": lora.bias,
        "use_dora": False,
        "bias": "none",
    }


def _metadata(cuts: Mapping[str, Cut], specs: list[dict[str, Any]]) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for name, cut in cuts.items():
        parameters[name] = {"tensor_model_parallel": cut.dim is not None}
        if cut.dim is not None:
            parameters[name] |= {
                "partition_dim": cut.dim,
                "partition_stride": cut.stride,
                "num_partitions": len(cut.ranks),
            }
    return {"parameters": parameters, "model_weight_transformation_specs": specs}


def _save(shards: Path, layout: Layout, stages: Sequence[tuple[Mapping[str, Cut], dict[str, Any]]]) -> None:
    """Every stage's files name the tensors of all stages; those of others hold anything."""
    everything = {name: cut for cuts, _ in stages for name, cut in cuts.items()}
    (shards / "model").mkdir(parents=True)
    (shards / "checkpoint").write_text("1")
    for stage, (cuts, metadata) in enumerate(stages):
        (shards / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(metadata, indent=4))
        for rank in range(layout.tensor_parallel):
            state = {
                name: cut.ranks[rank].contiguous() if name in cuts else torch.full_like(cut.ranks[rank], torch.nan)
                for name, cut in everything.items()
            }
            file = shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            save_xser(file, state) if layout.xser else torch.save(state, file)
    (shards / "done").write_text("1")


def save_xser(file: Path, state: Mapping[str, Tensor]) -> None:
    folder = file.with_name(file.name + ".tensors")
    folder.mkdir()
    info = {}
    with tensor_reference() as reference:
        for number, tensor in enumerate(state.values()):
            torch.save(tensor.clone(), folder / f"tensor_{number}.pt")
            info[number] = {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
        torch.save({name: reference(number) for number, name in enumerate(state)}, file)
    torch.save(info, file.with_name(file.name + ".info.pt"))


@contextmanager
def tensor_reference() -> Iterator[Any]:
    """The class that xser's pickles name, without torch_xla."""
    name = "torch_xla.utils.serialization"
    module = ModuleType(name)

    class TensorReference:
        def __init__(self, tid: int) -> None:
            self.tid = tid

    TensorReference.__module__, TensorReference.__qualname__ = name, "TensorReference"
    module.TensorReference = TensorReference  # type: ignore[attr-defined]
    parents = ["torch_xla", "torch_xla.utils"]
    sys.modules |= {parent: ModuleType(parent) for parent in parents} | {name: module}
    try:
        yield TensorReference
    finally:
        for loaded in (*parents, name):
            del sys.modules[loaded]


def _trainer_state(directory: Path, step: int = 4) -> None:
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
