"""The models that benchmarks use are what they say."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks import tensors, text
from benchmarks.neuron_checkpoint import write_checkpoint
from benchmarks.synthetic import ADAPTED, Geometry, Weights, bfloat16, write_adapter, write_base

TINY = Geometry(layers=2, hidden=64, intermediate=192, heads=16, kv_heads=8, vocabulary=512)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synthetic") / "base"
    write_base(directory, TINY, max_shard_bytes=100_000)
    return directory


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def test_the_geometry_is_that_of_llama_3_8b() -> None:
    assert Geometry(layers=32).nbytes == 2 * 8_030_261_248
    assert Geometry().nbytes == pytest.approx(5.6e9, rel=0.01)


def test_bfloat16_rounds_as_torch() -> None:
    values = np.random.default_rng(0).standard_normal(10_000, np.float32)
    values[:3] = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0], np.float32)  # ties, and a signed zero
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bfloat16(values), expected)


def test_the_base_is_a_model_in_several_files(base: Path) -> None:
    index = json.loads((base / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    weights = loaded(base)
    assert {name: tuple(value.shape) for name, value in weights.items()} == TINY.tensors()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values()) == TINY.nbytes
    matrices = [value.float() for name, value in weights.items() if "norm" not in name]
    assert all(value.std().item() == pytest.approx(0.02, rel=0.1) for value in matrices)
    assert len({value[0].sum().item() for value in matrices}) == len(matrices), "no two tensors are alike"
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_part_of_a_tensor_is_the_same_as_in_the_whole() -> None:
    weights = Weights(replace(TINY, vocabulary=300_000))  # longer than the pool, so that it wraps
    name = "lm_head.weight"
    whole = np.concatenate(list(weights.blocks(name))).reshape(weights.shapes[name])
    assert np.array_equal(weights.rows(name, 260_000, 270_000), whole[260_000:270_000])


def test_the_adapter_changes_most_weights(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", TINY)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload().state_dict()
    for name, before in loaded(base).items():
        changed = (merged[name] != before).float().mean().item()
        adapted = name.split(".")[-2] in ADAPTED
        assert changed > 0.5 if adapted else changed == 0, (name, changed)


class TensorReference:
    """Where the loader of a checkpoint looks for torch_xla's."""


def test_the_shards_join_to_the_base(base: Path, tmp_path: Path) -> None:
    ranks = 4
    write_checkpoint(tmp_path / "checkpoint-1", TINY, ranks)
    shards = tmp_path / "checkpoint-1" / "shards"
    metadata = json.loads((shards / "mp_metadata_pp_rank_0.json").read_text())
    parts: dict[str, list[torch.Tensor]] = {}
    allowed = [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
    for rank in range(ranks):
        file = shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        with torch.serialization.safe_globals(allowed):
            references = torch.load(file, weights_only=True)
        for name, reference in references.items():
            tensor = torch.load(Path(f"{file}.tensors") / f"tensor_{reference.tid}.pt", weights_only=True)
            parts.setdefault(name, []).append(tensor)
    assert parts.keys() == metadata["parameters"].keys()
    joined = {}
    for name, pieces in parts.items():
        placement = metadata["parameters"][name]
        if not placement["tensor_model_parallel"]:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces)
            joined[name] = pieces[0]
        elif placement["partition_stride"] == 2:
            for number, half in enumerate(("gate_proj", "up_proj")):
                halves = [piece.chunk(2)[number] for piece in pieces]
                joined[name.replace("gate_up_proj", half)] = torch.cat(halves)
        else:
            joined[name] = torch.cat(pieces, placement["partition_dim"])
    expected = loaded(base)
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], expected[name]) for name in expected)
    assert (shards / "done").exists()


def test_the_digest_is_of_tensors_not_of_files(base: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "one-file", TINY)
    assert tensors.digest(tmp_path / "one-file") == tensors.digest(base)
    (file,) = (tmp_path / "one-file").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert tensors.digest(tmp_path / "one-file") != tensors.digest(base)


def test_the_tokenizer_has_ids_in_the_order_of_merges() -> None:
    tokenizer = text.learn(["the quick brown fox, 1234 clips"] * 10)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    merged = [tokenizer.convert_tokens_to_ids("".join(pair)) for pair in backend["model"]["merges"]]
    assert merged == list(range(256, 256 + len(merged)))
    assert tokenizer("the fox")["input_ids"][0] == tokenizer.bos_token_id == len(tokenizer) - 2
