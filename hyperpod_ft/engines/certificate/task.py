"""What the engine is asked to train for a certificate: two steps of a small model on the documents, on CPUs."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.engines.certificate.model import LENGTHS, documents, rows
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.model_fit import check_model_directory
from hyperpod_ft.planning.parallelism import degrees_of

ONE_RANK = Degrees(1, 1, 1, 1)
# The first step changes lora_B, and only then lora_A gets a gradient. Rates are high, so that what is lost is seen.
_STEPS = 2
_ADAPTERS_RATE, _WEIGHTS_RATE = 5e-2, 1e-2
_LAYER = re.compile(r"^.*\b\d+\.")
_SMALL_ADAPTERS = {"r": 4, "alpha": 8, "dropout": 0.0, "plus_ratio": 1.0, "quantization": "none"}


def small_task(
    base: Path,
    lora: Lora | None,
    directory: Path,
    *,
    packed: bool,
    degrees: Degrees = ONE_RANK,
    micro_batches: int = 1,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingTask:
    """The task of training the small model in `base`; its rows and its results are in `directory`.

    `lora`: None to train all parameters; `packed`: the documents share a row; `micro_batches`: of a step, on all
    data-parallel ranks together; `settings`: of other sections, and more of `dataset` and `training`. Raises UserError
    when these degrees do not divide the model.
    """
    at_once = 1 if packed else len(LENGTHS)
    dataset = {"source": str(base), "format": "text", "max_length": sum(LENGTHS)}
    training: dict[str, Any] = {
        "method": "lora" if lora else "full",
        "precision": "fp32",
        "max_steps": _STEPS,
        "micro_batch_size": at_once,
        "gradient_accumulation_steps": micro_batches // degrees.data_parallel,
        "learning_rate": _ADAPTERS_RATE if lora else _WEIGHTS_RATE,
        "schedule": "constant",
        "warmup_share": 0.0,
        "weight_decay": 0.0,
        "sanity_steps": 0,
    }
    config = RunConfig.model_validate(
        {
            "name": "certificate",
            "engine": "torch",
            "cluster": {"root": str(directory), "instance_type": "local"},
            "model": {"source": str(base)},
            **settings,
            "dataset": dataset | settings.get("dataset", {}),
            "training": training | settings.get("training", {}),
            "parallelism": {
                "ranks_per_node": degrees.world_size,
                "tensor_parallel": degrees.tensor_parallel,
                "pipeline_parallel": degrees.pipeline_parallel,
                "context_parallel": degrees.context_parallel,
                "expert_parallel": degrees.expert_parallel,
            },
            **({"lora": lora.model_dump() | _SMALL_ADAPTERS | _in_any_layer(lora)} if lora else {}),
        }
    )
    certificate = Certificate("" if packed else "its examples do not share rows")
    task = TrainingTask(
        config=config,
        layout=check_model_directory(config, degrees_of(config), base, certificate).layout,
        fingerprint="certificate",
        base_model=base,
        dataset=directory / "rows",
        documents_per_row=None,
        directory=directory,
        compile_cache=directory / "compile-cache",
    )
    found = [rows(documents(seed), packed=packed) for seed in range(1, micro_batches + 1)]
    write(task.dataset / "train", found)
    return task


def _in_any_layer(lora: Lora) -> dict[str, tuple[str, ...] | None]:
    """The targets without the numbers of layers, of which the small model has few."""
    wanted = {"target_modules": lora.target_modules, "target_parameters": lora.target_parameters}
    return {
        key: names if names is None else tuple(dict.fromkeys(_LAYER.sub("", name) for name in names))
        for key, names in wanted.items()
    }


def write(directory: Path, found: list[PackedRows]) -> None:
    """The rows of all; again and again the same bytes, by each rank."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in vars(found[0]):
        np.save(directory / f"{name}.npy", np.concatenate([vars(each)[name] for each in found]))
