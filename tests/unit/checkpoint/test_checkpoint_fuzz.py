"""Two hundred broken inputs: each is refused in one line or makes no difference. None hangs, or runs code."""

import io
import os
import pickle
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hyperpod_ft.checkpoint.consolidate import consolidate_adapters, consolidate_model
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from hyperpod_ft.errors import UserError
from tests.unit import nxd_adapters, nxd_files, nxd_models, tiny_checkpoints

CASES = 50  # of each kind
SECONDS = 120


def consolidate(checkpoint: Path, target: Path) -> None:
    opened = open_checkpoint(checkpoint)
    if opened.adapters:
        consolidate_adapters(opened, target)
    else:
        consolidate_model(opened, target, base=checkpoint.parent / "base")


def merged(directory: Path, target: Path) -> None:
    merge(directory / "base", [WeightedAdapter(directory / "adapter")], target)


Kind = tuple[Path, Callable[[Path, Path], None]]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    root = tmp_path_factory.mktemp("pristine")
    base = tiny_checkpoints.base_model(root / "base")
    live = tiny_checkpoints.peft_model(base)
    dcp = tiny_checkpoints.save_whole(root / "dcp", tiny_checkpoints.trainable(live))
    tiny_checkpoints.describe(dcp, base, tiny_checkpoints.ADAPTER)
    consolidate(dcp, root / "adapter-and-base" / "adapter")
    (root / "adapter-and-base" / "base").symlink_to(base)
    return {
        "dcp": (dcp, consolidate),
        "nxd-xser": (nxd(root / "nxd-xser", xser=True), consolidate),
        "nxd-plain": (nxd(root / "nxd-plain", xser=False), consolidate),
        "adapter": (root / "adapter-and-base", merged),
    }


def nxd(directory: Path, *, xser: bool) -> Path:
    model, layout, lora = nxd_models.Model(), nxd_models.Layout(tensor_parallel=2, xser=xser), nxd_models.Lora()
    adapter = nxd_adapters.random_adapter(model, layout, lora, torch.float32)
    return nxd_files.save_adapters(directory, model, layout, model.random(), [(lora, adapter)])


class Payload:
    """Unpickled, it would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def corrupt(directory: Path, chance: random.Random, mark: Path) -> str:
    """Break one file below `directory`. Returns what was done."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    # JSON carries no checksum: what a changed digit in it means nobody can know
    file = chance.choice([path for path in files if path.suffix not in (".json", ".jinja", ".txt", ".md")])
    content = bytearray(file.read_bytes())
    how = chance.choice(["flip", "flip", "flip", "cut", "grow", "zero", "remove", "swap", "pickle", "payload", "empty"])
    place = chance.randrange(len(content)) if content else 0
    if how == "flip":
        content[place : place + 1] = bytes([content[place] ^ (1 << chance.randrange(8))]) if content else b"\0"
    elif how == "cut":
        del content[place:]
    elif how == "grow":
        content[place:place] = chance.randbytes(chance.randrange(1, 100))
    elif how == "zero":
        content[place : place + 64] = bytes(len(content[place : place + 64]))
    elif how == "swap":
        content = bytearray(chance.choice(files).read_bytes())
    elif how == "pickle":
        content = bytearray(pickle.dumps(Payload(mark)))
    elif how == "payload":
        buffer = io.BytesIO()
        torch.save({"tensor": torch.ones(2), "other": Payload(mark)}, buffer)
        content = bytearray(buffer.getvalue())
    elif how == "empty":
        content = bytearray()
    if how == "remove":
        file.unlink()
    else:
        file.write_bytes(content)
    return f"{how} at {place} of {file.relative_to(directory)}"


def weights(directory: Path) -> dict[str, bytes]:
    """And what is beside them, but for the card, which names other paths."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "README.md"}


@pytest.fixture
def alarm() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"hung for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("kind", ["dcp", "nxd-xser", "nxd-plain", "adapter"])
def test_broken_input_is_refused_or_makes_no_difference(kinds: dict[str, Kind], kind: str, tmp_path: Path) -> None:
    pristine, make = kinds[kind]
    make(pristine, tmp_path / "expected")
    expected = weights(tmp_path / "expected")
    assert expected
    refused = 0
    for number in range(CASES):
        chance = random.Random(f"{kind} {number}")
        broken, mark = tmp_path / "broken", tmp_path / "pwned"
        shutil.copytree(pristine, broken, symlinks=True)
        done = corrupt(broken, chance, mark)
        signal.alarm(SECONDS)
        try:
            make(broken, tmp_path / "made")
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), (number, done)
            assert str(error), (number, done)
            left = {path.name for path in tmp_path.iterdir()} - {"expected", "broken"}
            assert not left, (number, done, left)
        else:
            assert weights(tmp_path / "made") == expected, (number, done)
            shutil.rmtree(tmp_path / "made")
        finally:
            signal.alarm(0)
        assert not mark.exists(), (number, done)
        shutil.rmtree(broken)
    # enough of them matter: archives of tiny tensors are mostly padding
    assert refused > CASES * 0.4
