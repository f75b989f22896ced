"""What PEFT trains, merged to the values that PEFT 0.17 gives; transformers loads it, and it answers as the adapter."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)

from hyperpod_ft.checkpoint.merge.merge import Merged, WeightedAdapter, merge
from hyperpod_ft.errors import UserError
from tests.unit.checkpoint.merge.peft_models import (
    DTYPES,
    EMBEDDING,
    LINEARS,
    OUTPUT,
    base_in,
    gpt2,
    llama,
    llama_with_biases,
    lora,
    qwen,
    same,
    save_base,
    tied_llama,
    trained,
    weights,
)
from tests.unit.rounding import Bound, bounds

IDS = torch.arange(12).reshape(2, 6)


def largest_logit_difference(left: torch.nn.Module, right: torch.nn.Module) -> float:
    with torch.inference_mode():
        return float((left(IDS).logits.float() - right(IDS).logits.float()).abs().max())


@dataclass
class Result:
    done: Merged
    merged: dict[str, torch.Tensor]
    peft: dict[str, torch.Tensor]  # of merge_and_unload
    model: PreTrainedModel  # what transformers loads
    bounds: dict[str, Bound]  # of what LoRA changes

    @property
    def differing(self) -> set[str]:
        """Tensors that are not PEFT's within rounding, or not bit for bit where nothing is computed.

        Its tied output layer is not a tensor of its own.
        """
        assert self.merged.keys() <= self.peft.keys()
        missing = self.peft.keys() - self.merged.keys()
        assert not missing or (self.model.config.tie_word_embeddings and missing == {OUTPUT})
        return {name for name, value in self.merged.items() if not same(value, self.peft[name], self.bounds.get(name))}


def run(
    root: Path,
    make: Callable[[], PreTrainedModel],
    config: LoraConfig,
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int | None = None,
) -> Result:
    """Train, save, merge and load: once with PEFT and once with the kit."""
    save_base(root / "base", make, dtype)
    live = trained(base_in(root / "base", dtype, tokens=tokens), config)
    live.save_pretrained(root / "adapter")
    done = merge(root / "base", [WeightedAdapter(root / "adapter")], root / "merged")
    model, report = AutoModelForCausalLM.from_pretrained(root / "merged", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.dtype == dtype
    # PEFT computes with factors in fp32, what was merged has the dtype's precision
    assert largest_logit_difference(model.eval(), live) < {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}[DTYPES[dtype]]
    loaded = PeftModel.from_pretrained(base_in(root / "base", dtype, tokens=tokens), root / "adapter")
    computed = bounds(loaded, dtype)
    return Result(done, weights(root / "merged"), loaded.merge_and_unload().state_dict(), model, computed)


ALIKE = {
    "every linear": (llama, lora(target_modules=LINEARS)),
    "rslora": (llama, lora(r=3, use_rslora=True)),
    "rank 1": (llama, lora(r=1)),
    "patterns": (
        llama,
        lora(
            target_modules=LINEARS,
            use_rslora=True,
            rank_pattern={"q_proj": 7, r"layers\.1\..*v_proj": 2, "up": 9},
            alpha_pattern={"gate_proj": 3, "model.layers.0.mlp.up_proj": 1},
        ),
    ),
    "a regular expression": (llama, lora(target_modules=r".*\.layers\.1\..*(q|up)_proj")),
    "all linear": (llama, lora(target_modules="all-linear")),
    "some layers": (llama, lora(layers_to_transform=[1], layers_pattern="layers")),
    "one layer": (llama, lora(layers_to_transform=0)),
    "exclusions": (llama, lora(target_modules=LINEARS, exclude_modules=["layers.0.self_attn.q_proj", "v_proj"])),
    "exclusion by expression": (llama, lora(target_modules=LINEARS, exclude_modules=r".*(mlp|o_proj).*")),
    "DoRA": (llama, lora(target_modules=LINEARS, use_dora=True)),
    "embedding": (llama, lora(target_modules=["q_proj", "embed_tokens"])),
    "embedding and output": (llama, lora(target_modules=["embed_tokens", "lm_head"])),
    "DoRA of both": (llama, lora(target_modules=["embed_tokens", "lm_head"], use_dora=True)),
    "saved output": (llama, lora(modules_to_save=["lm_head"])),
    "saved embedding and output": (llama, lora(modules_to_save=["embed_tokens", "lm_head"])),
    "saved norms": (llama, lora(modules_to_save=["norm"])),
    "saved modules of several tensors": (gpt2, lora(target_modules=["c_attn"], modules_to_save=["mlp"])),
    "every bias": (qwen, lora(bias="all")),
    "no bias to train": (llama, lora(bias="lora_only")),
    "bias of the update": (llama_with_biases, lora(lora_bias=True)),
    "Conv1D": (gpt2, lora(target_modules=["c_attn", "c_proj", "c_fc"])),
    "Conv1D by DoRA": (gpt2, lora(target_modules=["c_attn", "c_proj"], use_dora=True)),
    "Conv1D and biases": (gpt2, lora(target_modules=["c_proj"], bias="all", lora_bias=True)),
}


# What computes otherwise, in every dtype; other choices of the same computation, in one each.
COMPUTED = ("every linear", "DoRA", "embedding", "DoRA of both", "bias of the update", "Conv1D", "Conv1D by DoRA")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(COMPUTED, DTYPES), *zip([name for name in ALIKE if name not in COMPUTED], cycle(DTYPES), strict=False)],
    ids=lambda value: DTYPES.get(value, value),
)
def test_values_are_pefts(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    result = run(tmp_path, *ALIKE[name], dtype)
    assert result.differing == set()
    assert result.done.lost_in_rounding == 0 and result.done.merged > 0


@pytest.mark.parametrize(
    ("make", "options", "kept", "dtype"),
    [
        (tied_llama, {"target_modules": ["q_proj", "embed_tokens"]}, OUTPUT, torch.float32),
        (tied_llama, {"target_modules": ["q_proj", "lm_head"]}, EMBEDDING, torch.bfloat16),
        (tied_llama, {"target_modules": ["embed_tokens"], "use_dora": True}, OUTPUT, torch.float16),
        (gpt2, {"target_modules": ["wte", "wpe"]}, OUTPUT, torch.bfloat16),
        (gpt2, {"target_modules": ["attn.c_proj", "lm_head"]}, "transformer.wte.weight", torch.float16),
    ],
)
def test_tied_weights_are_untied_where_one_is_updated(
    tmp_path: Path, make: Callable[[], PreTrainedModel], options: dict[str, object], kept: str, dtype: torch.dtype
) -> None:
    """In the live model the other use of the parameter is not updated; PEFT's merge updates both, and warns of it."""
    result = run(tmp_path, make, lora(**options), dtype)
    assert result.differing == {kept}
    base = weights(tmp_path / "base")
    assert torch.equal(result.merged[kept], next(value for value in base.values() if value.shape == (400, 32)))
    assert result.model.config.tie_word_embeddings is False


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_tied_weights_are_untied_where_one_is_saved_whole(tmp_path: Path, saved: list[str]) -> None:
    result = run(tmp_path, tied_llama, lora(modules_to_save=saved))
    assert result.differing == set()
    assert result.model.config.tie_word_embeddings is False


