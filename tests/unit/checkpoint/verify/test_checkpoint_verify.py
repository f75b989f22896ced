"""verify: good models and adapters pass; values, configurations and adapters that are wrong have their line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from hyperpod_ft.checkpoint.formats.safetensors_file import read_file
from hyperpod_ft.checkpoint.tensors import blocks
from hyperpod_ft.checkpoint.tensors.blocks import Scanner
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress
from tests.programs import call
from tests.unit.checkpoint.verify.written_models import adapter, arrays, change_json, header, put, shard, write


def test_a_good_model_passes(tmp_path: Path) -> None:
    found = verify(write(tmp_path / "model", arrays()))
    assert (found.findings, found.ok, found.kind, found.tensors) == ((), True, "model", 6)
    assert found.files > 1 and found.checksums == "match"
    assert found.nbytes == sum(array.nbytes for array in arrays().values())


def test_a_model_that_another_program_wrote_passes(tmp_path: Path) -> None:
    """Whose header is of any length, so that no tensor begins at a multiple of its elements' size."""
    directory = tmp_path / "model"
    directory.mkdir()
    tensors = {
        f"a{number}": torch.randn(1_500_001).to(dtype) for number, dtype in enumerate((torch.float32, torch.bfloat16))
    }
    save_file(tensors, directory / "model.safetensors")
    head, data = header(directory / "model.safetensors")
    for padding in range(8):
        put(directory / "model.safetensors", json.dumps(head).encode() + b" " * padding, data)
        (directory / "config.json").write_text("{}")
        found = verify(directory, against=directory)
        assert (found.findings, found.checksums) == ((), "none recorded")
        assert found.comparison and found.comparison.equal == 2


@pytest.mark.parametrize(("dtype", "value"), [("F32", np.nan), ("F32", -np.inf), ("BF16", np.nan)])
def test_values_that_are_no_numbers_are_found(tmp_path: Path, dtype: str, value: float) -> None:
    tensors = {"a": np.zeros(5_000_001, np.float32), "b": np.zeros(3, np.float32)}
    tensors["a"][-2] = value
    if dtype == "BF16":
        tensors = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in tensors.items()}
    directory = write(tmp_path / "model", tensors, stored_as=dtype, num_hidden_layers=0)
    kind = "Inf" if np.isinf(value) else "NaN"
    dtype_name = "bfloat16" if dtype == "BF16" else "float32"
    change_json(directory / "config.json", dtype=dtype_name)
    assert verify(directory).findings == (f"{directory}: tensor a holds {kind}",)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"vocab_size": 25}, "vocab_size and hidden_size are [25, 16], model.embed_tokens.weight is [24, 16]"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16, the tensors are F32"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, but only 3 layers"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_a_configuration_of_another_model_is_found(tmp_path: Path, config: dict[str, Any], line: str) -> None:
    directory = write(tmp_path / "model", arrays(), **config)
    assert line in verify(directory).findings[0]


@pytest.mark.parametrize(
    ("described", "line"),
    [
        ({"vocab_size": 25}, "are [25, 16], model.language_model.embed_tokens.weight is [24, 16]"),
        ({"hidden_size": 8}, "are [24, 8], model.language_model.embed_tokens.weight is [24, 16]"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16, the tensors are F32"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, but only 3 layers"),
    ],
)
def test_that_of_an_image_text_models_language_model_too(tmp_path: Path, described: dict[str, Any], line: str) -> None:
    """Their embedding may have rows for images, and the layers of the tower are not the language model's."""
    tensors = {name.replace("model.", "model.language_model."): array for name, array in arrays().items()}
    tensors["model.vision_tower.layers.7.norm.weight"] = tensors["model.language_model.norm.weight"]
    parts = {"hidden_size": 16, "num_hidden_layers": 3, "dtype": "float32"}
    directory = write(tmp_path / "model", tensors)
    (directory / "config.json").write_text(json.dumps({"text_config": parts | {"vocab_size": 24}}))
    assert verify(directory).ok
    change_json(directory / "config.json", text_config=parts | {"vocab_size": 24} | described)
    assert line in verify(directory).findings[0]
    del tensors["lm_head.weight"]
    more = write(tmp_path / "more", tensors)
    (more / "config.json").write_text(json.dumps({"text_config": parts | {"vocab_size": 20}}))
    assert verify(more).ok


