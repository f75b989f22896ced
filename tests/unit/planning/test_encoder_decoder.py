"""Encoder-decoders on the head node: what fits together, what is refused, sizes, memory and FLOPs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from hyperpod_ft.config import run_file
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.engines.throughput import t5_flops_per_token
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.lora import targets
from hyperpod_ft.planning.memory import GIB
from hyperpod_ft.planning.model_fit import check_memory, check_model_directory
from hyperpod_ft.planning.parallelism import check_model, degrees_of
from hyperpod_ft.planning.t5_shape import T5Shape, t5_shape
from hyperpod_ft.runs.run import Run

MakeRun = Callable[..., Run]

XL = {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "decoder_start_token_id": 0,
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_layers": 24,
    "num_heads": 32,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
XXL = XL | {"d_model": 4096, "d_ff": 10240, "num_heads": 64}
SMALL = XL | {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "feed_forward_proj": "relu"}
SMALL |= {"tie_word_embeddings": True, "num_decoder_layers": 4}
PAIRS = {"dataset__format": "prompt-completion", "dataset__max_target_length": 128}


def shape_of(config: dict[str, Any]) -> T5Shape:
    shape = t5_shape(config)
    assert shape is not None
    return shape


@pytest.mark.parametrize("config", [XL, XXL, SMALL], ids=["xl", "xxl", "small"])
def test_parameters_are_those_of_the_model(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**config))
    # transformers ties the output layer until it reads the files
    head = 0 if config["tie_word_embeddings"] else model.lm_head.weight.numel()
    shape = shape_of(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) + head
    names = [name for name, _ in model.named_modules()]
    for linear in shape.matrices:
        assert sum(shape.times(linear)) == sum(name.endswith(f".{linear}") for name in names), linear
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(shape.modules) == linears - {"lm_head"}


@pytest.mark.parametrize(
    ("recipe", "config", "gib"),
    [
        ("flan-t5-xl-full-p4d", XL, 15.6),
        ("flan-t5-xxl-lora-p4d", XXL, 26.2),
        ("flan-t5-xxl-full-training-job", XXL, 22.7),
    ],
)
def test_recipes_fit(recipe: str, config: dict[str, Any], gib: float) -> None:
    run = run_file.load(run_file.find(recipe))
    shape, degrees = shape_of(config), degrees_of(run)
    check_model(run, degrees, shape)
    memory = check_memory(run, degrees, shape)
    assert memory is not None and memory.total / GIB == pytest.approx(gib, abs=0.05)


def test_too_large_a_model_is_refused_with_a_change_that_fits(make_run: MakeRun) -> None:
    full = {"training__method": "full", "cluster__instance_type": "p4d.24xlarge", "parallelism": {"sharding": "zero1"}}
    config = make_run(**PAIRS | full).config
    with pytest.raises(UserError, match=r"parallelism\.sharding: auto"):
        check_memory(config, degrees_of(config), shape_of(XXL))


@pytest.mark.parametrize(
    ("settings", "model_config", "named"),
    [
        ({}, XL, "dataset.max_target_length: required"),
        (PAIRS, {"model_type": "llama"}, "dataset.max_target_length: only for encoder-decoders, and a llama model"),
        (PAIRS, {"model_type": "bart", "is_encoder_decoder": True}, "model.source: encoder-decoders of type bart"),
        (PAIRS, XL | {"decoder_start_token_id": None}, "decoder_start_token_id"),
        (PAIRS | {"parallelism": {"ranks_per_node": 3, "tensor_parallel": 3}}, XL, "does not divide the model's 32"),
    ],
)
def test_what_does_not_go_together(
    make_run: MakeRun, tmp_path: Path, settings: dict[str, Any], model_config: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config))
    config = make_run(**settings).config
    with pytest.raises(UserError) as raised:
        check_model_directory(config, degrees_of(config), tmp_path)
    assert named in str(raised.value)


def test_targets_that_it_has_not(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    config = make_run(**PAIRS, lora__target_modules=["q", "wi_0"]).config
    with pytest.raises(UserError, match=r"'wi_0' matches no module of the model; .* it has: k, o, q, v, wi, wo$"):
        check_model_directory(config, degrees_of(config), tmp_path)


def test_a_run_that_goes_together(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(XL))
    config = make_run(**PAIRS).config
    assert targets(config.lora, "t5") == ("q", "v")
    assert check_model_directory(config, degrees_of(config), tmp_path).sharding


@pytest.mark.parametrize(
    "settings",
    [
        {"parallelism__pipeline_parallel": 2},
        {"parallelism__context_parallel": 2},
        {"parallelism__sequence_parallel": True},
        {"lora__target_modules": ["q", "shared"]},
        {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge"},
    ],
    ids=str,
)
def test_settings_that_do_not_suit_an_encoder_decoder(make_run: MakeRun, settings: dict[str, Any]) -> None:
    key = next(iter(settings)).replace("__", ".")
    with pytest.raises(UserError) as raised:
        make_run(**PAIRS | settings)
    assert (key if key != "engine" else "dataset.max_target_length") in str(raised.value)


ROUGE = {"training__validate_rouge_rows": 8}
ON_GPUS = {"cluster__instance_type": "p4d.24xlarge", "parallelism": {}}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dataset__format": "text"}, "only for encoder-decoders"),
        (PAIRS | {"dataset__validation_share": 0}, "dataset.validation_share 0"),
        (PAIRS | {"parallelism": {"ranks_per_node": 2, "tensor_parallel": 2}}, "parallelism.tensor_parallel is 2"),
        (PAIRS | {"parallelism": {"ranks_per_node": 2, "sharding": "zero3"}}, "parallelism.sharding is zero3 over 2"),
        (PAIRS | ON_GPUS | {"parallelism": {"offload": "parameters"}}, "parallelism.sharding is zero3 over 8 ranks,"),
        (PAIRS | {"cluster__instance_type": "trn2.48xlarge", "parallelism": {"tensor_parallel": 1}}, "on trn2"),
    ],
    ids=str,
)
def test_runs_that_cannot_answer_while_they_train(make_run: MakeRun, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as raised:
        make_run(**settings | ROUGE)
    (line,) = str(raised.value).splitlines()
    assert line.startswith("training.validate_rouge_rows: ") or ": training.validate_rouge_rows: " in line
    assert named in line


def test_a_model_whose_weights_have_to_be_divided_cannot_answer(make_run: MakeRun, tmp_path: Path) -> None:
    """With sharding auto, that is known with the model's size."""
    full = PAIRS | ON_GPUS | ROUGE | {"training__method": "full", "dataset__max_length": 512}
    (tmp_path / "config.json").write_text(json.dumps(XL))
    config = make_run(**full).config
    assert check_model_directory(config, degrees_of(config), tmp_path).layout.sharding.mode == "zero1"
    (tmp_path / "config.json").write_text(json.dumps(XXL))
    with pytest.raises(UserError, match=r"training\.validate_rouge_rows: .* parallelism\.sharding is zero3 over 8 "):
        check_model_directory(config, degrees_of(config), tmp_path)


