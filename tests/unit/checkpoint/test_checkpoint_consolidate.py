"""Consolidation: PEFT and transformers load the result, it is what was trained, and broken input publishes nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hyperpod_ft.checkpoint.adapters.lora_config import AdapterConfig
from hyperpod_ft.checkpoint.consolidate import consolidate_adapters, consolidate_model
from hyperpod_ft.checkpoint.formats.safetensors_writer import WrittenFiles
from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from hyperpod_ft.errors import UserError
from tests.unit import tiny_checkpoints
from tests.unit.tiny_checkpoints import ADAPTER, Sharding

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.base_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def trained(base: Path) -> dict[str, torch.Tensor]:
    return tiny_checkpoints.trainable(tiny_checkpoints.peft_model(base))


@pytest.fixture(scope="module")
def sharded(base: Path, trained: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks: LoRA under tensor parallelism and under FSDP, full models with and without ties."""
    root = tmp_path_factory.mktemp("sharded")
    jobs = [
        Sharding(
            root / "tensor-parallel", trained, {name: tiny_checkpoints.tensor_parallel_dim(name) for name in trained}
        ),
        Sharding(root / "fully-sharded", trained, dict.fromkeys(trained, 0)),
    ]
    for tied in (False, True):
        full = tiny_checkpoints.base_model(root / f"base-{tied}", torch.bfloat16, tied=tied)
        parameters = tiny_checkpoints.trainable(full_model(full))
        dims = {name: 1 if "o_proj" in name or "down_proj" in name else 0 for name in parameters}
        jobs.append(Sharding(root / f"full-{tied}", parameters, dims))
    tiny_checkpoints.save_sharded(root / "work", jobs)
    return root


