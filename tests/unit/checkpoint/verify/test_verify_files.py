"""verify: every kind of damage to a file, to the checksums and to the index has its line."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.checkpoint.formats.checksums import CHECKSUMS
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file
from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.errors import UserError
from tests.unit.checkpoint.verify.written_models import INDEX, arrays, header, put, shard, write


def change_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    head, data = header(file)
    change(head)
    put(file, head, data)


def flip(file: Path, at: int = -5) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


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
