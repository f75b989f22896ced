"""Merge: configurations, names, values and files that are wrong are refused in one line; nothing is dropped."""

import os
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from hyperpod_ft.checkpoint.formats.checksums import CHECKSUMS
from hyperpod_ft.checkpoint.merge import merge as merge_module
from hyperpod_ft.errors import UserError
from tests.unit.checkpoint.merge.tiny_merge import PREFIX, Q_PROJ, edit_config, edit_weights, files, make, refuse, run
from tests.unit.small_volume import small_volume
from tests.unit.tiny_checkpoints import ADAPTER


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "OLoRA"),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1, 2]),
        ("use_qalora", True),
        ("what_comes_next", True),
    ],
)
def test_what_the_merge_does_not_do_is_refused(tmp_path: Path, key: str, value: object) -> None:
    make(tmp_path)
    edit_config(tmp_path, **{key: value})
    refuse(tmp_path, f"merge does not handle: {key}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, r"adapter_config\.json: r: "),
        ({"r": "8"}, r"adapter_config\.json: r: "),
        ({"lora_alpha": float("nan")}, r"adapter_config\.json: lora_alpha: "),
        ({"target_modules": r"(q_proj"}, r"adapter_config\.json: target_modules: .*q_proj"),
        ({"rank_pattern": {"(": 3}}, r"adapter_config\.json: rank_pattern\."),
        ({"target_modules": [*ADAPTER.target_modules, "c_attn"]}, "target module c_attn matches nothing"),
        ({"target_modules": "transformer.*"}, r"adapter_config\.json does not target model\.layers"),
        ({"target_modules": ["q_proj"]}, r"does not target model\.layers\.0\.mlp\.down_proj"),
        ({"target_modules": [*ADAPTER.target_modules, "lm_head"]}, r"no factors for lm_head\.weight"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: the adapter has no lm_head\.weight"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
        ({"lora_bias": True}, r"has no lora_B\.bias"),
        ({"r": 4}, "of rank 4"),
        ({"rank_pattern": {"v_proj": 5}}, r"v_proj\.weight: .* of rank 5"),
    ],
)
def test_a_configuration_that_is_not_the_adapters_is_refused(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    make(tmp_path)
    edit_config(tmp_path, **values)
    refuse(tmp_path, message)


def test_a_missing_or_damaged_configuration_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "adapter" / "adapter_config.json"
    for content in ("{", "[]", "{}", '{"peft_type": "LORA"}'):
        file.write_text(content)
        refuse(tmp_path, r"adapter_config\.json: .*save the adapter again|peft_type is None")
    file.unlink()
    refuse(tmp_path, r"adapter_config\.json: is missing")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (f"{PREFIX}{Q_PROJ}.lora_C.weight", (4,), r"has no .*q_proj\.lora_C\.weight"),
        (f"{Q_PROJ}.lora_A.weight", (3, 32), "is not a LoRA tensor"),
        (f"{PREFIX}{Q_PROJ}.lora_magnitude_vector", (32,), "use_dora is False"),
        (f"{PREFIX}{Q_PROJ}.lora_B.bias", (32,), "lora_bias is False"),
        (f"{PREFIX}lm_head.weight", (4, 4), r"does not fit the base model at lm_head\.weight"),
        (f"{PREFIX}model.layers.7.self_attn.q_proj.lora_A.weight", (3, 32), "has no lora_B"),
        (f"{PREFIX}model.embed_tokens.lora_embedding_B", (32, 3), "has no lora_A"),
        (f"{PREFIX}score.weight", (2, 32), r"has no score\.weight"),
    ],
)
def test_tensors_without_a_place_are_refused_not_dropped(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    make(tmp_path)
    edit_weights(tmp_path, **{name: torch.ones(shape)})
    refuse(tmp_path, message)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, value in factors.items():
        if f"{Q_PROJ}.lora_B" in name:
            edit_weights(tmp_path, **{name: torch.ones(33, 3)})
            refuse(tmp_path, r"does not fit the base model at .*q_proj\.weight: lora_B \[33, 3\] x lora_A \[3, 32\]")
            edit_weights(tmp_path, **{name: None})
            refuse(tmp_path, "q_proj has no lora_B")
            edit_weights(tmp_path, **{name: value})
    moved = {name.replace("layers.1", "layers.9"): value for name, value in factors.items()}
    save_file(moved, tmp_path / "adapter" / "adapter_model.safetensors")
    refuse(tmp_path, r"does not fit the base model, which has no model\.layers\.9")


def test_a_layer_without_factors_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    edit_weights(tmp_path, **{f"{PREFIX}{Q_PROJ}.lora_{side}.weight": None for side in "AB"})
    for targets in (list(ADAPTER.target_modules), ".*_proj", "all-linear"):
        edit_config(tmp_path, target_modules=targets)
        refuse(tmp_path, f"no factors for {Q_PROJ}.weight")


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    refuse(tmp_path, r"adapter_model\.bin: is a pickle.*save_pretrained")


def test_a_quantized_base_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    edit_config(tmp_path, "base/config.json", quantization_config={"quant_method": "gptq"})
    refuse(tmp_path, r"is quantized \(gptq\)")


def test_a_target_that_holds_an_input_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    before = files(tmp_path / "base")
    for target in ("base", "adapter", "../" + tmp_path.name):
        refuse(tmp_path, "would replace the input", target=target)
    assert files(tmp_path / "base") == before


def test_nothing_learned_is_refused(tmp_path: Path) -> None:
    make(tmp_path, dtype=torch.bfloat16)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for factor, message in ((0.0, "every lora_B is zero"), (1e-7, "loses every update")):
        changed = {name: value * (factor if "lora_B" in name else 1) for name, value in factors.items()}
        edit_weights(tmp_path, **changed)
        refuse(tmp_path, f"nothing was learned: .*{message}")


def test_updates_that_the_rounding_undid_are_counted(tmp_path: Path) -> None:
    make(tmp_path, dtype=torch.bfloat16)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    edit_weights(tmp_path, **{name: value * 1e-7 for name, value in factors.items() if "layers.1" in name})
    done = run(tmp_path, max_shard_bytes=20_000)
    assert (done.merged, done.lost_in_rounding) == (14, 7)


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "Inf"), (-float("inf"), "Inf")])
@pytest.mark.parametrize("side", ["A", "B"])
def test_an_adapter_with_what_is_no_number_is_refused(tmp_path: Path, side: str, value: float, kind: str) -> None:
    make(tmp_path)
    name = f"{PREFIX}{Q_PROJ}.lora_{side}.weight"
    factor = load_file(tmp_path / "adapter" / "adapter_model.safetensors")[name]
    factor[1, 2] = value
    edit_weights(tmp_path, **{name: factor})
    refuse(tmp_path, rf"{name} holds {kind}")