def test_a_missing_output_layer_is_found(tmp_path: Path) -> None:
    tensors = {name: array for name, array in arrays().items() if name != "lm_head.weight"}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    directory = write(tmp_path / "model", tensors, **config)
    assert "tie_word_embeddings is false, but there is no lm_head.weight" in verify(directory).findings[0]
    change_json(directory / "config.json", tie_word_embeddings=True)
    assert verify(directory).ok
    (directory / "config.json").unlink()
    assert "config.json: is missing" in verify(directory).findings[0]


def test_adapters(tmp_path: Path) -> None:
    directory = adapter(tmp_path / "adapter")
    found = verify(directory, against=directory)
    assert (found.findings, found.kind, found.tensors, found.checksums) == ((), "adapter", 2, "none recorded")
    change_json(directory / "adapter_config.json", r=8)
    assert [finding.split(": ")[1].split(",")[0] for finding in verify(directory).findings] == ["the rank is 8"] * 2
    change_json(directory / "adapter_config.json", rank_pattern={"up_proj": 4})
    assert verify(directory).ok
    file = directory / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "lora_A" in name}, file)
    assert "has no lora_B" in verify(directory).findings[0]
    (directory / "adapter_config.json").write_text("{")
    assert "adapter_config.json: is damaged" in verify(directory).findings[0]


def test_a_file_that_cannot_be_read_to_its_end_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever block fails, and whoever waits for it."""
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 4096)
    directory = write(tmp_path / "model", {"a": np.arange(100_000, dtype=np.float32)}, max_shard_bytes=1 << 20)
    (tensor,) = read_file(shard(directory))
    seen: list[int] = []

    def inspect(_: LogicalTensor, first: int, stored: NDArray[Any]) -> None:
        seen.append(stored.size)
        if first > 50_000:
            raise UserError("the disk is broken")

    with ByteProgress("scan", 0) as progress, Scanner(progress) as scanner:
        for _ in range(20):
            with pytest.raises(UserError, match="the disk is broken"):
                scanner.scan(shard(directory), [tensor], inspect)
        scanner.scan(shard(directory), [tensor], lambda _, first, stored: seen.append(stored.size))
    assert sum(seen[-98:]) == 100_000


def test_the_command(tmp_path: Path) -> None:
    good = write(tmp_path / "good", arrays())
    done = call("verify", good)
    said = done.stdout.splitlines()
    assert done.returncode == 0 and said[0] == f"{good}: sound, no faults found", done.stderr
    assert said[1].startswith("model      ") and said[2:] == ["checksums  match"]
    tensors = arrays()
    tensors["lm_head.weight"][0, 0] = np.nan
    bad = write(tmp_path / "bad", tensors)
    done = call("verify", bad, "--against", good)
    assert done.returncode == 1 and not done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("wrong: ")] == [
        f"wrong: {bad}: tensor lm_head.weight holds NaN",
        f"wrong: {bad}, against {good}: tensor lm_head.weight: 1 of 384 values differ, by nan at most",
    ]
    done = call("verify", bad, "--against", good, "--json")
    values = json.loads(done.stdout, parse_constant=pytest.fail)
    assert done.returncode == 1 and values["ok"] is False and len(values["findings"]) == 2
    assert values["comparison"]["largest_difference"] is None
    done = call("verify", tmp_path / "nothing")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no such file" in done.stderr, done.stderr


def test_without_torch_it_says_what_is_missing(tmp_path: Path) -> None:
    """And all besides the logits needs none."""
    good = write(tmp_path / "good", arrays())
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'peft')))\n"
        "from pathlib import Path; from hyperpod_ft.checkpoint.verify.verify import verify\n"
        f"good = Path({str(good)!r})\n"
        "assert verify(good, against=good).ok\n"
        f"verify(good, adapter=Path({str(adapter(tmp_path / 'adapter'))!r}), base=good, logits=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (
        "UserError" in done.stderr
        and "is not installed; in the kit's clone, pip install -c constraints.txt '.[torch]'" in done.stderr
    )
