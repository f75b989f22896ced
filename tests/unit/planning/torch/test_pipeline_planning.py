"""Where a model is cut, how long ranks are idle, what they keep, and what is refused: against torch's own schedules."""

from contextlib import nullcontext
from itertools import accumulate
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from benchmarks.pipeline import idle
from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.parallelism import check_model, degrees_of
from hyperpod_ft.planning.torch import pipeline, sharding
from hyperpod_ft.planning.torch.limits import check_family
from hyperpod_ft.planning.torch.step_memory import memory_of
from scripts.memory_table import LLAMA_3_8B

SHAPE = model_shape(LLAMA_3_8B)
assert SHAPE is not None
Settings = dict[str, Any]


def config(ranks: int, micro_batches: int, **changes: Any) -> RunConfig:
    values: Settings = {
        "name": "run",
        "engine": "torch",
        "cluster": {"instance_type": "p5.48xlarge"},
        "model": {"source": "org/model"},
        "dataset": {"source": "org/data", "format": "text", "max_length": 4096},
        "parallelism": {"pipeline_parallel": ranks},
        "training": {"gradient_accumulation_steps": micro_batches},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return run_file.validate(values, "run")


INTERLEAVED = {"parallelism__pipeline_schedule": "interleaved"}
GPIPE = {"parallelism__pipeline_schedule": "gpipe"}


def sizes(run: RunConfig) -> list[int]:
    return [len(layers) for layers in pipeline.cut(run, degrees_of(run), SHAPE)]


def torch_order(run: RunConfig) -> list[list[tuple[str, int, int]]]:
    """What torch's schedule does on each rank: (F or B, stage, micro batch), in its order."""
    ranks, count = run.parallelism.pipeline_parallel, run.training.gradient_accumulation_steps
    if run.parallelism.pipeline_schedule == "interleaved":
        stages = [recording(index, ranks * 2, []) for index in (0, ranks)]
        for stage in stages:
            stage.group_size, stage.group_rank = ranks, 0
        order = ScheduleInterleaved1F1B(stages, count).pipeline_order  # type: ignore[arg-type]
        return [
            [
                (action.computation_type.value, action.stage_index, action.microbatch_index or 0)
                for action in order[rank]
                if action and action.computation_type.value in ("F", "B")
            ]
            for rank in range(ranks)
        ]
    kind = ScheduleGPipe if run.parallelism.pipeline_schedule == "gpipe" else Schedule1F1B
    orders: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for rank, done in enumerate(orders):
        kind(recording(rank, ranks, done), count).step(number=torch.arange(count), return_outputs=False)
    return orders


def recording(index: int, stages: int, done: list[tuple[str, int, int]]) -> Any:
    """A stage that computes and communicates nothing."""
    stage = MagicMock(stage_index=index, num_stages=stages, is_last=False)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage._get_init_p2p_neighbors_ops.return_value = []
    stage.device = torch.device("cpu")
    stage.forward_one_chunk = lambda number, *_, **__: done.append(("F", index, number))
    stage.backward_one_chunk = lambda number, *_, **__: done.append(("B", index, number))
    return stage


def kept(actions: list[tuple[str, int, int]]) -> int:
    """How many passes through a stage have activations at the same time, at most."""
    return max(accumulate(1 if kind == "F" else -1 for kind, _, _ in actions))


@pytest.mark.parametrize("changes", [{}, INTERLEAVED, GPIPE], ids=["1f1b", "interleaved", "gpipe"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 32)])
def test_idle_share_and_memory_are_those_of_the_schedule(ranks: int, micro_batches: int, changes: Settings) -> None:
    run = config(ranks, micro_batches, **changes)
    order = torch_order(run)
    # a backward pass takes twice as long as a forward pass
    timed = [[(*action, {"F": 1.0, "B": 2.0}[action[0]]) for action in actions] for actions in order]
    assert pipeline.idle_share(run, degrees_of(run)) == pytest.approx(idle(timed))
    own = pipeline.stages_per_rank(run)
    assert pipeline.in_flight(run, degrees_of(run)) == [kept(actions) / own for actions in order]