def test_values_that_overflow_are_refused(tmp_path: Path) -> None:
    make(tmp_path, dtype=torch.float16)
    edit_weights(tmp_path, **{f"{PREFIX}{Q_PROJ}.lora_B.weight": torch.full((32, 3), 1e6)})
    refuse(tmp_path, r"q_proj\.weight merged as F16 holds Inf")
    run(tmp_path, dtype="float32")


@pytest.mark.parametrize("name", [f"{Q_PROJ}.weight", "model.norm.weight"])
def test_a_base_with_what_is_no_number_is_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path, dtype=torch.bfloat16)
    file = tmp_path / "base" / "model.safetensors"
    held = load_file(file)
    held[name].view(-1)[5] = float("nan")
    save_file(held, file, {"format": "pt"})
    refuse(tmp_path, f"tensor {name}.* holds NaN")


def test_a_damaged_base_is_refused(tmp_path: Path) -> None:
    make(tmp_path, max_shard_size="60KB")
    shard = sorted((tmp_path / "base").glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    refuse(tmp_path, "is truncated")
    shard.unlink()
    refuse(tmp_path, "is missing")


def test_a_base_that_is_cut_off_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    plan = merge_module.make_plan

    def cut(*arguments: object) -> object:
        os.truncate(tmp_path / "base" / "model.safetensors", 100_000)
        return plan(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(merge_module, "make_plan", cut)
    refuse(tmp_path, r"model\.safetensors: is truncated")


def test_an_adapter_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    (tmp_path / "adapter" / CHECKSUMS).write_text(f"{xxhash.xxh3_128_hexdigest(content)}  {file.name}\n")
    run(tmp_path)
    run(tmp_path, "again")
    # the lowest bit of one value of a factor, a change that is easily missed
    content[-4] ^= 1
    file.write_bytes(content)
    refuse(tmp_path, "its checksum differs")


def test_a_full_volume_is_one_line(tmp_path: Path) -> None:
    make(tmp_path)
    with small_volume(tmp_path / "volume", 120_000):
        with pytest.raises(UserError, match="free space"):
            run(tmp_path, "volume/merged")
        assert not (tmp_path / "volume" / "merged").exists()
