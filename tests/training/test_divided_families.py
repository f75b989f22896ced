"""Each family under tensor parallelism computes what one process computes with plain transformers and PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sharding_worker import SAVED
from test_layouts import compare, settings
from test_sharding import Case, check, expected_of, job
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, PretrainedConfig

from hyperpod_ft.checkpoint.consolidate import consolidate_checkpoint
from hyperpod_ft.planning.families import FAMILIES
from tests.training.conftest import VOCABULARY, Jobs, MakeRun
from tests.unit.tiny_families import SIZES as TINY

pytestmark = pytest.mark.training

FULL = {"training.method": "full"}
# more tensor-parallel ranks than key/value heads in TP4; a vocabulary that neither degree divides
SIZES = TINY | {"vocab_size": VOCABULARY + 3}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {"num_key_value_heads": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "qwen3": {"tie_word_embeddings": True},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.5, "residual_multiplier": 0.5, "attention_bias": True},
    "gemma2": WINDOWS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": WINDOWS,
    # a fused linear holds no copies of heads
    "phi3": {"num_key_value_heads": 4},
    "gpt_neox": {"num_key_value_heads": None, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 4},
}
TYPES = [model_type for family in FAMILIES for model_type in family.model_types]
TP2, TP4 = (2, 2, 2, 2), (1, 4, 4, 2)


def config_of(model_type: str) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(model_type, **SIZES | OWN.get(model_type, {}))
    return config


def test_loss_and_every_gradient_agree(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Full training of each family, in turn without sequence parallelism. test_pipeline_parallel.py has TP 2."""
    runs = []
    for index, model_type in enumerate(TYPES):
        changes = settings(TP4, **FULL)
        changes["parallelism"]["sequence_parallel"] = index % 4 != 2
        runs.append(make_run(model_type, changes, model=config_of(model_type)))
    compare(jobs, tmp_path, runs, 0, {"loss": 1e-5, "gradient": 1e-5}, runs)


def test_adapters_agree(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """On fused and transposed linears, copied heads, and embedding and head, tied or not; also after steps."""
    targets = {
        "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "gptj": ["q_proj", "v_proj", "out_proj", "fc_in", "fc_out", "wte", "lm_head"],
        "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"],
        "gpt2": ["c_attn", "c_proj", "c_fc"],
    }
    runs = []
    for model_type, names in targets.items():
        for dora in {"gptj": (False,), "gpt2": (True,)}.get(model_type, (False, True)):
            changes = settings(TP2 if model_type in ("phi3", "gpt2") else TP4, **{"training.learning_rate": 1e-3})
            changes["lora"] = {"r": 4, "alpha": 8, "target_modules": names, "dora": dora}
            model = config_of(model_type)
            model.tie_word_embeddings = dora and model_type == "qwen2"
            runs.append(make_run(f"{model_type}-{dora}", changes, model=model))
    compare(jobs, tmp_path, runs, 2, {"loss": 1e-6, "gradient": 1e-5, "parameter": 1e-4}, runs)


RESTARTED: dict[str, tuple[int, dict[str, Any], list[Case]]] = {
    "phi3": (2, FULL, [("zero1", 2, "optimizer"), ("zero3", 2, "none")]),
    "qwen2": (4, FULL, [("replicated", 1, "none")]),
    "gpt2": (2, FULL, [("zero2", 2, "none")]),
    "gptj": (4, {}, [("replicated", 1, "none")]),
}


def test_restarts_give_the_same_bits_and_the_same_model(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Parts that lie in several pieces are saved and loaded; what is consolidated is what torch reads itself."""
    runs = {}
    for model_type, (degree, changes, cases) in RESTARTED.items():
        data_parallel = 4 // degree
        values: dict[str, Any] = {
            "parallelism": {"ranks_per_node": 4, "tensor_parallel": degree},
            "training.micro_batch_size": 8 // data_parallel,
            "training.max_steps": 8,
            "training.max_grad_norm": 0.2,
            "training.learning_rate": 1e-3,
        }
        if not changes.get("training.method"):
            values["lora"] = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "fc_out", "lm_head"]}
        runs[model_type] = (make_run(f"again-{model_type}", values | changes, model=config_of(model_type)), cases)
    check(job(jobs, tmp_path, 4, runs), {name: expected_of(run) for name, (run, _) in runs.items()})
    for name, (run, _) in runs.items():
        whole = tmp_path / f"{name}.pt"
        dcp_to_torch_save(run.paths.checkpoint(SAVED), whole)
        expected = torch.load(whole)["model"]
        consolidate_checkpoint(run.paths.checkpoint(SAVED), tmp_path / name, base=run.paths.base_model)
        file = next((tmp_path / name).glob("*.safetensors"))
        found = {key.removeprefix("base_model.model."): tensor for key, tensor in load_file(file).items()}
        tied = {key for key in expected if key not in found}
        assert tied <= {"lm_head.weight"} and found.keys() <= expected.keys(), tied
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items()), name
