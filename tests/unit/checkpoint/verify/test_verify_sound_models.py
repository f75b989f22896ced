"""verify --base: what PEFT and transformers write themselves raises no alarm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from hyperpod_ft.checkpoint.verify.verify import Verification, verify
from tests.unit.checkpoint.merge.peft_models import LINEARS, gpt2, llama, qwen, tied_llama, trained
from tests.unit.checkpoint.verify.mixtures import EXPERTS, mixture
from tests.unit.tiny_families import as_published

Make = Callable[[], PreTrainedModel]
BF16, F32 = torch.bfloat16, torch.float32


def save_base(directory: Path, make: Make, dtype: torch.dtype = F32) -> Path:
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(directory)
    return directory


def loaded(directory: Path, dtype: torch.dtype | str = "auto", tokens: int | None = None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    if tokens:
        model.resize_token_embeddings(tokens, mean_resizing=False)
    return model


def checked(tmp_path: Path, **options: Any) -> Verification:
    found = verify(tmp_path / "tuned", base=tmp_path / "base", **options)
    assert found.findings == () and found.base
    return found


@pytest.mark.parametrize(
    ("make", "dtype", "shard"),
    [
        (llama, F32, "5GB"),
        (llama, BF16, "50KB"),
        (tied_llama, BF16, "5GB"),
        (gpt2, F32, "50KB"),
        (lambda: mixture("qwen3_moe"), BF16, "50KB"),
    ],
)
def test_full_tuning(tmp_path: Path, make: Make, dtype: torch.dtype, shard: str) -> None:
    base = save_base(tmp_path / "base", make, dtype)
    model = loaded(base)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path / "tuned", max_shard_size=shard)
    found = checked(tmp_path)
    assert found.notes == () and found.base and found.base.changed == found.base.compared == found.tensors


def test_full_tuning_in_another_dtype_of_published_names_and_frozen_parts(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", gpt2)
    model = loaded(base)
    for name, parameter in model.named_parameters():
        if "wte" not in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.to(BF16).save_pretrained(tmp_path / "tuned")
    as_published(base)
    notes = "\n".join(checked(tmp_path).notes)
    assert "28 of 28 tensors are BF16, F32 in the base" in notes
    assert "is now transformer." in notes and "wte.weight (1 of 1)" in notes


ADAPTERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "list": (llama, {"target_modules": ["q_proj", "v_proj"]}),
    "regex": (llama, {"target_modules": r".*\.layers\.1\..*(q_proj|up_proj)"}),
    "all-linear": (llama, {"target_modules": "all-linear"}),
    "some layers": (llama, {"target_modules": LINEARS, "layers_to_transform": [1]}),
    "rslora and patterns": (qwen, {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "dora": (llama, {"use_dora": True}),
    "modules to save": (llama, {"modules_to_save": ["lm_head", "norm"]}),
    "embedding": (llama, {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied": (tied_llama, {"target_modules": LINEARS}),
    "tied, and the head saved": (tied_llama, {"modules_to_save": ["lm_head"]}),
    "biases": (qwen, {"bias": "lora_only"}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj"]}),
    "experts": (lambda: mixture("qwen3_moe"), {"target_parameters": EXPERTS}),
    "experts of mixtral": (lambda: mixture("mixtral"), {"target_parameters": EXPERTS}),
    "experts and attention": (
        lambda: mixture("gpt_oss"),
        {"target_parameters": EXPERTS, "target_modules": ["q_proj"], "use_rslora": True},
    ),
    "one parameter of the experts": (lambda: mixture("qwen3_moe"), {"target_parameters": EXPERTS[1:]}),
}


@pytest.mark.parametrize(
    ("what", "dtype"), [*((what, BF16) for what in ADAPTERS), *((what, F32) for what in ("list", "dora", "experts"))]
)
def test_adapters_and_their_merges(tmp_path: Path, what: str, dtype: torch.dtype) -> None:
    make, options = ADAPTERS[what]
    base = save_base(tmp_path / "base", make, dtype)
    attention = {} if "target_parameters" in options else {"target_modules": ["q_proj", "v_proj"]}
    config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **(attention | options))
    trained(loaded(base), config).save_pretrained(tmp_path / "adapter")
    alone = verify(tmp_path / "adapter", base=base)
    assert alone.findings == () and alone.notes == ()
    PeftModel.from_pretrained(loaded(base), tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "tuned")
    found = checked(tmp_path, adapter=tmp_path / "adapter")
    assert found.base and found.base.merged and not any("rounding" in note for note in found.notes)
    # the base is not, whatever the adapter
    unmerged = verify(base, base=base, adapter=tmp_path / "adapter")
    assert any("that the adapter changes equal the base" in line for line in unmerged.findings)


def test_a_merge_saved_in_another_dtype_or_form(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", lambda: mixture("qwen3_moe"), BF16)
    config = LoraConfig(r=4, lora_alpha=6, target_parameters=EXPERTS, target_modules=["q_proj"])
    merged = trained(loaded(base, F32), config)
    merged.save_pretrained(tmp_path / "adapter")
    merged = merged.merge_and_unload()
    merged.save_pretrained(tmp_path / "tuned", save_original_format=False)
    found = checked(tmp_path, adapter=tmp_path / "adapter")
    assert found.notes == (
        f"{tmp_path / 'tuned'}: experts are stored in another form: joined, one by one in the base",
        f"{tmp_path / 'tuned'}: 45 of 45 tensors are F32, BF16 in the base",
    )
    assert found.base and found.base.merged == 26
    # and the other way round
    back = verify(base, base=tmp_path / "tuned")
    assert back.findings == () and any("one by one, joined in the base" in note for note in back.notes)


@pytest.mark.parametrize("make", [llama, tied_llama])
def test_new_tokens(tmp_path: Path, make: Make) -> None:
    base = save_base(tmp_path / "base", make)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = trained(loaded(base, tokens=403), config)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "tuned")
    found = checked(tmp_path, adapter=tmp_path / "adapter")
    assert "embed_tokens.weight has 403 rows for tokens, 400 in the base" in "\n".join(found.notes)
    assert verify(tmp_path / "adapter", base=base).findings == ()
