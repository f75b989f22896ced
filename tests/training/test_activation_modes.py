"""No choice about activations changes a bit, whatever else two ranks divide."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.conftest import Jobs, MakeRun

pytestmark = pytest.mark.training

CHOICES: list[dict[str, Any]] = [
    {},
    {"training.activation_checkpointing": "selective"},
    {"training.activation_checkpointing": "full"},
    {"training.activation_offload": True},
    {
        "training.activation_checkpointing": "full",
        "training.activation_checkpointing_every": 2,
        "training.activation_offload": True,
    },
]


@pytest.mark.parametrize(
    ("parallelism", "choices"),
    [
        ({"sharding": "zero3", "context_parallel": 2}, {"lora": CHOICES[:4:2], "full": CHOICES}),
        ({"tensor_parallel": 2}, {"lora": [CHOICES[0], CHOICES[1], CHOICES[4]], "full": CHOICES[:4:3]}),
    ],
    ids=["zero3-cp", "tp"],
)
def test_no_bit_changes_on_two_ranks(
    make_run: MakeRun,
    jobs: Jobs,
    tmp_path: Path,
    parallelism: dict[str, Any],
    choices: dict[str, list[dict[str, Any]]],
) -> None:
    """LoRA with dropout, and all parameters; a step of two micro batches, and the gradients of a second."""
    runs = [
        [
            make_run(
                f"{method}-{number}",
                {
                    "parallelism": {"ranks_per_node": 2} | parallelism,
                    "training.method": method,
                    "training.gradient_accumulation_steps": 2,
                    "lora": {"r": 4, "alpha": 8, "dropout": 0.1 if method == "lora" else 0.0},
                }
                | choice,
            )
            for number, choice in enumerate(of_method)
        ]
        for method, of_method in choices.items()
    ]
    directories = [str(run.paths.directory) for group in runs for run in group]
    job = jobs.start(2, ["layouts_worker", "1", str(tmp_path), *directories])
    assert job.wait(300) == 0, job.text()
    for group in runs:
        expected, *others = (load_file(tmp_path / f"{run.config.name}.safetensors") for run in group)
        for run, found in zip(group[1:], others, strict=True):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (run.config.name, name)