def test_tied_weights_stay_tied_where_neither_changes(tmp_path: Path) -> None:
    result = run(tmp_path, tied_llama, lora())
    assert result.differing == set() and OUTPUT not in result.merged
    assert result.model.config.tie_word_embeddings is True


@pytest.mark.parametrize(
    ("make", "config", "tied"),
    [
        (llama, lora(modules_to_save=["embed_tokens", "lm_head"]), False),
        (tied_llama, lora(modules_to_save=["embed_tokens", "lm_head"]), False),
        (llama, lora(), False),
        # PEFT saves both uses of the one parameter, with the same values
        (tied_llama, lora(), True),
    ],
)
def test_a_resized_vocabulary(
    tmp_path: Path, make: Callable[[], PreTrainedModel], config: LoraConfig, tied: bool
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "added_tokens.json").write_text("{}")
    result = run(tmp_path, make, config, tokens=410)
    assert result.differing == set()
    assert (result.model.config.vocab_size, result.model.config.tie_word_embeddings) == (410, tied)
    assert (tmp_path / "merged" / "added_tokens.json").exists(), "the tokenizer that was trained with"


def test_half_a_resized_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="would have 400 and 410 tokens"):
        run(tmp_path, llama, lora(target_modules=["q_proj", "embed_tokens"]), tokens=410)


def test_a_base_without_its_head_is_written_with_the_live_models_names(tmp_path: Path) -> None:
    save_base(tmp_path / "base", gpt2, torch.float32)
    file = tmp_path / "base" / "model.safetensors"
    short = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(short, file, {"format": "pt"})
    live = trained(base_in(tmp_path / "base"), lora(target_modules=["c_attn", "wte"]))
    live.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter")], tmp_path / "merged")
    merged = weights(tmp_path / "merged")
    assert merged.keys() == {f"transformer.{name}" for name in short} | {OUTPUT}
    assert largest_logit_difference(base_in(tmp_path / "merged").eval(), live) < 1e-5


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_of_any_dtype(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    """PEFT loads them as fp32, whatever the base is (`autocast_adapter_dtype`)."""
    save_base(tmp_path / "base", llama, dtype)
    trained(base_in(tmp_path / "base", dtype), lora()).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: value.to(stored) for name, value in load_file(file).items()}, file)
    merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter")], tmp_path / "merged")
    loaded = PeftModel.from_pretrained(base_in(tmp_path / "base", dtype), tmp_path / "adapter")
    computed = bounds(loaded, dtype)
    expected = loaded.merge_and_unload().state_dict()
    merged = weights(tmp_path / "merged")
    assert all(same(merged[name], expected[name], computed.get(name)) for name in expected)


def test_an_fp64_base_is_right_within_rounding(tmp_path: Path) -> None:
    save_base(tmp_path / "base", llama, torch.float64)
    trained(base_in(tmp_path / "base", torch.float64), lora()).save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter")], tmp_path / "merged")
    loaded = PeftModel.from_pretrained(base_in(tmp_path / "base", torch.float64), tmp_path / "adapter")
    torch.testing.assert_close(
        weights(tmp_path / "merged"), dict(loaded.merge_and_unload().state_dict()), rtol=1e-14, atol=1e-16
    )
