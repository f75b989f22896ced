"""Merge: the rest is the base's bytes, nothing is dropped or published by halves, and what is wrong is one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import xxhash
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from threadpoolctl import threadpool_info
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hyperpod_ft.checkpoint.adapters.lora_config import AdapterConfig
from hyperpod_ft.checkpoint.formats.checksums import CHECKSUMS
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.merge import merge as merge_module
from hyperpod_ft.checkpoint.merge.merge import Merged, WeightedAdapter, merge
from hyperpod_ft.checkpoint.merge.merged_tensor import MergedTensor
from hyperpod_ft.errors import UserError
from tests.unit import tiny_checkpoints
from tests.unit.rounding import bounds
from tests.unit.small_volume import small_volume
from tests.unit.tiny_checkpoints import ADAPTER

IDS = torch.arange(12).reshape(2, 6)
PREFIX = "base_model.model."
Q_PROJ = "model.layers.0.self_attn.q_proj"


def make(
    tmp_path: Path, config: AdapterConfig = ADAPTER, dtype: torch.dtype = torch.float32, **base: object
) -> PeftModel:
    """`base/` and `adapter/` below tmp_path, both written by their own libraries."""
    tiny_checkpoints.base_model(tmp_path / "base", dtype, **base)  # type: ignore[arg-type]
    model = tiny_checkpoints.peft_model(tmp_path / "base", config)
    model.save_pretrained(tmp_path / "adapter")
    return model


def run(tmp_path: Path, target: str = "merged", **options: object) -> Merged:
    return merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter")], tmp_path / target, **options)  # type: ignore[arg-type]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def stored_bytes(directory: Path) -> dict[str, bytes]:
    found = {}
    for tensor in read_model(directory):
        (piece,) = tensor.pieces
        found[tensor.name] = piece.file.read_bytes()[piece.offset : piece.offset + tensor.nbytes]
    return found


def edit_config(tmp_path: Path, part: str = "adapter/adapter_config.json", **values: object) -> None:
    file = tmp_path / part
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def edit_weights(tmp_path: Path, **values: torch.Tensor | None) -> None:
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    kept = {name: value for name, value in (load_file(file) | values).items() if value is not None}
    save_file(kept, file)


def refuse(tmp_path: Path, message: str, **options: object) -> None:
    """The merge ends in one line, and leaves nothing."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=message) as refused:
        run(tmp_path, **options)
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# What is written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{}, {"lora_alpha": 6.0}, {"use_rslora": True}], ids=str)
def test_equal_to_peft_within_rounding(tmp_path: Path, dtype: torch.dtype, changes: dict[str, object]) -> None:
    config = ADAPTER.model_copy(update=changes)
    make(tmp_path, config, dtype)
    done = run(tmp_path)
    assert (done.tensors, done.merged, done.lost_in_rounding, done.adapters, done.shards) == (21, 14, 0, 1, 1)
    peft = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype), tmp_path / "adapter"
    )
    computed = bounds(peft, dtype)
    expected = peft.merge_and_unload().state_dict()
    merged = weights(tmp_path / "merged")
    assert merged.keys() == expected.keys() and len(computed) == done.merged
    for name in merged:
        if name in computed:
            assert computed[name].same(merged[name], expected[name]), name
        else:
            assert merged[name].dtype == dtype and torch.equal(merged[name], expected[name]), name