def test_to_answer_while_training_changes_no_run(make_run: MakeRun) -> None:
    pairs = PAIRS | {"parallelism": {"ranks_per_node": 2}}
    assert make_run(**pairs | ROUGE).plan == make_run(**pairs).plan


@pytest.mark.parametrize("targets", [None, ("q", "wo")])
def test_flops_by_hand(targets: tuple[str, ...] | None) -> None:
    dataset = Dataset(source="./rows.jsonl", format="prompt-completion", max_length=100, max_target_length=40)
    # 6 layers of the encoder and 4 of the decoder, of width 512 and 8 heads of 64
    attention, mlp = 4 * 512 * 512, 2 * 512 * 2048
    source, target = 6 * (attention + mlp) + 4 * 2 * 512 * 512, 4 * (attention + 2 * 512 * 512 + mlp) + 32128 * 512
    adapters = 0.0
    if targets:
        encoder, decoder = 6 * 8 * (1024 + 2560), 4 * 8 * (2 * 1024 + 2560)
        adapters = 6 * (100 * encoder + 40 * decoder)
    products = (4 if targets else 6) * (100 * source + 40 * target)
    scores = 12 * 512 * (6 * 100 * 100 + 4 * (40 * 40 + 40 * 100))
    found = t5_flops_per_token(shape_of(SMALL), dataset, frozenset(targets or ()), 8 if targets else None)
    assert found == pytest.approx((products + adapters + scores) / 140)
