"""Which models can be consolidated, by what real tiny ones have in their files, and how a user learns it."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.authoring.new_run import NewRun, new_run
from hyperpod_ft.checkpoint.adapters import experts
from hyperpod_ft.config import run_file
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.torch.consolidable import check, needed_targets
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import trainability
from hyperpod_ft.launch.preflight import check_run
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import certify, download
from tests.unit import tiny_t5
from tests.unit.tiny_families import FILE, MIXTURES, SIZES, as_published

OTHER_NAMES = ("gpt_neo", "phi")  # than Llama's
DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "granite", "olmo2"),
    *("smollm3", "gpt2", "gptj", "gpt_neo", "gpt_neox", "stablelm", "cohere"),
)
# GPT-Neo names its sizes, and its kinds of layers, in its own way
OWN_SIZES = {"gptj": {"rotary_dim": 4}, "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}}


def save(directory: Path, model_type: str, **values: Any) -> Path:
    config = AutoConfig.for_model(model_type, **SIZES | values)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "mixture", "qwen3_moe", **MIXTURES["qwen3_moe"])


@pytest.mark.parametrize("model_type", MIXTURES)
def test_mixtures_are_not_refused_nor_are_adapters_of_their_experts(model_type: str, tmp_path: Path) -> None:
    directory = save(tmp_path, model_type, **MIXTURES[model_type])
    check(directory, None)
    assert needed_targets(directory) is None
    check(directory, Lora())
    names = ("experts.gate_up_proj", "experts.down_proj")
    check(directory, Lora(target_parameters=names))
    check(directory, Lora(target_modules=(), target_parameters=names[:1]))
    with pytest.raises(UserError, match=r"lora\.target_modules: 'wqkv' .* o_proj"):
        check(directory, Lora(target_modules=("wqkv",)))
    with pytest.raises(UserError, match=r"lora\.target_parameters: 'experts.w13' .*\.experts\.down_proj, ") as refused:
        check(directory, Lora(target_parameters=("experts.w13",)))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("parts", [("up_proj", "gate_proj"), ("w1", "w3")])
def test_experts_that_would_not_be_merged_are_refused(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]
) -> None:
    """transformers finds them by a table of its own; a merge would take other tensors for them, or find none."""
    monkeypatch.setattr(experts, "OF_ONE", {"gate_up_proj": (parts,), "down_proj": (("down_proj",),)})
    check(mixture, Lora(target_parameters=("experts.down_proj",)))
    with pytest.raises(UserError, match=r"lora\.target_parameters: .*\.gate_up_proj is"):
        check(mixture, Lora(target_parameters=("experts.gate_up_proj",)))


def test_dora_that_peft_cannot_load_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path, "glm4_moe", **MIXTURES["glm4_moe"])
    with pytest.raises(UserError, match=r"lora\.dora: .* down_proj beside experts"):
        check(directory, Lora(dora=True))
    check(directory, Lora(dora=True, target_modules=("q_proj",)))


@pytest.mark.parametrize("model_type", DENSE)
def test_dense_models_are_not_refused(model_type: str, tmp_path: Path) -> None:
    directory = save(tmp_path, model_type, **OWN_SIZES.get(model_type, {}))
    check(directory, None)
    targets = needed_targets(directory)
    check(directory, Lora(target_modules=tuple(targets) if targets else None))
    assert bool(targets) == (model_type in OTHER_NAMES), targets


def test_tensors_that_the_class_does_not_have_are_left_as_they_are(tmp_path: Path) -> None:
    save(tmp_path, "qwen3_next", **MIXTURES["qwen3_next"])
    extra = {"mtp.fc.weight": torch.zeros(3, 5), "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(3, 5)}
    save_file(load_file(tmp_path / FILE) | extra, tmp_path / FILE, {"format": "pt"})
    check(tmp_path, None)
    check(tmp_path, Lora(target_modules=("q_proj",)))
    assert needed_targets(tmp_path) is None


def test_a_convolution_over_each_channel_is_not_refused(tmp_path: Path) -> None:
    """Its weight has an axis of length 1, in the files under another name."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8}
    check(save(tmp_path, "olmo_hybrid", **linear | kinds), None)


