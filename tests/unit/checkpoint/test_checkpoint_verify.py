"""verify: good models and adapters pass, and every kind of damage has its line."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from hyperpod_ft.checkpoint.formats.checksums import CHECKSUMS
from hyperpod_ft.checkpoint.formats.resumable import resumable_directory
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file
from hyperpod_ft.checkpoint.formats.safetensors_writer import Outgoing, write_model
from hyperpod_ft.checkpoint.tensors import scanning
from hyperpod_ft.checkpoint.tensors.elements import STORED
from hyperpod_ft.checkpoint.tensors.layout import LogicalTensor
from hyperpod_ft.checkpoint.tensors.scanning import Scanner
from hyperpod_ft.checkpoint.verify.value_checks import difference
from hyperpod_ft.checkpoint.verify.verify import Verification, verify
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress

INDEX = "model.safetensors.index.json"
Arrays = Mapping[str, NDArray[Any]]


def arrays(layers: int = 3) -> dict[str, NDArray[Any]]:
    """The tensors of a language model of 24 tokens and width 16, float32."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (24, 16), "lm_head.weight": (24, 16), "model.norm.weight": (16,)}
    shapes |= {f"model.layers.{layer}.mlp.up_proj.weight": (40, 16) for layer in range(layers)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    directory: Path, tensors: Arrays, *, max_shard_bytes: int = 4000, stored_as: str = "F32", **config: Any
) -> Path:
    """With the kit's own writer, which records checksums. `stored_as`: how the arrays' bits are to be read."""

    def fill(array: NDArray[Any], begin: int, end: int, out: NDArray[Any]) -> None:
        out[:] = array.reshape(-1)[begin:end].view(STORED[stored_as])

    config = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 3, "dtype": "float32"} | config
    with resumable_directory(directory, {}) as partial:
        outgoing = [
            Outgoing(name, stored_as, array.shape, lambda b, e, out, array=array: fill(array, b, e, out))  # type: ignore[misc]
            for name, array in tensors.items()
        ]
        with ByteProgress("write", 0) as progress:
            write_model(partial, outgoing, max_shard_bytes, progress)
        (partial / "config.json").write_text(json.dumps(config))
    return directory


def shard(directory: Path, number: int = 0) -> Path:
    return sorted(directory.glob("*.safetensors"))[number]


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(file: Path, head: dict[str, Any] | bytes, data: bytes) -> None:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    head, data = header(file)
    change(head)
    put(file, head, data)


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def flip(file: Path, at: int = -5) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


# --- what is in order


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


def _swap_shapes(head: dict[str, Any]) -> None:
    one, other = (head[name] for name in ("model.embed_tokens.weight", "model.norm.weight"))
    one["shape"], other["shape"] = other["shape"], one["shape"]


def _overlap(head: dict[str, Any]) -> None:
    last = max((entry for name, entry in head.items() if name != "__metadata__"), key=lambda e: e["data_offsets"][0])
    last["data_offsets"] = [value - 4 for value in last["data_offsets"]]


def _gap(head: dict[str, Any]) -> None:
    last = max((entry for name, entry in head.items() if name != "__metadata__"), key=lambda e: e["data_offsets"][0])
    last["data_offsets"] = [value + 4 for value in last["data_offsets"]]


def _negative(head: dict[str, Any]) -> None:
    head["model.norm.weight"]["shape"] = [-1]


def _no_number(head: dict[str, Any]) -> None:
    head["model.norm.weight"]["shape"] = ["16"]


def _dtype(head: dict[str, Any]) -> None:
    head["model.norm.weight"]["dtype"] = "F3"


def _metadata(head: dict[str, Any]) -> None:
    head["__metadata__"] = {"format": 1}


DAMAGED_HEADERS = {
    _swap_shapes: "data_offsets",
    _overlap: "overlaps the tensor before",
    _gap: "a gap",
    _negative: "model.norm.weight.shape.0: ",
    _no_number: "model.norm.weight.shape.0: ",
    _dtype: "has dtype F3",
    _metadata: "metadata.format: ",
}


