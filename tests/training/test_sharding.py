"""Every sharding computes what one process computes, restarts with the same bits, and reads the others' checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sharding_worker import STEPS
from test_layouts import differences, reference

from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, tiny_llama

pytestmark = pytest.mark.training

Case = tuple[str, int, str] | tuple[str, int, str, int]
FULL = {"training.method": "full"}
MOMENTS = "training.optimizer_state"
BF16 = {"training.precision": "bf16"}


def modes(ranks: int) -> list[Case]:
    return [("replicated", 1, "none"), *((mode, ranks, "none") for mode in ("zero1", "zero2", "zero3"))]


REPLICATED, ZERO1, ZERO2, ZERO3 = modes(2)
OFFLOADED: dict[str, list[Case]] = {
    "lora": [("zero1", 2, "optimizer"), ("zero3", 2, "parameters")],
    "full": [("replicated", 1, "optimizer"), ("zero2", 2, "optimizer"), ("zero3", 2, "optimizer")],
}


def job(
    jobs: Jobs, tmp_path: Path, ranks: int, runs: dict[str, tuple[Run, list[Case]]]
) -> dict[tuple[str, Case], dict[str, torch.Tensor]]:
    """Results by run and sharding, of one job of `ranks` processes."""
    for run, cases in runs.values():
        (run.paths.directory / "shardings.json").write_text(json.dumps(cases))
    started = jobs.start(
        ranks, ["sharding_worker", str(tmp_path), *(str(run.paths.directory) for run, _ in runs.values())]
    )
    assert started.wait() == 0, started.text()
    return {
        (name, case): load_file(tmp_path / f"{run.config.name}-{'-'.join(map(str, case))}.safetensors")
        for name, (run, cases) in runs.items()
        for case in cases
    }


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check(
    results: dict[tuple[str, Case], dict[str, torch.Tensor]],
    expected: dict[str, dict[str, torch.Tensor]],
    parameter_limit: float = 1e-4,
) -> None:
    """Each is near what is expected of its run, has its own bits after a restart, and resumes from another's state."""
    for (name, case), tensors in results.items():
        assert tensors["other_bits"].item() == 0, (name, case)
        for start in ("straight", "switched"):
            found = part(tensors, start)
            if not found:  # the first of its run
                continue
            like = {key: expected[name][key] for key in found} | {"loss": expected[name]["loss"][-len(found["loss"]) :]}
            # AdamW divides a gradient by its own size, so elements whose gradient is mostly rounding move by rounding
            for kind, limit in (("loss", 1e-6), ("parameter", parameter_limit)):
                off = differences(found, like, kind)
                where = max(off, key=off.__getitem__)
                print(f"{name} {case} {start}: {kind} {off[where]:.1e}")
                assert off[where] <= limit, (name, case, start, where)


def settings(ranks: int, micro_batch_size: int, accumulation: int, **changes: Any) -> dict[str, Any]:
    assert ranks * micro_batch_size * accumulation == 8
    return {
        "parallelism": {"ranks_per_node": ranks},
        "training.micro_batch_size": micro_batch_size,
        "training.gradient_accumulation_steps": accumulation,
        "training.max_steps": 8,
        "training.max_grad_norm": 0.2,
        "training.learning_rate": 1e-3,
    } | changes


def expected_of(run: Run) -> dict[str, torch.Tensor]:
    """After all steps, by plain transformers and torch.optim in one process."""
    tensors = reference(run, STEPS)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("gradient")}
    return kept | {"loss": tensors["loss"][:STEPS]}


def test_two_ranks(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """LoRA and full, with and without accumulation, all in memory and offloaded; tied embeddings in one."""
    tied = tiny_llama(tie_word_embeddings=True)
    runs = {
        "lora": (make_run("lora", settings(2, 2, 2)), [ZERO1, ZERO3, *OFFLOADED["lora"]]),
        "full": (make_run("full", settings(2, 1, 4, **FULL), model=tied), modes(2) + OFFLOADED["full"]),
        "at once": (make_run("at-once", settings(2, 4, 1, **FULL), model=tied), [ZERO2, ZERO3]),
    }
    results = job(jobs, tmp_path, 2, runs)
    expected = {name: expected_of(run) for name, (run, _) in runs.items()}
    check(results, expected)
    # two ranks have one order of summation, and host memory changes none
    for name, cases in OFFLOADED.items():
        for case in cases:
            assert same_bits(results[name, case], results[name, (*case[:2], "none")]), (name, case)


def test_two_ranks_in_bf16_and_with_small_moments(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Near the whole weights of mode replicated, which one process gives too."""
    runs = {
        "bf16": (make_run("bf16", settings(2, 2, 2, **FULL, **BF16)), [REPLICATED, ZERO2, ZERO3]),
        "bf16 lora": (make_run("bf16-lora", settings(2, 2, 2, **BF16)), [REPLICATED, ZERO1, ZERO3]),
        "moments in bf16": (make_run("in-bf16", settings(2, 2, 2, **FULL, **{MOMENTS: "bf16"})), [REPLICATED, ZERO3]),
        "moments in int8": (make_run("in-int8", settings(2, 2, 2, **FULL, **{MOMENTS: "int8"})), [REPLICATED, ZERO1]),
    }
    results = job(jobs, tmp_path, 2, runs)
    for (name, case), tensors in results.items():
        assert tensors["other_bits"].item() == 0, (name, case)
        whole = part(results[name, REPLICATED], "straight")
        off = differences(part(tensors, "straight"), whole, "")
        where = max(off, key=off.__getitem__)
        print(f"{name} {case}: {off[where]:.1e}")
        # FSDP2 casts adapters to bf16, PEFT computes with fp32 ones
        assert off[where] <= (0.05 if name == "bf16 lora" else 1e-3), (name, case, where)


def test_four_ranks(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Two groups of two, and four ranks of which two have no row of an adapter."""
    narrow = {"lora": {"r": 2, "alpha": 4}}
    runs = {
        "lora": (make_run("four-lora", settings(4, 1, 2, **narrow)), [("zero1", 4, "none"), ("zero3", 4, "none")]),
        "full": (make_run("four-full", settings(4, 1, 2, **FULL)), [ZERO1, ZERO3]),
    }
    check(job(jobs, tmp_path, 4, runs), {name: expected_of(run) for name, (run, _) in runs.items()})


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items() if name.startswith("straight"))
