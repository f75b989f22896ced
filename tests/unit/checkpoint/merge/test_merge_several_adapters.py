"""Several adapters, or one with a weight, merged to the values that PEFT 0.17 gives."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from hyperpod_ft.checkpoint.merge.merge import Merged, WeightedAdapter, merge
from hyperpod_ft.errors import UserError
from tests.unit.checkpoint.merge.peft_models import (
    DTYPES,
    OUTPUT,
    base_in,
    llama,
    lora,
    same,
    save_base,
    trained,
    weights,
)
from tests.unit.rounding import bounds


def two_adapters(root: Path, dtype: torch.dtype, first: LoraConfig, second: LoraConfig) -> None:
    save_base(root / "base", llama, dtype)
    for seed, (name, config) in enumerate({"first": first, "second": second}.items()):
        trained(base_in(root / "base", dtype), config, seed).save_pretrained(root / name)


def merge_two(root: Path, left: float, right: float) -> Merged:
    adapters = [WeightedAdapter(root / "first", left), WeightedAdapter(root / "second", right)]
    return merge(root / "base", adapters, root / "merged")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_several_adapters_are_pefts_concatenation(tmp_path: Path, dtype: torch.dtype) -> None:
    second = lora(r=8, lora_alpha=3, target_modules=["v_proj", "up_proj", "embed_tokens"], use_rslora=True)
    two_adapters(tmp_path, dtype, lora(target_modules=["q_proj", "v_proj", "embed_tokens"]), second)
    done = merge_two(tmp_path, 0.7, -0.4)
    assert (done.adapters, done.merged) == (2, 7)
    # of a base in 16 bits PEFT would round the factors that it concatenates
    model = PeftModel.from_pretrained(base_in(tmp_path / "base"), tmp_path / "first", adapter_name="first")
    model.load_adapter(tmp_path / "second", "second")
    model.add_weighted_adapter(["first", "second"], [0.7, -0.4], "both", combination_type="cat")
    model.set_adapter("both")
    # PEFT puts weight and scale into lora_A, which is two roundings more
    computed = bounds(model, dtype, "both", 2)
    expected = model.merge_and_unload().state_dict()
    for name, value in weights(tmp_path / "merged").items():
        assert same(value, expected[name].to(dtype), computed.get(name)), name


def test_an_adapter_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    save_base(tmp_path / "base", llama, torch.float32)
    trained(base_in(tmp_path / "base"), lora()).save_pretrained(tmp_path / "adapter")
    (tmp_path / "link").symlink_to("adapter")
    adapters = [WeightedAdapter(tmp_path / "adapter"), WeightedAdapter(tmp_path / "link")]
    with pytest.raises(UserError, match="link: is given twice; give it once, with --weight 2"):
        merge(tmp_path / "base", adapters, tmp_path / "merged")


def test_one_adapter_with_a_weight_is_its_update_times_it(tmp_path: Path) -> None:
    save_base(tmp_path / "base", llama, torch.float32)
    trained(base_in(tmp_path / "base"), lora(lora_alpha=8)).save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter", -0.5)], tmp_path / "merged")
    # alpha 8 and weight -0.5 are alpha -4
    loaded = PeftModel.from_pretrained(
        base_in(tmp_path / "base"), tmp_path / "adapter", config=lora(lora_alpha=-4, inference_mode=True)
    )
    computed = bounds(loaded, torch.float32)
    expected = loaded.merge_and_unload().state_dict()
    merged = weights(tmp_path / "merged")
    assert all(same(value, expected[name], computed.get(name)) for name, value in merged.items())


def test_adapters_of_different_weights_may_replace_whole_tensors(tmp_path: Path) -> None:
    two_adapters(tmp_path, torch.float32, lora(modules_to_save=["lm_head"]), lora(target_modules=["up_proj"]))
    merge_two(tmp_path, 1, 0.5)
    trained_whole = load_file(tmp_path / "first" / "adapter_model.safetensors")[f"base_model.model.{OUTPUT}"]
    assert torch.equal(weights(tmp_path / "merged")[OUTPUT], trained_whole)


@pytest.mark.parametrize(
    ("first", "second", "factors", "message"),
    [
        (lora(modules_to_save=["lm_head"]), lora(modules_to_save=["lm_head"]), (1, 1), r"both change lm_head\.weight"),
        (lora(modules_to_save=["lm_head"]), lora(target_modules=["lm_head"]), (1, 1), r"both change lm_head\.weight"),
        (lora(use_dora=True), lora(), (1, 1), r"both change .*q_proj\.weight"),
        (lora(modules_to_save=["lm_head"]), lora(), (0.5, 1), r"weight 0\.5: lm_head\.weight is replaced"),
        (lora(use_dora=True), lora(target_modules=["up_proj"]), (2, 1), r"weight 2: .*q_proj\.weight is replaced"),
        (lora(), lora(), (1, 0), "second: weight 0"),
        (lora(), lora(), (1, float("nan")), "second: weight nan"),
    ],
)
def test_combinations_without_a_sense_are_refused(
    tmp_path: Path, first: LoraConfig, second: LoraConfig, factors: tuple[float, float], message: str
) -> None:
    two_adapters(tmp_path, torch.float32, first, second)
    with pytest.raises(UserError, match=message) as refused:
        merge_two(tmp_path, *factors)
    assert not re.search("\n", str(refused.value))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "first", "second"]
