"""Certificates of many kinds of models, and planted faults that each is to find."""

import contextlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from benchmarks.models import write_config
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.doctor.volume import certificates
from hyperpod_ft.engines.certificate import result as results
from hyperpod_ft.engines.certificate.model import save_small
from hyperpod_ft.engines.torch.certificate import division
from hyperpod_ft.engines.torch.certificate.certify import certify
from hyperpod_ft.engines.torch.model import attention
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import preview
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.stages import certify as stage_certify
from hyperpod_ft.stages import stage
from hyperpod_ft.stages.train import plan_layout
from tests.forking import ForkServer
from tests.training.conftest import VOCABULARY, MakeRun, process_group_of_its_own
from tests.unit import tiny_t5
from tests.unit.tiny_families import FILE, SIZES

pytestmark = pytest.mark.training

ATTENTION = Lora(target_modules=("q_proj", "v_proj"))
PACKED = {
    "llama": Lora(dora=True),
    "qwen3": Lora(target_modules=("q_proj", "lm_head", "embed_tokens")),
    "gemma3_text": Lora(),
    "gpt2": Lora(),
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
    "deepseek_v3": Lora(target_modules=("q_a_proj", "kv_b_proj")),
}
# with recurrences, convolutions or sinks, of which documents of a row see one another, or that the engine lacks
ONE_A_ROW = {
    "gpt_oss": ATTENTION,
    "qwen3_next": ATTENTION,
    "bamba": Lora(target_modules=("in_proj", "down_proj")),
    "granitemoehybrid": Lora(target_modules=("in_proj", "input_linear")),
    "lfm2": Lora(target_modules=("w1", "in_proj")),
    "nemotron_h": None,
    "olmo_hybrid": None,
}


@pytest.fixture(autouse=True)
def own_process_group() -> Any:
    with process_group_of_its_own():
        yield


@pytest.fixture
def forked_division(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer) -> None:
    """The program of the ranks is forked from one that has imported the engine."""

    def run(command: list[str], *, env: dict[str, str], **_: object) -> "subprocess.CompletedProcess[str]":
        output, errors = tmp_path / "division.out", tmp_path / "division.err"
        forked = fork_server.start(command[2:], env, output, errors=errors)
        return subprocess.CompletedProcess(command, forked.wait(300), output.read_text(), errors.read_text())

    monkeypatch.setattr(division, "subprocess", SimpleNamespace(run=run))


def certified(tmp_path: Path, model_type: str, lora: Lora | None, **values: Any) -> Certificate:
    source = write_config(model_type, tmp_path / "source", **values)
    scratch = tmp_path / ("lora" if lora else "full")
    scratch.mkdir()
    return certify(source, lora, scratch)


@pytest.mark.parametrize("model_type", PACKED)
def test_examples_share_rows_and_what_is_trained_loads(tmp_path: Path, model_type: str) -> None:
    assert certified(tmp_path, model_type, PACKED[model_type]) == Certificate()
    assert certified(tmp_path, model_type, None) == Certificate()


@pytest.mark.parametrize("model_type", ONE_A_ROW)
def test_models_that_train_one_example_a_row(tmp_path: Path, model_type: str) -> None:
    found = certified(tmp_path, model_type, ONE_A_ROW[model_type])
    assert found.not_packed and not found.not_proven
    words = "attention sinks" if model_type == "gpt_oss" else "see one another"
    assert words in found.not_packed


def test_a_window_that_only_a_mask_has_is_found(tmp_path: Path) -> None:
    """Its documents would be apart, but its attention would see beyond its window."""
    values = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}
    assert "do not train as they do alone" in certified(tmp_path, "qwen2_moe", None, **values).not_packed


def test_what_adapters_name_as_parameters_is_recorded(tmp_path: Path) -> None:
    """PEFT takes linears of shared experts for those of experts, which vLLM does not serve."""
    found = certified(tmp_path, "qwen2_moe", Lora())
    assert found.target_parameters == ("down_proj.weight", "gate_proj.weight", "up_proj.weight")


@pytest.mark.parametrize("lora", [None, ATTENTION])
def test_a_routers_balancing_loss_is_trained_or_refused(tmp_path: Path, lora: Lora | None) -> None:
    assert certified(tmp_path, "qwen3_moe", lora, output_router_logits=True) == Certificate()
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="output_router_logits"):
        certified(tmp_path / "other", "glm4_moe", lora, output_router_logits=True)


def test_where_no_small_model_can_be_built_nothing_is_proven(tmp_path: Path) -> None:
    found = certified(tmp_path, "zamba", None)
    assert found.not_proven and found.not_packed == found.not_proven


def test_an_encoder_decoders_names_are_compared(tmp_path: Path) -> None:
    tiny_t5.save_model(tmp_path / "t5", tiny_t5.config())
    assert certify(tmp_path / "t5", Lora(), tmp_path) == Certificate()
    with pytest.raises(UserError, match=r"lora\.target_modules: 'wqkv'"):
        certify(tmp_path / "t5", Lora(target_modules=("wqkv",)), tmp_path)


def test_a_leak_between_documents_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention.document_bounds
    monkeypatch.setattr(attention, "document_bounds", lambda positions: whole(torch.arange(positions.numel())[None]))
    assert "see one another" in certified(tmp_path, "llama", None).not_packed


def test_an_adapter_without_gradient_is_found(tmp_path: Path) -> None:
    """The router reads the weight of its linear, not the linear."""
    with pytest.raises(UserError, match=r"lora\.target_modules: .*\.gate\.wg.* gets no gradient") as refused:
        certified(tmp_path, "hunyuan_v1_moe", Lora(target_modules=("q_proj", "wg")))
    assert "without wg" in refused.value.remedy