@pytest.mark.parametrize(("change", "line"), DAMAGED_HEADERS.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_a_damaged_header_is_found(tmp_path: Path, change: Callable[[dict[str, Any]], None], line: str) -> None:
    directory = write(tmp_path / "model", arrays(), max_shard_bytes=1 << 20)
    (directory / CHECKSUMS).unlink()
    change_header(shard(directory), change)
    (finding,) = verify(directory).findings
    assert line in finding and "model.safetensors" in finding
    with pytest.raises(UserError, match=line):
        read_file(shard(directory))


CONTENTS = {
    "truncated by a byte": (lambda content: content[:-1], "is truncated"),
    "truncated in the header": (lambda content: content[:100], "is truncated"),
    "empty": (lambda content: b"", "is not a safetensors file"),
    "bytes at the end": (lambda content: content + b"\0\0", "2 bytes follow"),
    "another format": (lambda content: b"PK\x03\x04" * 100, "is not a safetensors file"),
    "a huge header length": (lambda content: struct.pack("<Q", 1 << 62) + content[8:], "is not a safetensors file"),
    "a header past the end": (lambda content: struct.pack("<Q", 90_000_000) + content[8:], "is truncated"),
    "header garbage": (lambda content: content[:8] + b"\xff" * 20 + content[28:], "is damaged"),
    "nested header": (lambda content: struct.pack("<Q", 200_000) + b"[" * 200_000, "is damaged"),
    "half a character": (lambda content: struct.pack("<Q", 13) + b'{"\\ud800":{}}', "is damaged"),
    "no object": (lambda content: struct.pack("<Q", 2) + b"[]", "not a JSON object"),
}


@pytest.mark.parametrize("how", CONTENTS)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_damaged_file_is_found(tmp_path: Path, how: str, recorded: bool) -> None:
    directory = write(tmp_path / "model", arrays())
    if not recorded:
        (directory / CHECKSUMS).unlink()
    change, line = CONTENTS[how]
    damaged = shard(directory, 1)
    damaged.write_bytes(change(damaged.read_bytes()))
    found = verify(directory)
    assert line in found.findings[0] and str(damaged) in found.findings[0]
    assert found.checksums == ("differ" if recorded else "none recorded")
    assert ["checksum differs" in finding for finding in found.findings] == [False, True][: 1 + recorded]
    with pytest.raises(UserError, match=line):
        read_file(damaged)


def test_names_that_stand_twice_are_found(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", arrays(), max_shard_bytes=1 << 20)
    head, data = header(shard(directory))
    text = json.dumps(head)
    entry = json.dumps(head["model.norm.weight"])
    put(shard(directory), (text[:-1] + f', "model.norm.weight": {entry}}}').encode(), data)
    assert "duplicate key model.norm.weight" in verify(directory).findings[0]


def test_a_flipped_byte_is_found_by_its_checksum_only(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", arrays())
    flip(shard(directory, 1))
    found = verify(directory)
    assert [str(shard(directory, 1)) in finding and "checksum differs" in finding for finding in found.findings] == [
        True
    ]
    assert found.checksums == "differ"
    (directory / CHECKSUMS).unlink()
    found = verify(directory)
    assert (found.ok, found.checksums) == (True, "none recorded")


def test_a_missing_shard_is_found(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", arrays())
    name = shard(directory, 1).name
    shard(directory, 1).unlink()
    findings = verify(directory).findings
    assert [finding.split(": ")[1].split(";")[0] for finding in findings] == [
        "is missing",
        f"names {name}, which is missing",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [("nonsense\n", "is damaged"), (f"{'0' * 32}  ../other\n", "outside"), (f"{'0' * 32}  /etc/x\n", "outside")],
)
def test_a_damaged_record_of_checksums_is_found(tmp_path: Path, text: str, line: str) -> None:
    directory = write(tmp_path / "model", arrays())
    (directory / CHECKSUMS).write_text(text)
    assert line in verify(directory).findings[0]


def test_a_file_without_a_recorded_checksum_is_found(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", arrays())
    lines = (directory / CHECKSUMS).read_text().splitlines(keepends=True)
    (directory / CHECKSUMS).write_text("".join(lines[1:]))
    (finding,) = verify(directory).findings
    assert finding == f"{directory / CHECKSUMS}: has no checksum of {lines[0].split()[1]}"


def test_an_index_that_disagrees_is_found(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", arrays(), max_shard_bytes=10_000)
    index = json.loads((directory / INDEX).read_text())
    place, (first, second) = index["weight_map"], (file.name for file in sorted(directory.glob("*.safetensors"))[:2])
    name = next(name for name, file in place.items() if file == first)

    def lines(weight_map: dict[str, str], total_size: object = index["metadata"]["total_size"]) -> list[str]:
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}))
        prefix = f"{directory / INDEX}: "
        assert all(finding.startswith(prefix) for finding in verify(directory).findings)
        return [finding.removeprefix(prefix) for finding in verify(directory).findings]

    assert lines(place) == []
    assert lines(place | {name: second}) == [f"tensor {name} is in {first}, not in {second}"]
    assert lines(place | {"extra": first}) == [f"tensor extra is not in {first}"]
    assert lines({key: file for key, file in place.items() if key != name}) == [
        f"tensor {name} of {first} is not in the index"
    ]
    total = index["metadata"]["total_size"]
    assert lines(place, total + 1) == [f"total_size is {total + 1}, the tensors have {total} bytes"]
    assert lines(place, None) == []
    (directory / "model-00009-of-00009.safetensors").write_bytes(b"")
    assert lines(place) == ["model-00009-of-00009.safetensors is not in the index"]


def test_a_damaged_index_is_found(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", arrays())
    for text, line in {
        "{": "is damaged",
        "{}": "weight_map",
        '{"weight_map": {"a": "../x.safetensors"}}': "outside its directory",
        '{"weight_map": {"a": "x", "a": "y"}}': "duplicate key a",
    }.items():
        (directory / INDEX).write_text(text)
        (finding,) = verify(directory).findings
        assert line in finding


def test_a_model_without_tensors_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    put(tmp_path / "model.safetensors", {}, b"")
    assert verify(tmp_path).findings == (f"{tmp_path}: has no tensors",)


# --- values and configuration


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


def test_a_missing_output_layer_is_found(tmp_path: Path) -> None:
    tensors = {name: array for name, array in arrays().items() if name != "lm_head.weight"}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    directory = write(tmp_path / "model", tensors, **config)
    assert "tie_word_embeddings is false, but there is no lm_head.weight" in verify(directory).findings[0]
    change_json(directory / "config.json", tie_word_embeddings=True)
    assert verify(directory).ok
    (directory / "config.json").unlink()
    assert "config.json: is missing" in verify(directory).findings[0]


def adapter(directory: Path, **config: Any) -> Path:
    directory.mkdir()
    prefix = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    save_file(
        {f"{prefix}A.weight": torch.ones(4, 16), f"{prefix}B.weight": torch.ones(40, 4)},
        directory / "adapter_model.safetensors",
    )
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]} | config
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


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
    monkeypatch.setattr(scanning, "_BLOCK_BYTES", 4096)
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


# --- against


def compared(found: Verification) -> tuple[int, int, float]:
    assert found.comparison is not None
    return found.comparison.equal, found.comparison.different, found.comparison.largest_difference


def test_another_sharding_is_the_same_content(tmp_path: Path) -> None:
    one = write(tmp_path / "one", arrays())
    other = write(tmp_path / "other", dict(reversed(arrays().items())), max_shard_bytes=1 << 20)
    found = verify(one, against=other)
    assert found.ok and compared(found) == (6, 0, 0.0)


def test_a_changed_value_is_found_and_may_be_tolerated(tmp_path: Path) -> None:
    expected = write(tmp_path / "expected", arrays())
    tensors = arrays()
    tensors["lm_head.weight"][3, 5] += 0.25
    directory = write(tmp_path / "model", tensors)
    found = verify(directory, against=expected)
    (finding,) = found.findings
    assert "tensor lm_head.weight: 1 of 384 values differ, by 0.25 at most" in finding
    assert compared(found)[:2] == (5, 1)
    assert verify(directory, against=expected, tolerance=0.26).ok
    assert not verify(directory, against=expected, tolerance=0.24).ok
    # zero and minus zero are not the same bits
    for sign, name in ((1, "zero"), (-1, "minus")):
        tensors["model.norm.weight"][:] = sign * 0.0
        write(tmp_path / name, tensors)
    assert not verify(tmp_path / "zero", against=tmp_path / "minus").ok
    assert verify(tmp_path / "zero", against=tmp_path / "minus", tolerance=1e-30).ok


def test_another_dtype_another_shape_and_other_names_are_found(tmp_path: Path) -> None:
    expected = write(tmp_path / "expected", arrays())
    half = write(
        tmp_path / "half", {name: array.astype(np.float16) for name, array in arrays().items()}, stored_as="F16"
    )
    change_json(half / "config.json", dtype="float16")
    found = verify(half, against=expected, tolerance=0.01)
    assert found.findings == (f"{half}, against {expected}: all 6 tensors are F16, should be F32",)
    assert compared(found)[:2] == (0, 6)
    assert 0 < compared(found)[2] < 0.01
    assert "values differ" in verify(half, against=expected).findings[0]
    tensors = arrays()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].reshape(4, 4)
    tensors["other"] = tensors.pop("lm_head.weight")
    found = verify(write(tmp_path / "model", tensors), against=expected)
    assert [finding.partition("tensor ")[2] for finding in found.findings] == [
        "lm_head.weight is missing",
        "model.norm.weight is [4, 4], should be [16]",
        "other is not expected",
    ]


def test_many_differences_are_summed_up(tmp_path: Path) -> None:
    expected = write(tmp_path / "expected", arrays(20), num_hidden_layers=20)
    directory = write(tmp_path / "model", {name: array + 1 for name, array in arrays(20).items()}, num_hidden_layers=20)
    found = verify(directory, against=expected)
    assert len(found.findings) == 11 and found.findings[-1].endswith("13 more tensors differ")
    assert compared(found) == (0, 23, pytest.approx(1))


def test_differences_of_all_kinds_of_numbers() -> None:
    def count_and_largest(left: list[Any], right: list[Any], dtype: str, tolerance: float = 0) -> tuple[int, float]:
        stored = [np.array(values, STORED[dtype]) for values in (left, right)]
        found = difference(stored[0], dtype, stored[1], dtype, tolerance)
        return found.elements, found.largest

    assert count_and_largest([1, 2, 3], [1, 2, 5], "I64") == (1, 2)
    assert count_and_largest([True, False], [True, True], "BOOL") == (1, 1)
    assert count_and_largest([0x3F80, 0x4000], [0x3F80, 0x4040], "BF16") == (1, 1)
    assert count_and_largest([np.nan, 1], [np.nan, 1], "F32") == (0, 0)
    assert count_and_largest([np.inf, 1], [np.inf, 2], "F64", 1) == (0, 1)
    count, largest = count_and_largest([np.nan, 1], [0, 9], "F32", 100)
    assert count == 1 and np.isnan(largest)
    assert count_and_largest([1, 2], [1, 3], "F8_E4M3")[0] == 1


# --- the command


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hyperpod_ft", "verify", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(tmp_path: Path) -> None:
    good = write(tmp_path / "good", arrays())
    done = call(good)
    assert done.returncode == 0 and done.stdout.splitlines()[1:] == ["checksums  match", "no faults found"], done.stderr
    tensors = arrays()
    tensors["lm_head.weight"][0, 0] = np.nan
    bad = write(tmp_path / "bad", tensors)
    done = call(bad, "--against", good)
    assert done.returncode == 1 and not done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("wrong: ")] == [
        f"wrong: {bad}: tensor lm_head.weight holds NaN",
        f"wrong: {bad}, against {good}: tensor lm_head.weight: 1 of 384 values differ, by nan at most",
    ]
    done = call(bad, "--against", good, "--json")
    values = json.loads(done.stdout, parse_constant=pytest.fail)
    assert done.returncode == 1 and values["ok"] is False and len(values["findings"]) == 2
    assert values["comparison"]["largest_difference"] is None
    for arguments, line in (
        ((tmp_path / "nothing",), "no such directory"),
        ((tmp_path,), "is not a model or an adapter"),
        ((good, "--against", tmp_path), "is not a model"),
        ((good, "--tolerance", "-1"), "--tolerance -1.0: "),
        ((good, "--adapter", good), "--adapter and --base: "),
        ((adapter(tmp_path / "adapter"), "--adapter", good, "--base", good), "is an adapter"),
    ):
        done = call(*arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert line in done.stderr


def test_without_torch_it_says_what_is_missing(tmp_path: Path) -> None:
    """And all besides the logits needs none."""
    good = write(tmp_path / "good", arrays())
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'peft')))\n"
        "from pathlib import Path; from hyperpod_ft.checkpoint.verify.verify import verify\n"
        f"good = Path({str(good)!r})\n"
        "assert verify(good, against=good).ok\n"
        f"verify(good, adapter=Path({str(adapter(tmp_path / 'adapter'))!r}), base=good)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "UserError" in done.stderr and "is not installed; pip install 'hyperpod-ft[torch]'" in done.stderr
