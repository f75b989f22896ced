"""Checks that an adapter was merged into the matrices of experts, each by a few of its rows.

Logits of a prompt tell nothing about an expert that no token of it reaches.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hyperpod_ft.checkpoint.adapters.files import read_adapter
from hyperpod_ft.checkpoint.adapters.lora import Update, classify_tensors, modules, with_live_names
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.checkpoint.tensors.elements import STORED, Floats, widen
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor

Tensors = Mapping[str, LogicalTensor]

# Relative: a few roundings to the dtype, or of the sum in fp32.
_TOLERANCE = {"BF16": 2.0**-7, "F16": 2.0**-10}
_IN_FP32 = 1e-5


def expert_faults(merged: Path, tensors: Tensors, adapter: Path, base: Path, stored: Tensors) -> Iterator[str]:
    """A line for each tensor of experts that is not the base's with the adapter's update.

    `tensors`, `stored`: of the merged model and of the base. Raises UserError when the adapter does not fit the base.
    """
    files = read_adapter(adapter)
    if not files.config.target_parameters:
        return
    config = model_directory.read_config(base)
    live = with_live_names(modules(files.tensors), model_directory.without_predictors(config, stored))
    effect = classify_tensors(
        adapter,
        files.config,
        files.tensors,
        live,
        model_type=str(model_directory.of_language_model(config).get("model_type")),
    )
    factors: tuple[Any, Floats, Floats] | None = None
    for name, update in effect.updates.items():
        found = tensors.get(name)
        if update.experts is None or update.a is None or found is None or found.shape != live[name].shape:
            continue
        # the tensors of one parameter follow one another
        if factors is None or factors[0] is not update.b:
            factors = update.b, _values(update.a), _values(update.b)
        for expert in range(update.experts.count) if update.experts.expert is None else (update.experts.expert,):
            if not _is_merged(found, live[name], update, expert, *factors[1:]):
                yield f"{merged}: tensor {name}: expert {expert} is not the base's with the adapter's update"


def _is_merged(
    found: LogicalTensor, base: LogicalTensor, update: Update, expert: int, all_a: Floats, all_b: Floats
) -> bool:
    assert update.experts is not None
    count = update.experts.count
    a, b = all_a.reshape(count, -1, all_a.shape[1])[expert], all_b[:, expert::count]
    left, right = (a.T, b.T) if update.transposed else (b, a)
    rows = found.shape[-2]
    # of a tensor of all experts: those of this one
    before = 0 if update.experts.expert is not None else expert * rows
    for row in sorted({0, rows // 2, rows - 1}):
        factor = update.scale * left[update.experts.row + row]
        weight = _row(base, before + row)
        expected = weight + factor @ right
        size = np.abs(weight) + np.abs(factor) @ np.abs(right)
        relative = _TOLERANCE.get(found.dtype, 0.0)
        if not np.all(np.abs(_row(found, before + row) - expected) <= relative * np.abs(expected) + _IN_FP32 * size):
            return False
    return True


def _row(tensor: LogicalTensor, row: int) -> Floats:
    """A row of the last dimension, all others counted together."""
    width = tensor.shape[-1]
    stored = np.empty(width, STORED[tensor.dtype])
    reading.fill(tensor, row * width, (row + 1) * width, stored)
    return widen(stored, tensor.dtype).astype(np.float64)


def _values(tensor: LogicalTensor) -> Floats:
    return widen(reading.read(tensor), tensor.dtype).astype(np.float64)
