"""Writes sharded checkpoints as optimum-neuron 0.4.5 does (neuronx_distributed/trainer/checkpoint.py).

Data parallel ranks leave no trace: they share out who writes which tensor file.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.unit.nxd_adapters import factors_of, peft_config, saved_whole, targeted, without_prefix
from tests.unit.nxd_models import Layout, Lora, Model
from tests.unit.nxd_sharder import Cut, Module, Sharder


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
            for part, cuts in factors_of(sharder, module, tensors).items():
                for suffix, cut in cuts.items():
                    described[".".join(filter(None, (base, part, lora.name, suffix)))] = cut
                    mine[".".join(filter(None, (base, part, suffix)))] = cut
        if saved_whole(module, lora):
            for suffix, cut in sharder.weights(module, without_prefix(tensors)).items():
                # copying a module for modules_to_save loses what marks its parameters as cut
                described[f"{base}.modules_to_save.{lora.name}.{suffix}"] = Cut(cut.ranks)
                mine[f"{base}.{suffix}"] = cut
        if lora.name == wanted:
            saved |= mine


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