def test_merged_logits_are_the_adapters(tmp_path: Path) -> None:
    live = make(tmp_path)
    run(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.inference_mode():
        torch.testing.assert_close(merged(IDS).logits, live(IDS).logits, rtol=1e-5, atol=1e-5)
        assert (merged(IDS).logits - base(IDS).logits).abs().max() > 1e-2


@pytest.mark.parametrize("tied", [False, True])
def test_the_rest_is_the_bases_bytes_in_shards_that_transformers_loads(tmp_path: Path, tied: bool) -> None:
    config = ADAPTER.model_copy(update={"target_modules": ("q_proj", "v_proj")})
    make(tmp_path, config, torch.bfloat16, tied=tied, max_shard_size="30KB")
    done = run(tmp_path, max_shard_bytes=50_000)
    shards = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(shards) == done.shards > 1
    assert shards[0].name == f"model-00001-of-{done.shards:05d}.safetensors"
    assert max(file.stat().st_size for file in shards) <= 50_000

    base, merged = stored_bytes(tmp_path / "base"), stored_bytes(tmp_path / "merged")
    assert base.keys() == merged.keys()
    assert {name for name in base if base[name] != merged[name]} == {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ("q_proj", "v_proj")
    }
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(len, merged.values())) == done.nbytes
    with safe_open(shards[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and loaded.dtype == torch.bfloat16


def test_shards_do_not_change_the_values(tmp_path: Path) -> None:
    make(tmp_path, dtype=torch.bfloat16, max_shard_size="30KB")
    run(tmp_path, "one")
    run(tmp_path, "many", max_shard_bytes=20_000)
    assert stored_bytes(tmp_path / "one") == stored_bytes(tmp_path / "many")


def test_the_other_files_come_along(tmp_path: Path) -> None:
    make(tmp_path)
    before = os.umask(0o027)
    try:
        run(tmp_path, card="# card\n")
    finally:
        os.umask(before)
    merged = tmp_path / "merged"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE.txt"):
        assert (merged / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    assert (merged / "README.md").read_text() == "# card\n"
    assert AutoTokenizer.from_pretrained(merged).chat_template
    assert {file.stat().st_mode & 0o777 for file in merged.iterdir()} == {0o640}


def test_the_chat_template_of_the_adapters_replaces_the_bases(tmp_path: Path) -> None:
    make(tmp_path)
    base, one = tmp_path / "base", tmp_path / "adapter"
    (one / "chat_template.jinja").write_text("{{- 'taught' -}}")
    merge(base, [WeightedAdapter(one)], tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == "{{- 'taught' -}}"
    other = tmp_path / "other"
    shutil.copytree(one, other)
    (other / "chat_template.jinja").write_text("{{- 'taught otherwise' -}}")
    merge(base, [WeightedAdapter(one, 0.5), WeightedAdapter(other, 0.5)], tmp_path / "both")
    own = AutoTokenizer.from_pretrained(base).chat_template
    assert AutoTokenizer.from_pretrained(tmp_path / "both").chat_template == own


def test_without_a_card_one_tells_what_was_merged(tmp_path: Path) -> None:
    make(tmp_path)
    merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter", 0.25)], tmp_path / "merged")
    card = ModelCard((tmp_path / "merged" / "README.md").read_text())
    assert card.data.base_model == "base" and card.data.library_name == "transformers"
    assert "| LoRA adapter | adapter, weight 0.25 |" in card.text


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_another_dtype_is_in_the_weights_and_in_the_config(
    tmp_path: Path, dtype: str, torch_dtype: torch.dtype, stored: torch.dtype
) -> None:
    make(tmp_path, dtype=stored)
    run(tmp_path, dtype=dtype)
    exact = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    peft = PeftModel.from_pretrained(exact, tmp_path / "adapter")
    computed = bounds(peft, torch_dtype)
    expected = {name: value.to(torch_dtype) for name, value in peft.merge_and_unload().state_dict().items()}
    merged = weights(tmp_path / "merged")
    assert all(bound.same(merged[name], expected[name]) for name, bound in computed.items())
    assert all(torch.equal(merged[name], expected[name]) for name in expected.keys() - computed.keys())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch_dtype


def test_neither_torch_nor_transformers_is_needed(tmp_path: Path) -> None:
    make(tmp_path)
    script = f"""
import sys
from pathlib import Path
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["peft"] = None
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
root = Path({str(tmp_path)!r})
merge(root / "base", [WeightedAdapter(root / "adapter")], root / "merged")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    run(tmp_path, "here")
    assert stored_bytes(tmp_path / "merged") == stored_bytes(tmp_path / "here")


def test_blas_does_not_add_threads_to_the_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    seen = set()
    fill = MergedTensor.fill

    def watched(*arguments: object) -> None:
        seen.update(info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas")
        fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MergedTensor, "fill", watched)
    run(tmp_path)
    assert seen == {1}


# What is refused: configuration and names


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "OLoRA"),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.gate_up_proj"]),
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


# What is refused: values and files


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
    # a low bit of a factor: a value that nobody would notice
    content[-4] ^= 1
    file.write_bytes(content)
    refuse(tmp_path, "its checksum differs")


def test_a_full_volume_is_one_line(tmp_path: Path) -> None:
    make(tmp_path)
    with small_volume(tmp_path / "volume", 120_000):
        with pytest.raises(UserError, match="free space"):
            run(tmp_path, "volume/merged")
        assert not (tmp_path / "volume" / "merged").exists()


# Kills

SLOW_MERGE = """
import sys, time
from pathlib import Path
from hyperpod_ft.checkpoint.tensors import direct
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge

root, shards = Path(sys.argv[1]), int(sys.argv[2])
write = direct.DirectWriter.write
def slow(*arguments):
    time.sleep(0.02)
    while len(list((root / ".merged.partial").glob("model-*"))) > shards:
        time.sleep(1)  # until it is killed
    write(*arguments)
direct.DirectWriter.write = slow
merge(root / "base", [WeightedAdapter(root / "adapter")], root / "merged", max_shard_bytes=20_000)
"""


def kill_when(tmp_path: Path, shards: int) -> None:
    """Kill a merge that has begun this many shards, or one more."""
    process = subprocess.Popen([sys.executable, "-c", SLOW_MERGE, str(tmp_path), str(shards)])
    deadline = time.monotonic() + 60
    while len(list((tmp_path / ".merged.partial").glob("model-*"))) < shards:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_after_kills_it_goes_on_and_gives_the_same_files(tmp_path: Path) -> None:
    make(tmp_path)
    run(tmp_path, "whole", max_shard_bytes=20_000)
    partial = tmp_path / ".merged.partial"
    shards = len(list((tmp_path / "whole").glob("*.safetensors")))
    seen: dict[str, tuple[int, int]] = {}
    for least in (1, shards // 3, 2 * shards // 3):
        kill_when(tmp_path, least)
        assert not (tmp_path / "merged").exists()
        kept = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in partial.glob("model-*")}
        journal = json.loads((partial / ".finished.json").read_text())["finished"]
        assert {name: kept[name] for name in seen} == seen, "finished shards are not written again"
        seen = {name: kept[name] for name in journal}
    run(tmp_path, max_shard_bytes=20_000)
    after = {name: (tmp_path / "merged" / name).stat() for name in seen}
    assert {name: (state.st_ino, state.st_mtime_ns) for name, state in after.items()} == seen
    assert files(tmp_path / "merged") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged", "whole"]


@pytest.mark.parametrize("what", ["adapter", "configuration", "base", "dtype", "weight"])
def test_what_a_kill_left_is_not_used_for_another_merge(tmp_path: Path, what: str) -> None:
    make(tmp_path)
    kill_when(tmp_path, 3)
    options: dict[str, object] = {"max_shard_bytes": 20_000}
    if what == "adapter":
        factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        edit_weights(tmp_path, **{name: -value for name, value in factors.items() if "lora_B" in name})
    elif what == "configuration":
        edit_config(tmp_path, lora_alpha=40)
    elif what == "base":
        tiny_checkpoints.base_model(tmp_path / "base", seed=5)
    elif what == "dtype":
        options["dtype"] = "bfloat16"
    weight = 2.0 if what == "weight" else 1.0
    for target in ("merged", "fresh"):
        merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter", weight)], tmp_path / target, **options)  # type: ignore[arg-type]
    assert files(tmp_path / "merged") == files(tmp_path / "fresh")
