"""The load-balancing loss of routers is transformers' own, however a step is divided."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from hyperpod_ft import heartbeat
from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.data.packing import IGNORED, Packing, fill
from hyperpod_ft.engines.batches import Batch, DataOrder
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch.loop import training_loop
from hyperpod_ft.engines.torch.model import language_model
from hyperpod_ft.engines.torch.model.router_loss import tokens_of
from hyperpod_ft.evaluation import greedy
from hyperpod_ft.runs.run import Run
from tests.tasks import task_of
from tests.training.conftest import (
    VOCABULARY,
    Jobs,
    MakeRun,
    curve,
    metrics,
    process_group_of_its_own,
    train_here,
    write_rows,
)
from tests.unit import tiny_tokenizer
from tests.unit.tiny_families import FILE, MIXTURES, SIZES

pytestmark = pytest.mark.training

COMPUTED = [name for name in MIXTURES if name not in ("glm4_moe", "deepseek_v3")]  # transformers has none for these
COEFFICIENT = 0.5
FULL: dict[str, Any] = {"training.method": "full", "training.weight_decay": 0.0, "training.max_steps": 1}
LENGTHS = [20, 7, 32, 11]  # of the document of each row, which padding follows


def config_of(model_type: str, **values: Any) -> PretrainedConfig:
    """Of a mixture whose experts are loaded unevenly enough to see it."""
    sizes = SIZES | MIXTURES[model_type] | {"vocab_size": VOCABULARY, "initializer_range": 0.3}
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return AutoConfig.for_model(model_type, **sizes | asked | values)


def prepared(run: Run) -> None:
    """Give the run rows of one document each, most of them with padding, and no router that is zero, as Ernie's are."""
    tensors = load_file(run.paths.base_model / FILE)
    drawn = torch.Generator().manual_seed(3)
    zero = {name: torch.randn(value.shape, generator=drawn) for name, value in tensors.items() if not value.any()}
    save_file(
        tensors | {name: value for name, value in zero.items() if value.ndim == 2},
        run.paths.base_model / FILE,
        {"format": "pt"},
    )
    lengths = np.array(LENGTHS)
    ids = np.random.default_rng(1).integers(3, VOCABULARY, lengths.sum()).astype(np.int32)
    starts = lengths.cumsum() - lengths
    trained = np.ones(len(ids), np.bool_)
    trained[starts] = False
    rows = fill(Packing(starts, lengths, np.arange(4), 4), ids, trained, 0, 4, 32, 0)
    for name, array in vars(rows).items():
        np.save(run.paths.dataset_path / "train" / f"{name}.npy", array)


def gradients(run: Run) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of the engine's first step: the loss and that of routers, and what each parameter gets."""
    with process_group_of_its_own(), training_loop(task_of(run), Ranks(0, 1, 0, torch.distributed.HashStore())) as loop:
        means, _ = loop.forward_backward(1)
        names = [*loop.trained_weights.parameters]
        found = loop.trained_weights.take_gradients(names)
        return means, {name: value.clone() for name, value in zip(names, found, strict=True)}


def plain(run: Run, passes: list[list[int]]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """By transformers alone, from its forward passes over these rows: mean losses and gradients."""
    model = AutoModelForCausalLM.from_pretrained(run.paths.base_model).train()
    ids, labels, positions = (
        torch.from_numpy(np.load(run.paths.dataset_path / "train" / f"{name}.npy")).long()
        for name in ("input_ids", "labels", "position_ids")
    )
    mask = torch.tensor([[column < length for column in range(32)] for length in LENGTHS]).long()
    total = balance = 0.0
    for rows in passes:
        out = model(input_ids=ids[rows], attention_mask=mask[rows], position_ids=positions[rows], labels=labels[rows])
        tokens = (labels[rows] != IGNORED).sum() / (labels != IGNORED).sum()
        loss = out.loss - COEFFICIENT * out.aux_loss
        (loss * tokens + COEFFICIENT * out.aux_loss / len(passes)).backward()
        total += float(loss * tokens)
        balance += float(out.aux_loss) / len(passes)
    return total, balance, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def balanced(run: Run) -> torch.Tensor:
    """The curve of a run with the loss of its routers, and the load of its experts."""
    names = "aux_loss", "expert_load_max", "dead_experts"
    rows = zip(curve(run), metrics(run), strict=True)
    return torch.tensor([(*of_step, *(row[name] for name in names)) for of_step, row in rows])


@pytest.mark.parametrize("model_type", COMPUTED)
def test_losses_and_gradients_are_transformers(make_run: MakeRun, model_type: str) -> None:
    settings = FULL | {"training.micro_batch_size": 4}
    run = make_run(model=config_of(model_type), settings=settings, rows=4)
    prepared(run)
    (loss, balance), found = gradients(run)
    expected_loss, expected_balance, expected = plain(run, [[0, 1, 2, 3]])
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert float(balance) == pytest.approx(expected_balance, rel=1e-5)
    assert_close(found, expected)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "granitemoe"])
