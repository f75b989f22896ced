"""The writer: what safetensors reads is what was meant, whatever the disk and the user do."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from hyperpod_ft.checkpoint.formats import safetensors_writer
from hyperpod_ft.checkpoint.formats.checksums import CHECKSUMS
from hyperpod_ft.checkpoint.formats.resumable import JOURNAL, resumable_directory
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.checkpoint.formats.safetensors_writer import Outgoing, write_model
from hyperpod_ft.checkpoint.tensors import direct, reading
from hyperpod_ft.checkpoint.tensors.elements import Stored
from hyperpod_ft.checkpoint.tensors.logical_tensor import TORCH_NAME_OF_DTYPE
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress
from tests.unit.checkpoint.tensors_to_write import outgoing, some_values, write
from tests.unit.small_volume import small_volume
from tests.waiting import wait_for


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


@pytest.mark.parametrize("block_bytes", [4096, 12288, direct.BLOCK_BYTES])
@pytest.mark.parametrize("max_shard_bytes", [10_000_000, 1 << 40])
def test_safetensors_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, max_shard_bytes: int
) -> None:
    monkeypatch.setattr(safetensors_writer, "BLOCK_BYTES", block_bytes)
    values = some_values()
    write(tmp_path / "model", values, max_shard_bytes)
    loaded: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        loaded |= load_file(file)
        assert file.stat().st_size <= max_shard_bytes
        with file.open("rb") as stream:
            assert (8 + int.from_bytes(stream.read(8), "little")) % 4096 == 0
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert loaded.keys() == values.keys()
    for name, (dtype, array) in values.items():
        assert loaded[name].dtype == getattr(torch, TORCH_NAME_OF_DTYPE[dtype])
        assert tuple(loaded[name].shape) == array.shape
        assert loaded[name].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes(), name
    # and this kit's own reader
    for tensor in read_model(tmp_path / "model"):
        assert reading.read(tensor).tobytes() == values[tensor.name][1].tobytes()
    index = tmp_path / "model" / "model.safetensors.index.json"
    assert index.exists() == (max_shard_bytes < 1 << 40)
    if index.exists():
        held = sum(array.nbytes for _, array in values.values())
        assert json.loads(index.read_text())["metadata"] == {"total_size": held}


def test_nothing_but_the_model_and_its_checksums_is_left(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "model", some_values(), 6_000_000)
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"model.safetensors.index.json", CHECKSUMS, *(file.name for file in shards)}
    assert {stat.S_IMODE(file.stat().st_mode) for file in shards} == {0o640}
    lines = (tmp_path / "model" / CHECKSUMS).read_text().splitlines()
    for file in shards:
        assert f"{xxhash.xxh3_128(file.read_bytes()).hexdigest()}  {file.name}" in lines


def _refused(*_: object) -> int:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "expected", some_values())
    real_open, real_write, real_read = os.open, os.pwrite, os.preadv

    def opens(path: Any, flags: int, *mode: int, **options: Any) -> int:
        return _refused() if flags & os.O_DIRECT else real_open(path, flags, *mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "open", opens)
        write(tmp_path / "at-opening", some_values())
        for tensor in read_model(tmp_path / "expected"):
            reading.read(tensor)

    def is_direct(descriptor: int) -> bool:
        return bool(direct.fcntl.fcntl(descriptor, direct.fcntl.F_GETFL) & os.O_DIRECT)

    refusals = []

    def at_transfer(real: Callable[..., int]) -> Callable[..., int]:
        def transfer(descriptor: int, *arguments: Any) -> int:
            if is_direct(descriptor):
                refusals.append(descriptor)
                return _refused()
            return real(descriptor, *arguments)

        return transfer

    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "pwrite", at_transfer(real_write))
        patch.setattr(direct.os, "preadv", at_transfer(real_read))
        write(tmp_path / "at-transfer", some_values())
        assert refusals
        refusals.clear()
        for tensor in read_model(tmp_path / "at-transfer"):
            assert reading.read(tensor).tobytes() == some_values()[tensor.name][1].tobytes()
        assert refusals
    assert content(tmp_path / "at-opening") == content(tmp_path / "at-transfer") == content(tmp_path / "expected")


def test_short_transfers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "expected", some_values())
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(direct.os, "pwrite", lambda fd, view, at: real_write(fd, view[: len(view) // 2 + 1], at))
    monkeypatch.setattr(
        direct.os, "preadv", lambda fd, views, at: real_read(fd, [views[0][: len(views[0]) // 2 + 1]], at)
    )
    write(tmp_path / "model", some_values())
    for tensor in read_model(tmp_path / "model"):
        assert reading.read(tensor).tobytes() == some_values()[tensor.name][1].tobytes()
    monkeypatch.undo()
    assert content(tmp_path / "model") == content(tmp_path / "expected")


def left(directory: Path) -> list[str]:
    """What an attempt that failed left behind: the journal, and what was finished."""
    return sorted(path.name for path in (directory / ".model.partial").iterdir())


def test_a_full_volume_is_one_line_and_leaves_only_what_is_finished(tmp_path: Path) -> None:
    volume = tmp_path / "small"
    with small_volume(volume, 8 << 20):
        values = {"large": ("U8", np.zeros(9_000_000, np.uint8))}
        with pytest.raises(UserError, match=r"0\.01 GB to write, 0\.0\d GB free; free space"):
            write(volume / "model", values)
        assert left(volume) == [JOURNAL]


def test_a_volume_that_fills_up_before_a_file_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "small"
    monkeypatch.setattr(safetensors_writer, "_check_space", lambda *_: None)
    with small_volume(volume, 8 << 20):
        with pytest.raises(UserError, match="No space left on device; free space"):
            write(volume / "model", {"large": ("U8", np.zeros(9_000_000, np.uint8))})
        assert left(volume) == [JOURNAL]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_volume_that_fills_up_meanwhile_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write(tmp_path / "expected", some_values(), 3_000_000)
    real_write, written = os.pwrite, []

    def fills_up(descriptor: int, view: Any, offset: int) -> int:
        written.append(offset)
        if len(written) > 3:
            raise OSError(code, os.strerror(code))
        return real_write(descriptor, view, offset)

    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "pwrite", fills_up)
        with pytest.raises(UserError, match=f"{os.strerror(code)}; free space"):
            write(tmp_path / "model", some_values(), 3_000_000)
    finished = left(tmp_path)
    assert JOURNAL in finished and len(finished) > 1
    inodes = {name: (tmp_path / ".model.partial" / name).stat().st_ino for name in finished if name != JOURNAL}
    write(tmp_path / "model", some_values(), 3_000_000)
    assert content(tmp_path / "model") == content(tmp_path / "expected")
    assert inodes == {name: (tmp_path / "model" / name).stat().st_ino for name in inodes}


@pytest.mark.parametrize("damage", ["removed", "truncated", "flipped", "another file"])
def test_a_finished_shard_that_is_not_what_it_was_is_written_again(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "expected", some_values(), 3_000_000)
    with pytest.raises(KeyboardInterrupt), resumable_directory(tmp_path / "model", {}) as directory:
        tensors = [outgoing(name, dtype, array) for name, (dtype, array) in some_values().items()]
        write_model(directory, tensors, 3_000_000, ByteProgress("test", 1))
        raise KeyboardInterrupt
    partial = tmp_path / ".model.partial"
    shard = next(file for file in sorted(partial.glob("*.safetensors")) if file.stat().st_size > 1_000_000)
    if damage == "removed":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, 1_000_000)
    elif damage == "flipped":
        with shard.open("r+b") as file:
            file.seek(900_000)
            byte = file.read(1)[0]
            file.seek(900_000)
            file.write(bytes([byte ^ 4]))
    else:
        (partial / "tokenizer.json").write_text("of another base")
    write(tmp_path / "model", some_values(), 3_000_000)
    assert content(tmp_path / "model") == content(tmp_path / "expected")


def test_an_error_of_one_block_ends_all_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "BLOCK_BYTES", 1 << 16)

    def fill(begin: int, end: int, out: Stored) -> None:
        if begin <= 5_000_000 < end:
            time.sleep(0.05)  # so that later blocks wait for this one
            raise UserError("tensor broken holds NaN")
        out[:] = 0

    with pytest.raises(UserError, match="holds NaN"), resumable_directory(tmp_path / "model", {}) as directory:
        write_model(directory, [Outgoing("broken", "U8", (20_000_000,), fill)], 1 << 40, ByteProgress("test", 1))
    assert list(tmp_path.iterdir()) == []


# Stops before the third shard until a file exists.
STOPPED_WRITE = """
import signal, sys
from pathlib import Path
from hyperpod_ft.checkpoint.formats.resumable import finished
from hyperpod_ft.checkpoint.tensors import direct
# a shell's background job ignores it
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.unit.checkpoint.tensors_to_write import some_values, write
from tests.waiting import wait_for
model, go_on = map(Path, sys.argv[1:])
real = direct.DirectWriter.write
def stopped(*arguments):
    if len(finished(model.with_name(".model.partial"))) == 2:
        wait_for(go_on.exists)
    real(*arguments)
