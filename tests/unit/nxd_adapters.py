"""Adapters as optimum-neuron trains them: which modules have factors, and how these are cut for each rank."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from tests.unit.nxd_models import Layout, Lora, Model, random
from tests.unit.nxd_sharder import Cut, Module, Sharder


def factors_of(sharder: Sharder, module: Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Cut]]:
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


def without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
