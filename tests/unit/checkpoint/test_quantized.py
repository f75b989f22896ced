"""Published weights in 4 and 8 bits, decoded to the bits that transformers, torch and bitsandbytes give."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hyperpod_ft.checkpoint import quantized
from hyperpod_ft.checkpoint.formats import safetensors_writer
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.errors import UserError

FILE = "model.safetensors"
BFLOAT16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]


def save(directory: Path, tensors: Tensors, described: dict[str, Any]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE, {"format": "pt"})
    config = {"model_type": "llama", "torch_dtype": "float32", "quantization_config": described}
    (directory / "config.json").write_text(json.dumps(config))


def decoded(directory: Path, tensors: Tensors, described: dict[str, Any]) -> Tensors:
    save(directory, tensors, described)
    assert quantized.decode(directory) == described["quant_method"]
    assert json.loads((directory / "config.json").read_text()) == {"model_type": "llama", "torch_dtype": "bfloat16"}
    assert quantized.decode(directory) == ""
    assert not list(directory.glob(".*")) and not list(directory.glob("XXH*"))
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def bytes_of(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def mxfp4(name: str = "experts.down_proj") -> Tensors:
    blocks, scales = bytes_of(3, 40, 4, 16), bytes_of(3, 40, 4, low=100, high=140)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales, "router.bias": torch.ones(3)}


def test_mxfp4(tmp_path: Path) -> None:
    tensors = mxfp4()
    found = decoded(tmp_path, tensors, {"quant_method": "mxfp4"})
    blocks, scales = tensors["experts.down_proj_blocks"], tensors["experts.down_proj_scales"]
    assert torch.equal(found.pop("experts.down_proj"), convert_moe_packed_tensors(blocks, scales))
    assert torch.equal(found.pop("router.bias"), torch.ones(3)) and not found


@pytest.mark.parametrize(("rows", "block", "grid"), [(300, [128, 128], (3, 2)), (64, None, ())])
def test_fp8(tmp_path: Path, rows: int, block: list[int] | None, grid: tuple[int, ...]) -> None:
    """In blocks, the last of which are narrower, and with one scale; every code is there."""
    codes = bytes_of(rows, 200)
    codes[(codes & 127) == 127] = 0  # NaN
    weight, scales = codes.view(torch.float8_e4m3fn), torch.rand(grid) + 0.5
    found = decoded(
        tmp_path,
        {"up.weight": weight, "up.weight_scale_inv": scales},
        {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {}),
    )
    if block:
        scales = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :200]
    assert torch.equal(found["up.weight"], (weight.float() * scales).to(BFLOAT16))
    assert list(found) == ["up.weight"]


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(tmp_path: Path, nested: bool) -> None:
    """By its definition, element by element: an odd number of columns, and scales that are in 8 bits themselves."""
    rows, columns = 38, 135
    count = rows * columns
    codes, values = bytes_of(count // 2, 1), torch.linspace(-1, 1, 16) ** 3
    blocks = -(-count // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    parts = {"quant_map": values}
    if nested:
        state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.25}
        parts |= {"absmax": bytes_of(blocks), "nested_absmax": torch.rand(3), "nested_quant_map": torch.rand(256)}
        of_block = parts["nested_quant_map"][parts["absmax"].long()]
        scales = of_block * parts["nested_absmax"].repeat_interleave(32)[:blocks] + 0.25
    else:
        scales = parts["absmax"] = torch.rand(blocks)
    text = json.dumps(state).encode()
    parts["quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tensors = {"up.weight": codes} | {f"up.weight.{name}": value for name, value in parts.items()}
    found = decoded(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    nibbles = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], -1).flatten().long()
    wanted = (values[nibbles] * scales.repeat_interleave(64)[:count]).to(BFLOAT16).reshape(rows, columns)
    assert torch.equal(found["up.weight"], wanted) and list(found) == ["up.weight"]


def test_several_shards_and_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before the end leaves the quantized model, and a second call decodes it."""
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for directory in (alone, killed):
        directory.mkdir()
    wanted = decoded(alone, mxfp4("a") | mxfp4("b"), {"quant_method": "mxfp4"})
    save(killed, mxfp4("a") | mxfp4("b"), {"quant_method": "mxfp4"})
    monkeypatch.setattr(quantized, "MAX_SHARD_BYTES", 20_000)
    with monkeypatch.context() as patched:
        patched.setattr(safetensors_writer.resumable, "note", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantized.decode(killed)
    assert {tensor.name for tensor in read_model(killed)} == mxfp4("a").keys() | mxfp4("b").keys()
    quantized.decode(killed)
    assert len(list(killed.glob("model-*.safetensors"))) > 1 and not (killed / FILE).exists()
    found = {name: value for file in killed.glob("*.safetensors") for name, value in load_file(file).items()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("described", "match"),
    [
        ({"quant_method": "gptq"}, r"quantized \(gptq\) and cannot be decoded"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"\(bitsandbytes in 8 bits\)"),
        ({"quant_method": "mxfp4"}, r"tensor down_proj_scales is missing"),
        ({"quant_method": "fp8"}, r"form of fp8 in which up\.weight is stored is not known"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"4 elements of U16 for codes of \[4, 4\]"),
    ],
)
def test_what_cannot_be_decoded_stays(tmp_path: Path, described: dict[str, Any], match: str) -> None:
    tensors = {"down_proj_blocks": bytes_of(1, 2, 1, 16)}
    if described["quant_method"] == "fp8":
        tensors = {"up.weight": bytes_of(2, 2).view(torch.float8_e4m3fn), "up.weight_scale": torch.ones(1)}
    if described["quant_method"] == "bitsandbytes":
        state = json.dumps({"shape": [4, 4], "blocksize": 64}).encode()
        parts = {"absmax": torch.ones(1), "quant_map": torch.ones(16)}
        parts["quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        tensors = {"up.weight": torch.ones(4, 1, dtype=torch.uint16)}
        tensors |= {f"up.weight.{name}": value for name, value in parts.items()}
    save(tmp_path, tensors, described)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(UserError, match=match):
        quantized.decode(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
