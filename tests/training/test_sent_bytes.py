"""What benchmarks.layouts counts is what each layout sends, by formula, and docs/parallelism.md's table is right."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layouts import Layout, summary
from benchmarks.synthetic import Geometry
from benchmarks.training_run import Case, write_rows
from hyperpod_ft.runs.job_files import STOP_SIGNALS
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, tiny_llama

pytestmark = pytest.mark.training

FP32 = 4
STEPS, MICRO_BATCHES, LENGTH, DOCUMENTS = 2, 4, 32, 2
ROWS = 8  # of a step
LAYERS, HIDDEN, KEYS, VOCABULARY, MLP = 4, 64, 32, 128, 96
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * MLP + 2 * HIDDEN
ENDS = 2 * VOCABULARY * HIDDEN + HIDDEN
MODEL = FP32 * (LAYERS * LAYER + ENDS)
# of a micro batch on the ranks that share its rows, without data parallelism
TOKENS = ROWS // MICRO_BATCHES * LENGTH
PREDICTED = ROWS // MICRO_BATCHES * (LENGTH - DOCUMENTS)
ACTIVATION = FP32 * TOKENS * HIDDEN


def step_summary(ranks: int) -> int:
    """Loss, norm and signals are summed over all ranks once a step."""
    return 2 * FP32 * (2 + len(STOP_SIGNALS)) * (ranks - 1) // ranks


# all-reduces of a whole activation count 2 (p - 1)/p = 1 for two ranks, all-gathers and reduce-scatters 1/2
VOCABULARY_PARALLEL = MICRO_BATCHES * (
    ACTIVATION  # the embedding
    + FP32 * PREDICTED * HIDDEN  # the gradient of the hidden states that the head takes in
    + FP32 * PREDICTED * 3  # largest logit, sum of exponentials, the target's logit
)


def zero3(micro_batches: int) -> int:
    """Over two ranks: gradients, and weights of the layers twice in each micro batch, of the ends once."""
    return micro_batches * (MODEL + FP32 * (2 * LAYERS * LAYER + ENDS)) // 2


CASES: dict[str, tuple[Layout, int]] = {
    "tp": (
        Layout(2, {"tensor_parallel": 2, "sequence_parallel": False}),
        MICRO_BATCHES * LAYERS * 4 * ACTIVATION + VOCABULARY_PARALLEL,
    ),
    "tp-sp": (
        Layout(2, {"tensor_parallel": 2, "sequence_parallel": True}),
        # each of the four sums is a gather and a scatter; the sequence is divided before the layers, joined after
        MICRO_BATCHES * (LAYERS * 4 + 1) * ACTIVATION
        + VOCABULARY_PARALLEL
        + FP32 * LAYERS * 2 * HIDDEN,  # gradients of norms
    ),
    "cp": (
        Layout(2, {"context_parallel": 2}),
        # of half the tokens, half: queries, keys, values and the output of attention, forward and backward
        MICRO_BATCHES * LAYERS * 2 * FP32 * TOKENS // 2 * (2 * HIDDEN + 2 * KEYS) // 2 + MODEL,
    ),
    "pp": (Layout(2, {"pipeline_parallel": 2}), MICRO_BATCHES * ACTIVATION),
    "pp-interleaved": (
        Layout(2, {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}),
        # four stages on two ranks: six sends of a micro batch, three from each
        MICRO_BATCHES * 3 * ACTIVATION,
    ),
    "replicated": (Layout(2, {"sharding": "replicated"}), MODEL),
    "zero1": (Layout(2, {"sharding": "zero1"}), MODEL // 2 + MODEL // 2),
    "zero2": (Layout(2, {"sharding": "zero2"}), MICRO_BATCHES * MODEL // 2 + MODEL // 2),
    "zero3": (Layout(2, {"sharding": "zero3"}), zero3(MICRO_BATCHES)),
    # half of the gradients are summed between the two groups, once; each rank has two of the rows
    "hybrid": (Layout(4, {"sharding": "zero3", "shard_ranks": 2}), zero3(2) + MODEL // 2),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bytes_of_a_step_are_those_of_the_formulas(
    make_run: MakeRun, jobs: Jobs, tmp_path: Path, ranks: int
) -> None:
    cases = {name: case for name, case in CASES.items() if case[0].ranks == ranks}
    runs = {name: _run(make_run, name, layout) for name, (layout, _) in cases.items()}
    job = jobs.start(
        ranks, ["benchmarks.layout_ranks", str(tmp_path), *(str(run.paths.directory) for run in runs.values())]
    )
    assert job.wait() == 0, job.text()
    measured = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    sent: dict[str, int] = {}
    losses: list[float] = []
    for name, of_ranks in zip(runs, zip(*measured, strict=True), strict=True):
        found = summary(of_ranks)
        sent[name] = found["sent"]
        losses.append(found["loss"])
    assert sent == {name: expected + step_summary(ranks) for name, (_, expected) in cases.items()}
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5), "all do the same work"


def _run(make_run: MakeRun, name: str, layout: Layout) -> Run:
    settings: dict[str, Any] = {
        "parallelism": {"ranks_per_node": layout.ranks, **layout.parallelism},
        "training.method": "full",
        "training.max_steps": STEPS,
        "training.micro_batch_size": ROWS // MICRO_BATCHES // layout.data_parallel or 1,
        "training.gradient_accumulation_steps": min(MICRO_BATCHES, ROWS // layout.data_parallel),
    }
    run = make_run(name, settings, model=tiny_llama(num_hidden_layers=LAYERS), max_length=LENGTH)
    # documents of one length, so that every micro batch predicts as many tokens
    shutil.rmtree(run.paths.dataset_path / "train")
    geometry = Geometry(LAYERS, HIDDEN, MLP, 8, 4, VOCABULARY)
    write_rows(run.paths.dataset_path / "train", Case("full", "fp32", LENGTH, DOCUMENTS, ROWS, geometry), STEPS)
    return run
