"""Certificates of engine trl: what TRL trains of types that differ, and what is refused of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.models import write_config
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.engines.certificate.model import save_small
from hyperpod_ft.engines.trl.certificate import certify
from hyperpod_ft.engines.trl.saved import check_saved, why_not_sharded
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.certificate import Certificate

pytestmark = pytest.mark.training

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}
EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
SDPA = {"model_init_kwargs": {"attn_implementation": "sdpa"}}
FLASH = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
FILE = "model.safetensors"
OF_OBJECTIVE: dict[str, dict[str, Any]] = {
    "sft": {"dataset": {"format": "text"}},
    "dpo": {"dataset": {"format": "preference", "packing": "none"}},
    "reward": {"dataset": {"format": "preference"}},
    "grpo": {"dataset": {"format": "prompt"}, "reward": [{"function": "json"}]},
    "distillation": {"dataset": {"format": "prompt"}, "teacher": {"source": "a/b"}},
}


def certified(
    tmp_path: Path, model_type: str, objective: str = "sft", *, teacher: str | None = None, **sections: Any
) -> Certificate:
    """Of a run on GPUs, whose attention is flex attention; where answers are sampled or with `trl`, another."""
    source = tmp_path / "source"
    if not source.exists():
        write_config(model_type, source)
    if objective == "reward":  # as stage download leaves it
        config = json.loads((source / "config.json").read_text()) | {"pad_token_id": 0, "id2label": {"0": "LABEL_0"}}
        (source / "config.json").write_text(json.dumps(config | {"architectures": ["XForSequenceClassification"]}))
    values: dict[str, Any] = {
        "name": "run",
        "engine": "trl",
        "cluster": {"root": str(tmp_path), "instance_type": "p5.48xlarge"},
        "model": {"source": str(source)},
        **OF_OBJECTIVE[objective],
        "training": {"objective": objective, "method": "lora" if "lora" in sections else "full", "micro_batch_size": 8},
        **sections,
    }
    values["dataset"] = values["dataset"] | {"source": str(source), "max_length": 64}
    (tmp_path / "scratch").mkdir()
    of_teacher = write_config(teacher, tmp_path / "a-teacher") if teacher else None
    return certify(RunConfig.model_validate(values), source, of_teacher, tmp_path / "scratch")


@pytest.mark.parametrize("sections", [{}, {"lora": {}}, {"lora": {"dora": True}, "trl": SDPA}, {"trl": FLASH}])
def test_examples_of_a_dense_type_share_rows(tmp_path: Path, sections: dict[str, Any]) -> None:
    assert certified(tmp_path, "llama", **sections) == Certificate()


def test_ranks_do_not_shard_all_weights_of_a_mixture_but_share_adapters(tmp_path: Path) -> None:
    """transformers joins its experts: FSDP's checkpoints have other tensors than the files."""
    for name, sections in (("lora", {"lora": ATTENTION}), ("full", {})):
        (tmp_path / name).mkdir()
        found = certified(tmp_path / name, "qwen3_moe", **sections)
        assert not found.not_packed and bool(found.not_sharded) == (name == "full")


def test_examples_of_a_recurrent_type_have_rows_of_their_own(tmp_path: Path) -> None:
    found = certified(tmp_path, "mamba", trl=EAGER)
    assert "see one another" in found.not_packed and not found.not_proven


@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_oss"])
@pytest.mark.parametrize("objective", ["dpo", "reward", "grpo"])
def test_all_objectives_take_types_that_pack_nothing(tmp_path: Path, objective: str, model_type: str) -> None:
    """A mixture with recurrences, and one with attention sinks: padded, and sampled from caches."""
    found = certified(tmp_path, model_type, objective, lora=ATTENTION, trl=EAGER)
    assert found == Certificate(f"objective {objective} packs none")


