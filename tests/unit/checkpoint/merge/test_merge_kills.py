"""A merge that was killed resumes and writes the same files; it uses nothing of another merge."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
from tests.unit import tiny_checkpoints
from tests.unit.checkpoint.merge.tiny_merge import edit_config, edit_weights, files, make, run
from tests.waiting import wait_for

SLOW_MERGE = """
import sys, time
from pathlib import Path
from hyperpod_ft.checkpoint.tensors import direct
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge

root, shards = Path(sys.argv[1]), int(sys.argv[2])
write = direct.DirectWriter.write
def slow(*arguments):
    time.sleep(0.02)
    while len(list((root / ".merged.partial").glob("model-*"))) > shards:
        time.sleep(1)  # until it is killed
    write(*arguments)
direct.DirectWriter.write = slow
merge(root / "base", [WeightedAdapter(root / "adapter")], root / "merged", max_shard_bytes=20_000)
"""


def kill_when(tmp_path: Path, shards: int) -> None:
    """Kill a merge that has begun this many shards, or one more."""
    process = subprocess.Popen([sys.executable, "-c", SLOW_MERGE, str(tmp_path), str(shards)])
    partial = tmp_path / ".merged.partial"
    wait_for(lambda: len(list(partial.glob("model-*"))) >= shards, every=0.002, process=process)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_after_kills_it_goes_on_and_gives_the_same_files(tmp_path: Path) -> None:
    make(tmp_path)
    run(tmp_path, "whole", max_shard_bytes=20_000)
    partial = tmp_path / ".merged.partial"
    shards = len(list((tmp_path / "whole").glob("*.safetensors")))
    seen: dict[str, tuple[int, int]] = {}
    for least in (1, shards // 3, 2 * shards // 3):
        kill_when(tmp_path, least)
        assert not (tmp_path / "merged").exists()
        kept = {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in partial.glob("model-*")}
        journal = json.loads((partial / ".finished.json").read_text())["finished"]
        assert {name: kept[name] for name in seen} == seen, "finished shards are not written again"
        seen = {name: kept[name] for name in journal}
    run(tmp_path, max_shard_bytes=20_000)
    after = {name: (tmp_path / "merged" / name).stat() for name in seen}
    assert {name: (state.st_ino, state.st_mtime_ns) for name, state in after.items()} == seen
    assert files(tmp_path / "merged") == files(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged", "whole"]


@pytest.mark.parametrize("what", ["adapter", "configuration", "base", "dtype", "weight"])
def test_what_a_kill_left_is_not_used_for_another_merge(tmp_path: Path, what: str) -> None:
    make(tmp_path)
    kill_when(tmp_path, 3)
    options: dict[str, object] = {"max_shard_bytes": 20_000}
    if what == "adapter":
        factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        edit_weights(tmp_path, **{name: -value for name, value in factors.items() if "lora_B" in name})
    elif what == "configuration":
        edit_config(tmp_path, lora_alpha=40)
    elif what == "base":
        tiny_checkpoints.base_model(tmp_path / "base", seed=5)
    elif what == "dtype":
        options["dtype"] = "bfloat16"
    weight = 2.0 if what == "weight" else 1.0
    for target in ("merged", "fresh"):
        merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter", weight)], tmp_path / target, **options)  # type: ignore[arg-type]
    assert files(tmp_path / "merged") == files(tmp_path / "fresh")