def full_model(base: Path) -> LlamaForCausalLM:
    """The base after some training of every parameter, in fp32."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def adapter(checkpoint: Path, base: Path, target: Path, config: AdapterConfig = ADAPTER) -> WrittenFiles:
    tiny_checkpoints.describe(checkpoint, base, config)
    return consolidate_adapters(open_checkpoint(checkpoint), target, base=base)


@pytest.mark.parametrize("sharding", ["tensor-parallel", "fully-sharded"])
def test_adapter_of_a_sharded_checkpoint_loads_in_peft(
    base: Path, sharded: Path, trained: dict[str, torch.Tensor], tmp_path: Path, sharding: str
) -> None:
    done = adapter(sharded / sharding, base, tmp_path / "adapter")
    assert done.tensors == len(trained) == 28

    live = tiny_checkpoints.peft_model(base)
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(IDS).logits, live(IDS).logits, rtol=1e-5, atol=1e-5)
    live.save_pretrained(tmp_path / "by-peft")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "by-peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_adapter_config_says_what_peft_would(base: Path, trained: dict[str, torch.Tensor], tmp_path: Path) -> None:
    config = ADAPTER.model_copy(update={"lora_alpha": 2.5, "use_rslora": True})
    adapter(tiny_checkpoints.save_whole(tmp_path / "step", trained), base, tmp_path / "adapter", config)
    peft = LoraConfig.from_pretrained(str(tmp_path / "adapter"))
    expected = LoraConfig(
        r=3, lora_alpha=2.5, use_rslora=True, target_modules=list(ADAPTER.target_modules), task_type="CAUSAL_LM"
    )
    expected.base_model_name_or_path = str(base)
    expected.inference_mode = True
    assert peft.to_dict() == expected.to_dict()


@pytest.mark.parametrize("value", ["NaN", "Inf"])
def test_nan_and_inf_are_refused(base: Path, trained: dict[str, torch.Tensor], tmp_path: Path, value: str) -> None:
    name = next(name for name in trained if "lora_B" in name)
    broken = trained[name].clone()
    broken[3, 1] = float(value)
    checkpoint = tiny_checkpoints.save_whole(tmp_path / "step", trained | {name: broken})
    with pytest.raises(UserError, match=rf"lora_B\.weight holds {value}"):
        adapter(checkpoint, base, tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_adapters_that_do_not_fit_are_refused(base: Path, trained: dict[str, torch.Tensor], tmp_path: Path) -> None:
    first = next(name for name in trained if "layers.0.self_attn.q_proj.lora_A" in name)
    without = {name: tensor for name, tensor in trained.items() if name != first}
    changed = {
        "has no lora_A": without,
        r"has no model\.layers\.9\.self_attn\.q_proj\.weight": {
            name.replace("layers.1.self_attn.q_proj", "layers.9.self_attn.q_proj"): tensor
            for name, tensor in trained.items()
        },
        r"does not fit the base model at model\.layers\.0\.self_attn\.q_proj\.weight": trained
        | {first: torch.ones(3, 31)},
        r"lm_head\.default\.weight is not one of a LoRA adapter": trained
        | {"base_model.model.lm_head.default.weight": torch.ones(400, 32)},
        "is not one of a LoRA adapter": trained | {"model.norm.weight": torch.ones(32)},
        r"has no factors for model\.layers\.1\.mlp\.up_proj\.weight": {
            name: tensor for name, tensor in trained.items() if "layers.1.mlp.up_proj" not in name
        },
    }
    for number, (message, tensors) in enumerate(changed.items()):
        checkpoint = tiny_checkpoints.save_whole(tmp_path / f"step{number}", tensors)
        with pytest.raises(UserError, match=message):
            adapter(checkpoint, base, tmp_path / "adapter")
        assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_full_model_of_a_sharded_checkpoint(sharded: Path, tmp_path: Path, tied: bool) -> None:
    base, checkpoint = sharded / f"base-{tied}", sharded / f"full-{tied}"
    tiny_checkpoints.describe(checkpoint, base)
    found = open_checkpoint(checkpoint)
    consolidate_model(found, tmp_path / "final", base=base, max_shard_bytes=40_000, card="# card\n")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto").eval()
    assert loaded.dtype == torch.bfloat16
    # logits may depend on where the weights are in memory; the weights are copies
    expected = {name: value.bfloat16() for name, value in full_model(base).state_dict().items()}
    held = loaded.state_dict()
    assert held.keys() == expected.keys() and all(torch.equal(held[name], expected[name]) for name in expected)
    index = json.loads((tmp_path / "final" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    assert (tmp_path / "final" / "README.md").read_text() == "# card\n"


def test_full_model_refusals(base: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(base)
    parameters = tiny_checkpoints.trainable(model)
    some = "model.layers.1.mlp.up_proj.weight"
    changed = {
        "nothing was learned": parameters,
        f"{some} of the base model is missing": {name: value for name, value in parameters.items() if name != some},
        f"{some} has shape": parameters | {some: torch.ones(3, 3)},
        "the base model has no tensor model.extra": parameters | {"model.extra": torch.ones(1)},
        f"{some} holds Inf": parameters | {some: parameters[some] / 0},
    }
    for number, (message, tensors) in enumerate(changed.items()):
        checkpoint = tiny_checkpoints.save_whole(tmp_path / f"step{number}", tensors)
        tiny_checkpoints.describe(checkpoint, base)
        with pytest.raises(UserError, match=message):
            consolidate_model(open_checkpoint(checkpoint), tmp_path / "final", base=base)
        assert not (tmp_path / "final").exists()


def test_a_flipped_byte_is_found_by_the_checksums_that_were_saved(base: Path, sharded: Path, tmp_path: Path) -> None:
    for described in (True, False):  # by checkpoint.json, and without it by what torch.save notes of each record
        checkpoint = tmp_path / f"full-{described}"
        shutil.copytree(sharded / "full-False", checkpoint)
        (checkpoint / "checkpoint.json").unlink(missing_ok=True)
        if described:
            tiny_checkpoints.describe(checkpoint, base)
        piece = open_checkpoint(checkpoint).model[0].pieces[0]
        with piece.file.open("r+b") as file:
            file.seek(piece.offset + 2)
            byte = file.read(1)[0]
            file.seek(piece.offset + 2)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(UserError, match=rf"{piece.file.name}: is damaged"):
            consolidate_model(open_checkpoint(checkpoint), tmp_path / "final", base=sharded / "base-False")
        assert sorted(path.name for path in tmp_path.iterdir() if "final" in path.name) == []