def test_a_step_has_the_mean_of_its_forward_passes(
    make_run: MakeRun, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = FULL | {"training.micro_batch_size": 2, "training.gradient_accumulation_steps": 2}
    run = make_run(model=config_of(model_type), settings=settings, rows=4)
    prepared(run)
    order = DataOrder(4, run.config.seed, 4, 2, 1).micro_batches(1, 0)
    beats: list[None] = []
    monkeypatch.setattr(heartbeat, "beat", lambda *_: beats.append(None))
    (loss, balance), found = gradients(run)
    assert len(beats) >= 2, "a sign of each micro batch"
    expected_loss, expected_balance, expected = plain(run, order.tolist())
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert float(balance) == pytest.approx(expected_balance, rel=1e-5)
    assert_close(found, expected)


@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_two_ranks_balance_as_one(make_run: MakeRun, jobs: Jobs, sharding: str) -> None:
    common = {"training.method": "full", "training.micro_batch_size": 1}
    model = config_of("qwen3_moe")
    alone = make_run("alone", model=model, settings=common | {"training.gradient_accumulation_steps": 2})
    train_here(alone)
    run = make_run("two", model=model, settings=common | {"parallelism": {"ranks_per_node": 2, "sharding": sharding}})
    jobs.train(run)
    torch.testing.assert_close(balanced(run), balanced(alone), rtol=1e-4, atol=0)


def test_adapters_below_a_router_are_balanced_too(make_run: MakeRun) -> None:
    """As transformers and PEFT do: the gradient passes through frozen routers; what is reported is not `loss`."""
    settings = {"training.max_steps": 2, "lora.target_modules": ["q_proj", "v_proj"], "training.max_grad_norm": 0}
    runs = [
        make_run(f"run-{asked}", model=config_of("qwen3_moe", output_router_logits=asked), settings=settings)
        for asked in (False, True)
    ]
    for run in runs:
        train_here(run)
    (without, _), (balanced_first, _) = (metrics(run) for run in runs)
    assert "aux_loss" not in without and balanced_first["aux_loss"] > 2
    assert balanced_first["loss"] == without["loss"] and balanced_first["grad_norm"] != without["grad_norm"]


MODES: dict[str, dict[str, Any]] = {
    "recomputed": {"training.activation_checkpointing": "full", "training.activation_checkpointing_every": 2},
    "selective": {"training.activation_checkpointing": "selective"},
    "both": {"training.activation_offload": True, "training.activation_checkpointing": "full"},
}


def test_what_layers_keep_changes_no_step(make_run: MakeRun) -> None:
    common = FULL | {"training.max_steps": 3}
    found = []
    for name, mode in ({"plain": {}} | MODES).items():
        run = make_run(name, model=config_of("qwen3_moe"), settings=common | mode)
        train_here(run)
        found.append(balanced(run))
    assert all(torch.equal(other, found[0]) for other in found)


def test_compiled_layers_give_out_what_their_routers_compute(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with = torch.compile

    def compile_quickly(forward: Any, backend: str, **options: Any) -> Any:
        """What a compiler traces, and where graphs end, without the time to make code of it."""
        return compile_with(forward, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile_quickly)
    found = []
    for name, mode in ("plain", {}), ("compiled", {"training.compile": True} | MODES["recomputed"]):
        settings = {"training.method": "full", "training.max_steps": 2, "training.validate_every_steps": 1}
        run = make_run(name, model=config_of("qwen3_moe", num_hidden_layers=1), settings=settings | mode)
        write_rows(run.paths.dataset_path / "validation", rows=3, max_length=32, seed=9)
        train_here(run)
        validated = torch.tensor([row["validation_loss"] for row in metrics(run)])
        found.append(torch.cat([balanced(run), validated[:, None]], 1))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


def test_padding_is_no_token() -> None:
    """The last document that predicts nothing, unless it is the only one; one with masked labels before it counts."""
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]])
    labels = torch.full((3, 6), IGNORED)
    labels[0, 1], labels[1, 5] = 3, 4
    tokens = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6, [1] * 6], dtype=torch.bool)
    inputs = language_model.inputs(Batch(torch.zeros_like(labels), labels, position_ids), torch.device("cpu"))
    assert torch.equal(tokens_of(position_ids, inputs["targets"], inputs["predicted_at"]), tokens)


def test_prompts_of_different_lengths_are_answered(tmp_path: Path) -> None:
    """Transformers' own classes fail at padded prompts when they compute the loss too."""
    tokenizer = tiny_tokenizer.make()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("qwen3_moe", vocab_size=len(tokenizer)))
    model.save_pretrained(tmp_path)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    loaded = pretrained.load(tmp_path, "auto")
    together = greedy.answers(loaded, tokenizer, prompts, 4)
    assert together == [greedy.answers(loaded, tokenizer, [prompt], 4)[0] for prompt in prompts]