def test_a_type_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen9_moe"}')
    with pytest.raises(UserError, match="does not know models of type qwen9_moe; choose another model"):
        check(tmp_path, None)


def test_a_gpt2_as_published_is_not_refused(tmp_path: Path) -> None:
    as_published(save(tmp_path, "gpt2"))
    check(tmp_path, None)
    check(tmp_path, Lora())


def test_an_encoder_decoder_is_not_refused(tmp_path: Path) -> None:
    tiny_t5.save_model(tmp_path, tiny_t5.config())
    check(tmp_path, None)
    check(tmp_path, Lora())


def test_targets_are_known_from_config_json_alone(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((mixture / "config.json").read_bytes())
    check(tmp_path, None)
    check(tmp_path, Lora())
    with pytest.raises(UserError, match=r"lora\.target_modules: 'gate_proj' matches no module"):
        check(tmp_path, Lora(target_modules=("gate_proj",)))


@pytest.fixture
def run_of(make_run: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    def run(model: Path, **changes: Any) -> Run:
        (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
        dataset = {"source": str(tmp_path / "rows.jsonl"), "format": "text"}
        return make_run(model={"source": str(model)}, dataset=dataset, parallelism={"ranks_per_node": 1}, **changes)

    return run


def test_a_submission_is_refused(mixture: Path, run_of: Callable[..., Run]) -> None:
    run = run_of(mixture, lora={"target_parameters": ["experts.w2"]})
    with pytest.raises(UserError, match=r"lora\.target_parameters: 'experts.w2' .*mlp\.experts\.down_proj") as refused:
        check_run(run)
    assert len(str(refused.value).splitlines()) == 1


def test_a_new_run_file_names_what_can_have_adapters(run_of: Callable[..., Run], tmp_path: Path) -> None:
    model = save(tmp_path / "phi", "phi")
    run = run_of(model)
    output = run.paths.root / "run.yaml"
    output.parent.mkdir(exist_ok=True)
    output.write_text(new_run(NewRun(str(model), run.config.dataset.source, "local"), output).text())
    config = run_file.load(output)
    assert config.lora.target_modules and "dense" in config.lora.target_modules
    check(model, config.lora)


def test_stage_certify_refuses_what_was_not_here_at_submission(mixture: Path, run_of: Callable[..., Run]) -> None:
    run = run_of(mixture, lora={"target_modules": ["gate_proj"]})
    download.work(run)
    with pytest.raises(UserError, match=r"lora\.target_modules"):
        certify.work(run)


def test_points_of_a_sweep_ask_once_and_leave_nothing(
    mixture: Path, run_of: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, seen = tmp_path / "python", tmp_path / "seen"
    python.write_text(
        f'#!/bin/bash\necho "$(ls "$PYTHONPATH") $PWD$HF_TOKEN" >> {seen}\n[ ! -e {tmp_path}/hang ] || exec sleep 600\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("HF_TOKEN", "secret")
    for changes in ({"r": 4}, {"r": 8, "alpha": 8.0, "dropout": 0.1, "rslora": True}):
        check_run(run_of(mixture, env__python=str(python), lora=changes))
    assert seen.read_text() == "hyperpod_ft /\n", "one program, with this package, not those next to it, and no secret"
    assert not (tmp_path / "root").exists()
    (tmp_path / "hang").touch()

    def was_asked(seconds: float) -> bool:
        monkeypatch.setattr(trainability, "_SECONDS", seconds)
        trainability._refusal.cache_clear()
        check_run(run_of(mixture, env__python=str(python), lora={"target_modules": ["q_proj"]}))
        return seen.read_text() == "hyperpod_ft /\n" * 2

    assert any(map(was_asked, (0.2, 3, 30))), "on a busy machine, the program starts late"


def test_usual_names_need_no_other_program(
    tmp_path: Path, run_of: Callable[[Path], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(save(tmp_path / "llama", "llama"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started a program"))
    check_run(run)