def test_stages_have_as_much_to_do() -> None:
    """In operations, Llama 3 8B's output matrix is as much as two layers, and the longer rows are, the less."""
    assert sizes(config(1, 1)) == [32]
    assert sizes(config(2, 8)) == [17, 15]
    assert sizes(config(4, 8)) == [8, 8, 9, 7]
    assert sizes(config(4, 8, dataset__max_length=32768)) == [8, 8, 8, 8]
    assert sizes(config(4, 8, dataset__max_length=512)) == [8, 9, 9, 6]
    assert sum(sizes(config(8, 8))) == 32 and sizes(config(8, 8))[-1] == 3
    assert sizes(config(32, 32, cluster__nodes=4)) == [1] * 32
    # each rank has two
    run = config(4, 8, **INTERLEAVED)
    assert sizes(run) == [4, 4, 4, 4, 4, 4, 5, 3]
    assert pipeline.layers_of_ranks(run, degrees_of(run), SHAPE) == [8, 8, 9, 7]


def test_plan_says_how_it_is_cut() -> None:
    run = config(4, 8)
    said = pipeline.explain(run, degrees_of(run), SHAPE)
    assert said.startswith("1f1b, 8 micro batches: idle 27.3%; layers 0-7 | 8-15 | 16-24 | 25-31 and head,")
    run = config(4, 8, **INTERLEAVED)
    assert "layers 0-3 + 16-19 | 4-7 + 20-23 | 8-11 + 24-28 |" in pipeline.explain(run, degrees_of(run), SHAPE)


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "changes", "words"),
    [
        (
            4,
            1,
            {},
            "gradient_accumulation_steps: too few micro batches .1. for 4 .* idle 75% .* at least 4; 16 would .* 16%",
        ),
        (4, 10, INTERLEAVED, None),  # two rounds of 5
        (4, 13, INTERLEAVED, "gradient_accumulation_steps: .* 13 micro batches into 3 equal rounds .* multiple of 4"),
        (8, 64, INTERLEAVED | {"parallelism__virtual_pipeline_parallel": 5}, "8 ranks x 5 parts = 40 for 32 layers"),
        (4, 8, {"lora__target_modules": ["lm_head"]}, "lora.target_modules: names no module of the layers"),
        (4, 8, {"lora__target_modules": ["lm_head"], "training__method": "full"}, None),
    ],
)
def test_refused(ranks: int, micro_batches: int, changes: Settings, words: str | None) -> None:
    run = config(ranks, micro_batches, **changes)
    with pytest.raises(UserError, match=words) if words else nullcontext():
        check_model(run, degrees_of(run), SHAPE)


def test_families() -> None:
    run = config(2, 4, dataset__packing="none")
    with pytest.raises(
        UserError, match=r"pipeline_parallel: .* type 'phimoe' into parts; set it to 1; it cuts .* llama,"
    ):
        check_family(run, Degrees(1, 8, 1, 2), "phimoe")
    check_family(run, Degrees(1, 8, 1, 1), "phimoe")


def test_memory_of_the_ranks() -> None:
    """A rank keeps the activations of the micro batches that are on their way, and what it receives."""

    def activations(run: RunConfig) -> list[float]:
        degrees = degrees_of(run)
        chosen = sharding.choose_sharding(run, degrees, SHAPE)
        memory = memory_of(run, degrees, SHAPE)
        return [memory.on_rank(stage, chosen).activations for stage in memory.stages]

    hidden = 4096 * 4096 * 2
    (whole,) = activations(config(1, 8))
    ranks = activations(config(4, 8))
    received = 2 * 8 * hidden
    for rank, layers, found in zip(range(4), [8, 8, 9, 7], ranks, strict=True):
        assert found - received == pytest.approx(whole / 32 * layers * (4 - rank), rel=0.01)
    gpipe = activations(config(4, 8, **GPIPE))
    assert gpipe[0] - received == pytest.approx(whole / 32 * 8 * 8, rel=0.01)