direct.DirectWriter.write = stopped
write(model, some_values(), 3_000_000)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_finished_shards_are_not_written_again(tmp_path: Path, how: signal.Signals) -> None:
    write(tmp_path / "expected", some_values(), 3_000_000)
    go_on = tmp_path / "go-on"
    program = [sys.executable, "-c", STOPPED_WRITE, tmp_path / "model", go_on]
    process = subprocess.Popen(program, stderr=subprocess.DEVNULL)
    partial = tmp_path / ".model.partial"

    def finished() -> list[str]:
        try:
            return list(json.loads((partial / JOURNAL).read_text())["finished"])
        except FileNotFoundError:
            return []

    try:
        wait_for(lambda: len(finished()) >= 2, every=0.01, process=process)
        process.send_signal(how)
        go_on.touch()  # an interrupt waits for the threads of the writer
    finally:
        if sys.exc_info()[0]:
            process.kill()
        process.wait()
    go_on.unlink()
    assert not (tmp_path / "model").exists()
    inodes = {name: (partial / name).stat().st_ino for name in finished()}
    assert 2 == len(inodes) < len(content(tmp_path / "expected")) - 2
    write(tmp_path / "model", some_values(), 3_000_000)
    assert content(tmp_path / "model") == content(tmp_path / "expected")
    assert inodes == {name: (tmp_path / "model" / name).stat().st_ino for name in inodes}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "model"]
