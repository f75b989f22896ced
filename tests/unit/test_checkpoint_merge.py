"""Merge: the arithmetic is PEFT's, the rest is the base's bytes, nothing is dropped or published by halves."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hyperpod_ft.checkpoint.lora import AdapterConfig
from hyperpod_ft.checkpoint.merge import merge
from hyperpod_ft.checkpoint.safetensors_file import read_model
from hyperpod_ft.errors import UserError
from tests.unit import tiny_checkpoints
from tests.unit.tiny_checkpoints import ADAPTER

IDS = torch.arange(12).reshape(2, 6)


def make(
    tmp_path: Path, config: AdapterConfig = ADAPTER, dtype: torch.dtype = torch.float32, **base: object
) -> PeftModel:
    """`base/` and `adapter/` below tmp_path, both written by their own libraries."""
    tiny_checkpoints.base_model(tmp_path / "base", dtype, **base)  # type: ignore[arg-type]
    model = tiny_checkpoints.peft_model(tmp_path / "base", config)
    model.save_pretrained(tmp_path / "adapter")
    return model


def run(tmp_path: Path, **options: object):  # type: ignore[no-untyped-def]
    return merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", card="# card\n", **options)  # type: ignore[arg-type]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}


def stored_bytes(directory: Path) -> dict[str, bytes]:
    found = {}
    for tensor in read_model(directory):
        (piece,) = tensor.pieces
        found[tensor.name] = piece.file.read_bytes()[piece.offset : piece.offset + tensor.nbytes]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [ADAPTER, replace(ADAPTER, alpha=6), replace(ADAPTER, rslora=True)], ids=str)
def test_bit_equal_to_peft(tmp_path: Path, dtype: torch.dtype, config: AdapterConfig) -> None:
    make(tmp_path, config, dtype)
    done = run(tmp_path)
    assert (done.merged, done.unchanged, done.shards) == (14, 0, 1)
    peft = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype), tmp_path / "adapter"
    )
    expected = peft.merge_and_unload().state_dict()
    merged = weights(tmp_path / "merged")
    assert merged.keys() == expected.keys()
    for name in merged:
        assert merged[name].dtype == dtype
        assert torch.equal(merged[name], expected[name]), name


@pytest.mark.parametrize("shape", [(1024, 512), (7, 1030), (4096, 129)])
def test_blocks_of_rows_are_bit_equal_to_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr("hyperpod_ft.checkpoint.merge.BLOCK_BYTES", 100_000)
    torch.manual_seed(0)
    base = {"model.q_proj.weight": torch.randn(shape).bfloat16()}
    a, b = torch.randn(16, shape[1]), torch.randn(shape[0], 16)
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    prefix = "base_model.model.model.q_proj.lora_"
    save_file({f"{prefix}A.weight": a, f"{prefix}B.weight": b}, tmp_path / "adapter" / "adapter_model.safetensors")
    config = AdapterConfig(16, 24, False, ("q_proj",)).as_peft("base", None, 0.0)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    run(tmp_path)
    expected = base["model.q_proj.weight"].clone()
    expected += (b @ a) * (24 / 16)
    assert torch.equal(weights(tmp_path / "merged")["model.q_proj.weight"], expected)


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
    config = replace(ADAPTER, target_modules=("q_proj", "v_proj"))
    make(tmp_path, config, torch.bfloat16, tied=tied, max_shard_size="30KB")
    done = run(tmp_path, max_shard_bytes=50_000)
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(files) == done.shards > 1
    assert files[0].name == f"model-00001-of-{done.shards:05d}.safetensors"
    assert max(file.stat().st_size for file in files) <= 50_000

    base, merged = stored_bytes(tmp_path / "base"), stored_bytes(tmp_path / "merged")
    assert base.keys() == merged.keys()
    assert {name for name in base if base[name] != merged[name]} == {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in config.target_modules
    }
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(len, merged.values())) == done.nbytes
    with safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and loaded.dtype == torch.bfloat16


def test_the_other_files_come_along(tmp_path: Path) -> None:
    make(tmp_path)
    run(tmp_path)
    merged = tmp_path / "merged"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE.txt"):
        assert (merged / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    assert (merged / "README.md").read_text() == "# card\n"
    assert AutoTokenizer.from_pretrained(merged).chat_template
    assert {file.stat().st_mode & 0o777 for file in merged.iterdir()} == {0o644}


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_another_dtype_is_in_the_weights_and_in_the_config(
    tmp_path: Path, dtype: str, torch_dtype: torch.dtype
) -> None:
    make(tmp_path, dtype=torch.float16)
    run(tmp_path, dtype=dtype)
    assert {tensor.dtype for tensor in weights(tmp_path / "merged").values()} == {torch_dtype}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch_dtype


def _edit_config(tmp_path: Path, **values: object) -> None:
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _edit_weights(tmp_path: Path, **values: torch.Tensor | None) -> None:
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    kept = {name: value for name, value in (load_file(file) | values).items() if value is not None}
    save_file(kept, file)


def test_what_the_merge_does_not_do_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "adapter" / "adapter_config.json"
    original = file.read_text()
    for key, value in {
        "use_dora": True,
        "modules_to_save": ["lm_head"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 2},
        "fan_in_fan_out": True,
        "bias": "all",
        "lora_bias": True,
        "init_lora_weights": "pissa_niter_4",
    }.items():
        _edit_config(tmp_path, **{key: value})
        with pytest.raises(UserError, match=f"does not handle: {key}"):
            run(tmp_path)
        file.write_text(original)
    _edit_config(tmp_path, peft_type="IA3")
    with pytest.raises(UserError, match="only LORA"):
        run(tmp_path)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
    ],
)
def test_tensors_it_does_not_know_are_refused_not_dropped(tmp_path: Path, name: str) -> None:
    make(tmp_path)
    _edit_weights(tmp_path, **{name: torch.ones(4)})
    with pytest.raises(UserError, match="is no LoRA factor of a linear module"):
        run(tmp_path)
    assert not (tmp_path / "merged").exists()


def test_nothing_learned_is_refused(tmp_path: Path) -> None:
    make(tmp_path, dtype=torch.bfloat16)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for factor, message in ((0.0, "every lora_B is zero"), (1e-7, "lost in the rounding")):
        changed = {name: value * (factor if "lora_B" in name else 1) for name, value in factors.items()}
        _edit_weights(tmp_path, **changed)
        with pytest.raises(UserError, match=f"nothing was learned: .*{message}"):
            run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_values_that_overflow_are_refused(tmp_path: Path) -> None:
    make(tmp_path, dtype=torch.float16)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    _edit_weights(tmp_path, **{name: torch.full((32, 3), 1e6)})
    with pytest.raises(UserError, match=r"q_proj\.weight holds Inf"):
        run(tmp_path)
    assert not (tmp_path / "merged").exists()


def test_a_damaged_base_is_refused(tmp_path: Path) -> None:
    make(tmp_path, max_shard_size="60KB")
    shard = sorted((tmp_path / "base").glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(UserError, match="is truncated"):
        run(tmp_path)
    shard.unlink()
    with pytest.raises(UserError, match="is missing"):
        run(tmp_path)


def test_an_adapter_on_a_tied_output_layer_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    factors = {"A": torch.ones(3, 32), "B": torch.ones(400, 3)}
    _edit_weights(
        tmp_path, **{f"base_model.model.lm_head.lora_{side}.weight": value for side, value in factors.items()}
    )
    with pytest.raises(UserError, match=r"lm_head\.weight is tied"):
        run(tmp_path)


SLOW_MERGE = """
import sys, time
from pathlib import Path
import hyperpod_ft.checkpoint.safetensors_writer as writer
from hyperpod_ft.checkpoint.merge import merge

write = writer._write_all
def slow(*arguments):
    time.sleep(0.05)
    write(*arguments)
writer._write_all = slow
root = Path(sys.argv[1])
print("started", flush=True)
merge(root / "base", root / "adapter", root / "merged", max_shard_bytes=50_000, card="# card")
"""


def test_a_kill_publishes_nothing_and_the_next_attempt_gives_the_same_files(tmp_path: Path) -> None:
    make(tmp_path)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SLOW_MERGE, str(tmp_path)], env=environment)
    partial = tmp_path / ".merged.partial"
    deadline = time.monotonic() + 60
    while not list(partial.glob("model-00003-of-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert partial.exists() and not (tmp_path / "merged").exists()

    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (tmp_path / "merged").iterdir()}

    run(tmp_path, max_shard_bytes=50_000)
    first = files()
    run(tmp_path, max_shard_bytes=50_000)
    assert files() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged"]