Damage = Callable[[Path, Path], None]
"""Of a written model; the first directory is its base."""


def tensors_changed(change: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]) -> Damage:
    """By what changes its tensors, given those of its base too."""

    def damage(base: Path, result: Path) -> None:
        found = load_file(result / FILE)
        change(found, load_file(base / FILE))
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, result / FILE, {"format": "pt"})

    return damage


def lose_an_expert(found: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
    name = next(name for name in found if ".experts.2." in name)
    found[name] = base[name]


def swap_experts(found: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> None:
    one = next(name for name in found if ".experts.0." in name)
    other = one.replace(".experts.0.", ".experts.1.")
    found[one], found[other] = found[other], found[one]


def lose_all(found: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
    found.update(base)


def drop_one(found: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> None:
    del found["model.norm.weight"]


def add_one(found: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> None:
    found["model.norm.scale"] = torch.zeros(3)


def untie(_: Path, result: Path) -> None:
    config = json.loads((result / "config.json").read_text())
    (result / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


FAULTS: dict[str, tuple[Damage, str]] = {
    "a lost expert": (tensors_changed(lose_an_expert), "is not what was trained"),
    "swapped experts": (tensors_changed(swap_experts), "is not what was trained"),
    "equal to its base": (tensors_changed(lose_all), "is not what was trained"),
    "a tensor less": (tensors_changed(drop_one), r"misses model\.norm\.weight"),
    "a tensor more": (tensors_changed(add_one), r"does not know model\.norm\.scale"),
    "an untied head": (untie, r"misses lm_head\.weight"),
}


@pytest.mark.parametrize(
    ("fault", "lora"),
    [*((fault, None) for fault in FAULTS), ("swapped experts", ATTENTION), ("equal to its base", ATTENTION)],
)
def test_a_damaged_model_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, lora: Lora | None
) -> None:
    damage, words = FAULTS[fault]
    name = "merge" if lora else "consolidate_checkpoint"
    genuine = getattr(results, name)

    def damaged(first: Path, second: Any, *rest: Path, **others: Any) -> None:
        genuine(first, second, *rest, **others)
        damage(others.get("base", first), rest[0] if rest else second)

    monkeypatch.setattr(results, name, damaged)
    with pytest.raises(UserError, match=words):
        certified(tmp_path, "mixtral", lora, tie_word_embeddings=True)


def test_the_stage_decides_how_rows_are_filled(make_run: MakeRun) -> None:
    """Of the run's own model, of which headers and config.json are read; a plan says what follows."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoConfig.for_model("gpt_oss", **SIZES | experts | {"vocab_size": VOCABULARY})
    settings = {"lora.target_modules": ["q_proj"]}
    run = make_run(model=model, settings=settings)
    run.paths.record_path("certify").unlink()
    assert preview(run, Launchers()).certificate is None
    stage.perform(run, "certify", stage_certify.work)
    assert certificates(run.config.root).found == "gpt_oss (lora): one example a row"
    found = run.journal.certificate()
    assert found and "attention sinks" in found.not_packed and preview(run, Launchers()).certificate == found
    assert not plan_layout(run).own_attention
    for refused, words in (
        ({"dataset.packing": "bfd"}, r"dataset\.packing: bfd .*attention sinks.*; set it to auto"),
        (
            {"parallelism": {"ranks_per_node": 2, "context_parallel": 2}},
            r"parallelism\.context_parallel: .*set it to 1",
        ),
    ):
        other = make_run("other", settings | refused, model=model)
        other.paths.record_path("certify").unlink()
        with pytest.raises(UserError, match=words):
            stage.perform(other, "certify", stage_certify.work)
        assert other.journal.certificate() is None


@pytest.mark.parametrize("method", ["lora", "full"])
def test_ranks_that_divide_a_model_train_as_one(make_run: MakeRun, forked_division: None, method: str) -> None:
    degrees = {"tensor_parallel": 4} if method == "lora" else {"context_parallel": 2}
    run = make_run(settings={"training.method": method, "parallelism": {"ranks_per_node": 8, **degrees}})
    run.paths.record_path("certify").unlink()
    stage.perform(run, "certify", stage_certify.work)
    assert run.journal.certificate() == Certificate()


def test_another_loss_of_ranks_that_divide_a_model_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_division: None
) -> None:
    measured = division._measured

    def another(directory: Path) -> list[dict[str, float]]:
        factor = 1.001 if directory.name == "together" else 1.0
        return [row | {"loss": row["loss"] * factor} for row in measured(directory)]

    monkeypatch.setattr(division, "_measured", another)
    save_small(write_config("llama", tmp_path / "source"), tmp_path / "model")
    with pytest.raises(UserError, match=r"^parallelism: with .*, a small model of this type has loss"):
        division.check_division(tmp_path / "model", None, tmp_path, Degrees(1, 2, 2, 1), packed=True)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "jetmoe"])
def test_two_ranks_divide_the_experts_of_a_small_model(tmp_path: Path, forked_division: None, model_type: str) -> None:
    """Or say that its class computes them in a way of its own."""
    small = tmp_path / "model"
    save_small(write_config(model_type, tmp_path / "source"), small)
    degrees = Degrees(1, 8, 1, 1, expert_parallel=4)
    with contextlib.nullcontext() if model_type == "qwen3_moe" else pytest.raises(UserError) as raised:
        division.check_division(small, None, tmp_path, degrees, packed=True)
    if raised:
        assert re.match(r"parallelism: dp 2 x tp 1, ep 2 does not .* cannot be divided; set it to 1", str(raised.value))
