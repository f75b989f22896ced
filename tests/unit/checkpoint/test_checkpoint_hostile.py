"""Checkpoints made to hurt: each is refused in one line, at once and in little memory."""

import json
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from hyperpod_ft.checkpoint.formats import safe_pickle, torch_file
from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from hyperpod_ft.errors import UserError
from tests.unit import nxd_adapters, nxd_files, nxd_models


def checkpoint(directory: Path, *names: str) -> Path:
    """With an adapter of each name."""
    model, layout = nxd_models.Model(), nxd_models.Layout()
    lora = nxd_models.Lora()
    tensors = nxd_adapters.random_adapter(model, layout, lora, torch.float32)
    nxd_files.save_adapters(directory, model, layout, model.random(), [(lora, tensors)])
    for name in names:
        (directory / "adapter_default").rename(directory / f"adapter_{name}")
    return directory


@pytest.mark.parametrize("name", ["..", "", "a b", "a\nb", "a\u2028b", "adapter_x"])
def test_an_adapters_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not a valid adapter name"):
        open_checkpoint(checkpoint(tmp_path / "checkpoint-2", name))


def test_a_memo_index_makes_no_room(tmp_path: Path) -> None:
    content = b"\x80\x02N" + b"r" + struct.pack("<I", 1 << 31) + b"."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="memo index"):
        safe_pickle.loads(content, {}, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert pickle.loads(b"\x80\x02Nr" + struct.pack("<I", 5) + b".") is None


@pytest.mark.parametrize("record", ["data.pkl", "byteorder"])
def test_a_compressed_record_is_not_unpacked(tmp_path: Path, record: str) -> None:
    torch.save(torch.ones(2), tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for name in good.namelist():
            if name.endswith(record):
                bomb.writestr(name, bytes(1 << 24), zipfile.ZIP_DEFLATED)
            else:
                bomb.writestr(name, good.read(name), zipfile.ZIP_STORED)
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 20
    with pytest.raises(UserError, match=r"is not what torch\.save writes"):
        torch_file.describe(tmp_path / "bomb.pt")


MERGE = """
import sys
from pathlib import Path
from hyperpod_ft.checkpoint.adapters.lora_config import parse_config
import json
parse_config(Path("adapter_config.json"), json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 10**400},
        {"r": 10**400},
        {"layers_pattern": "(", "layers_to_transform": [0]},
        {"target_modules": "("},
        {"modules_to_save": ["("]},
        {"rank_pattern": {"x{99999999999}": 4}},
        {"rank_pattern": {"(" * 5000 + ")" * 5000: 4}},
        {"target_modules": "([a-z._0-9]+)+!"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_adapter_configuration_that_python_cannot_handle(changes: dict[str, object]) -> None:
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | changes
    done = subprocess.run(
        [sys.executable, "-c", MERGE, json.dumps(values)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "UserError: adapter_config.json: " in last and next(iter(changes)) in last
