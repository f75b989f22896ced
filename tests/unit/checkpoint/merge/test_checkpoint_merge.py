"""Merge: what the adapter does not change is the base's bytes, and transformers loads the result."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from threadpoolctl import threadpool_info
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
from hyperpod_ft.checkpoint.merge.merged_tensor import MergedTensor
from tests.unit.checkpoint.merge.tiny_merge import make, run
from tests.unit.rounding import bounds
from tests.unit.tiny_checkpoints import ADAPTER

IDS = torch.arange(12).reshape(2, 6)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}


def stored_bytes(directory: Path) -> dict[str, bytes]:
    found = {}
    for tensor in read_model(directory):
        (piece,) = tensor.pieces
        found[tensor.name] = piece.file.read_bytes()[piece.offset : piece.offset + tensor.nbytes]
    return found


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
        assert opened.metadata()["format"] == "pt"
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and loaded.dtype == torch.bfloat16


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
