"""A synthetic model as optimum-neuron's trainer saves it: a full-parameter checkpoint of tensor-parallel ranks.

The layout is that of `NeuronSFTTrainer` in optimum-neuron 0.4.5 with xser, its default: per rank, a pickled dictionary
of references, and one file per tensor. Of the checkpoint's other files, only those that describe the model are written;
there is no optimizer state.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.synthetic import Bits, Geometry, Weights

_BY_ROWS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")


def write_checkpoint(directory: Path, geometry: Geometry, tensor_parallel: int = 8) -> None:
    """Write `directory`, a `checkpoint-N`. `tensor_parallel` must divide the KV heads, so that none is replicated."""
    assert geometry.kv_heads % tensor_parallel == 0, (geometry.kv_heads, tensor_parallel)
    shards = directory / "shards"
    (shards / "model").mkdir(parents=True)
    weights = Weights(geometry)
    names = _sharded_names(geometry)
    for rank in range(tensor_parallel):
        file = shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        tensors = Path(f"{file}.tensors")
        tensors.mkdir()
        known = {}
        for number, name in enumerate(names):
            part = _part(weights, name, rank, tensor_parallel)
            tensor = torch.from_numpy(np.ascontiguousarray(part).view(np.int16)).view(torch.bfloat16)
            torch.save(tensor, tensors / f"tensor_{number}.pt")
            known[number] = {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
        torch.save({name: _reference(number) for number, name in enumerate(names)}, file)
        torch.save(known, f"{file}.info.pt")
    metadata = {
        "parameters": {name: _placement(name, tensor_parallel) for name in names},
        "model_weight_transformation_specs": _transformations(geometry, tensor_parallel),
    }
    (shards / "mp_metadata_pp_rank_0.json").write_text(json.dumps(metadata, indent=4), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(geometry.config(), indent=2), encoding="utf-8")
    trained_with = {
        "tensor_parallel_size": tensor_parallel,
        "pipeline_parallel_size": 1,
        "kv_size_multiplier": None,
        "fuse_qkv": False,
        "use_xser": True,
        "async_save": False,
    }
    (directory / "trn_config.json").write_text(json.dumps(trained_with, indent=4), encoding="utf-8")
    for marker in ("checkpoint", "done"):
        (shards / marker).write_text("1", encoding="utf-8")


def _sharded_names(geometry: Geometry) -> list[str]:
    """The trainer's parameter names: gate and up are fused."""
    fused = (name.replace("gate_proj", "gate_up_proj") for name in geometry.tensors() if "up_proj" not in name)
    return list(fused)


def _part(weights: Weights, name: str, rank: int, tensor_parallel: int) -> Bits:
    """A rank's part of a parameter."""
    if "gate_up_proj" in name:
        halves = [name.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")]
        return np.concatenate([_rows(weights, half, rank, tensor_parallel) for half in halves])
    module = name.split(".")[-2]
    if module in _BY_ROWS:
        return _rows(weights, name, rank, tensor_parallel)
    whole = weights.rows(name, 0, weights.shapes[name][0])
    return np.split(whole, tensor_parallel, axis=1)[rank] if module in _BY_COLUMNS else whole


def _rows(weights: Weights, name: str, rank: int, tensor_parallel: int) -> Bits:
    count, rest = divmod(weights.shapes[name][0], tensor_parallel)
    assert not rest, (name, weights.shapes[name], tensor_parallel)
    return weights.rows(name, rank * count, (rank + 1) * count)


def _placement(name: str, tensor_parallel: int) -> dict[str, Any]:
    module = name.split(".")[-2]
    if "norm" in module:
        return {"tensor_model_parallel": False}
    return {
        "tensor_model_parallel": True,
        "partition_dim": 1 if module in _BY_COLUMNS else 0,
        "partition_stride": 2 if module == "gate_up_proj" else 1,
        "num_partitions": tensor_parallel,
    }


def _transformations(geometry: Geometry, tensor_parallel: int) -> list[dict[str, Any]]:
    """The metadata of fused parameters: only gate and up are fused."""
    fused = {
        "fused_linear_name": "gate_up_proj",
        "linear_names": ["gate_proj", "up_proj"],
        "bias": False,
        "fuse_axis": 0,
        "original_dims": [geometry.intermediate, geometry.intermediate],
        "tp_size": tensor_parallel,
        "peft_type": None,
    }
    specs = {"self_attn": [], "mlp": [["FusedLinearsSpec", fused]]}
    return [
        {"module_fully_qualified_name": f"model.layers.{layer}.{module}", "specs": specs[module]}
        for layer in range(geometry.layers)
        for module in specs
    ]


def _reference(number: int) -> object:
    """torch_xla's placeholder for a tensor. pickle looks its class up by name, so this defines one there."""
    *parents, module = ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization")
    if module not in sys.modules:
        for name in (*parents, module):
            sys.modules[name] = types.ModuleType(name)
        stand_in = type("TensorReference", (), {"__module__": module})
        sys.modules[module].TensorReference = stand_in  # type: ignore[attr-defined]
    reference = sys.modules[module].TensorReference()
    reference.tid = number
    return reference