def test_a_parameter_without_gradient_is_found(tmp_path: Path) -> None:
    """Of a model that also reads images, DDP would wait for the tower's."""
    assert certified(tmp_path, "gemma3").unreached.startswith("model.multi_modal_projector.")


@pytest.mark.parametrize(
    ("model_type", "objective", "sections", "says"),
    [
        (
            "mamba",
            "sft",
            {"lora": {"target_modules": ["in_proj"]}},
            "model.source: transformers has no flex_attention .*attn_implementation: eager",
        ),
        ("recurrent_gemma", "sft", {"trl": EAGER}, "TRL does not compute the loss of a small model of this type: 8"),
        ("gpt_oss", "sft", {"trl": FLASH}, "model.source: transformers has no flash_attention_2 .*: eager"),
        ("gemma2", "grpo", {}, r"training\.objective: grpo is not possible .* attention sdpa .*implementation: eager"),
        ("gpt2", "grpo", {}, "training.objective: grpo is not possible .* padding at the left changes"),
        *(
            ("llama", "distillation", {"teacher": teacher}, f"teacher.source: distillation is not possible .*: {says}")
            for teacher, says in (
                ("gpt2", "padding at the left"),
                ("gemma2", "attention sdpa"),
                ("zamba", "[A-Za-z]+Error"),
            )
        ),
        ("granite", "reward", {}, "transformers has no reward models of type granite"),
        ("llama", "sft", {"lora": {"target_modules": ["wqkv"]}}, "lora.target_modules: 'wqkv' matches no module"),
        ("deepseek_v3", "sft", {"lora": EXPERTS}, "all experts .*without down_proj, gate_proj, up_proj"),
        ("mamba", "sft", {"trl": EAGER, "lora": {"target_modules": ["out_proj"]}}, r"lora\.target_modules: .*Mamba"),
        ("llama4_text", "sft", {}, "TRL cannot train a small model of this type"),
    ],
)
def test_what_would_fail_in_training_is_refused(
    tmp_path: Path, model_type: str, objective: str, sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        certified(tmp_path, model_type, objective, **sections)


def test_another_loss_of_trl_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = SFTTrainer.compute_loss
    monkeypatch.setattr(SFTTrainer, "compute_loss", lambda *given, **named: compute(*given, **named) * 1.001)
    with pytest.raises(UserError, match=r"TRL does not compute the loss .*attn_implementation: eager"):
        certified(tmp_path, "llama", trl=SDPA)


@pytest.mark.parametrize(
    ("model_type", "prefix", "further", "says"),
    [
        ("gpt2", "transformer.", "", "tensor h.0.attn.c_attn.bias of the base model is missing; set training.method"),
        ("qwen3_next", "", "mtp.fc.weight", "tensor mtp.fc.weight of the base model is missing; set training.method"),
    ],
)
def test_files_that_could_not_be_written_again_are_refused(
    tmp_path: Path, model_type: str, prefix: str, further: str, says: str
) -> None:
    """As published: without the prefix of transformers' class, or with layers that it does not have."""
    save_small(write_config(model_type, tmp_path / "config"), source := tmp_path / "source")
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(source / FILE).items()}
    save_file(tensors | ({further: torch.ones(1)} if further else {}), source / FILE, {"format": "pt"})
    with pytest.raises(UserError, match=f"^model.source: .* could not be consolidated: .*{says}"):
        certified(tmp_path, model_type, trl=EAGER)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mixtral", "qwen3_moe", "gpt2", "gemma4_text"])
def test_files_that_transformers_saved_are_written_again(tmp_path: Path, model_type: str) -> None:
    """Ranks shard no types whose tensors transformers joins. Gemma 4 has buffers, which are saved too."""
    model = save_small(write_config(model_type, tmp_path / "config"), tmp_path / "model").to("meta")
    check_saved(model, tmp_path / "model")
    assert bool(why_not_sharded(model, tmp_path / "model")) == (model_type in ("mixtral", "qwen3_moe"))
