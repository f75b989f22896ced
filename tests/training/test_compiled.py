"""Compiled layers on two ranks: training and validation losses are those without."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hyperpod_ft.engines.torch import devices
from hyperpod_ft.planning.pins import TORCH_FROM
from tests.training.conftest import VOCABULARY, Jobs, MakeRun, metrics, train_here, write_rows
from tests.unit.tiny_families import MIXTURES, SIZES

pytestmark = pytest.mark.training


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3-cp": {"sharding": "zero3", "context_parallel": 2},
    "pp": {"pipeline_parallel": 2},
}
if tuple(map(int, torch.__version__.split(".")[:2])) >= TORCH_FROM["sharding divided experts"]:
    LAYOUTS["zero3-ep"] = {"sharding": "zero3", "expert_parallel": 2}


def test_losses_are_those_without(make_run: MakeRun, jobs: Jobs) -> None:
    """test_fixed_shapes.py has tensor parallelism and LoRA."""
    mixture = AutoConfig.for_model("qwen3_moe", **SIZES | MIXTURES["qwen3_moe"] | {"vocab_size": VOCABULARY})
    pairs = []
    for name, parallelism in LAYOUTS.items():
        settings = {
            "parallelism": {"ranks_per_node": 2} | parallelism,
            "training.method": "full",
            "training.max_steps": 2,
            "training.validate_every_steps": 1,
            "training.gradient_accumulation_steps": 2,
            "training.activation_checkpointing": "full" if name == "zero3-ep" else "none",
        }
        model = mixture if name == "zero3-ep" else None
        one, other = (
            make_run(f"{name}-{compiled}", settings | {"training.compile": compiled}, model=model)
            for compiled in (False, True)
        )
        pairs.append((one, other))
    runs = [run for pair in pairs for run in pair]
    for run in runs:
        write_rows(run.paths.dataset_path / "validation", rows=5, max_length=32, seed=9)
    job = jobs.start(2, ["compiled_worker", *(str(run.paths.directory) for run in runs)])
    assert job.wait(300) == 0, job.text()
    for pair in pairs:
        expected, found = (metrics(run) for run in pair)
        for key in ("loss", "grad_norm", "validation_loss"):
            assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=0, abs=1e-5)
        assert len(found) == 2 and all(row["validation_loss"] for row in found)


def test_what_runs_uncompiled_or_elsewhere_is_said_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compile_with(forward, backend="eager", dynamic=False))
    neuron = ModuleType("torch_neuronx")
    neuron.get_fallback_ops = lambda: ["aten::mm", "aten::sort", "aten::sort"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_neuronx", neuron)
    said = []
    for graphs in (devices.GRAPHS, 1):  # with LoRA there are two: the first layer's input needs no gradient
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        monkeypatch.setattr(devices, "GRAPHS", graphs)
        with torch._dynamo.config.patch(recompile_limit=graphs):  # pytest would leave it deleted
            train_here(make_run(f"graphs-{graphs}", {"training.compile": True, "training.max_steps": 2}))
        printed = capsys.readouterr().out
        said.append(printed.count(f"a layer has had {graphs} graphs"))
        assert printed.count(" left these operations to the CPU: aten::sort (2), aten::mm (1)\n") == 1
    assert said == [0, 1]
