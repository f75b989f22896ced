"""The Neuron compile cache, in directories made here after its documented layout; no compiler ran."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

from hyperpod_ft.job import neuron_cache

VERSION = "neuronxcc-2.21.33363.0+82129205"


def neff(path: Path, *, data: int = 100, cut: int = 0) -> None:
    """A NEFF as far as its header goes: pkg_version, header_size, data_size, and 1024 bytes in all before the data."""
    content = struct.pack("<QQQ", 2, 1024, data).ljust(1024, b"\0") + b"x" * data
    path.write_bytes(content[: len(content) - cut])


def add(cache: Path, name: str, *, compiled: bool = True) -> Path:
    """An entry, extracted and, if wanted, compiled."""
    entry = cache / VERSION / f"MODULE_{name}+39f12043"
    entry.mkdir(parents=True)
    (entry / "compile_flags.json").write_text("[]")
    (entry / "model.hlo_module.pb").write_bytes(b"graph")
    if compiled:
        neff(entry / "model.neff")
        (entry / "model.done").touch()
    return entry


def names(entries: set[str]) -> list[str]:
    return sorted(name.split("MODULE_")[1].split("+")[0] for name in entries)


def test_only_what_is_whole_and_marked_as_done_is_finished(tmp_path: Path) -> None:
    add(tmp_path, "whole")
    add(tmp_path, "extracted", compiled=False)
    (add(tmp_path, "unmarked") / "model.done").unlink()
    (add(tmp_path, "lost") / "model.neff").unlink()
    neff(add(tmp_path, "cut") / "model.neff", cut=1)
    (add(tmp_path, "empty") / "model.neff").write_bytes(b"")
    failed = add(tmp_path, "failed", compiled=False)
    (failed / "model.log").write_text("Failed compilation with ['neuronx-cc']: too many instructions\nmore\n")
    (tmp_path / VERSION / "0_REGISTRY" / "MODULE_x").mkdir(parents=True)  # optimum-neuron keeps such a directory here
    assert names(neuron_cache.finished(tmp_path)) == ["whole"]
    reasons = {name.split("MODULE_")[1].split("+")[0]: why for name, why in neuron_cache.unfinished(tmp_path).items()}
    assert reasons == {
        "extracted": "not compiled",
        "unmarked": "not compiled",
        "lost": "has no NEFF",
        "cut": "its NEFF has 1123 of 1124 bytes",
        "empty": "has no NEFF",
        "failed": "Failed compilation with ['neuronx-cc']: too many instructions",
    }


def test_the_cache_of_torch_neuron_has_a_file_for_each_graph(tmp_path: Path) -> None:
    for name, cut in (("abcd01", 0), ("abcd02", 1), ("12ef03", 0)):
        directory = tmp_path / name[:2] / name[2:4]
        directory.mkdir(parents=True, exist_ok=True)
        neff(directory / f"{name}.neff", cut=cut)
    (tmp_path / "ab" / "cd" / "tmp123.tmp").touch()
    assert neuron_cache.finished(tmp_path) == {"ab/cd/abcd01.neff", "12/ef/12ef03.neff"}
    assert neuron_cache.unfinished(tmp_path) == {"ab/cd/abcd02.neff": "its NEFF has 1123 of 1124 bytes"}
    assert neuron_cache.neff_of(tmp_path / "ab/cd/abcd01.neff").stat().st_size == 1124
    with neuron_cache.using(tmp_path) as removed:
        assert removed == ["ab/cd/abcd02.neff"]
    assert neuron_cache.unfinished(tmp_path) == {}


def test_who_is_alone_removes_all_that_is_not_finished_and_every_lock(tmp_path: Path) -> None:
    kept = add(tmp_path, "whole")
    (kept / "model.hlo_module.pb.lock").touch()
    (add(tmp_path, "killed", compiled=False) / "model.hlo_module.pb.lock").touch()
    neff(add(tmp_path, "cut") / "model.neff", cut=1)
    with neuron_cache.using(tmp_path) as removed:
        assert [name.split("MODULE_")[1] for name in removed] == [
            "cut+39f12043",
            "killed+39f12043",
            "whole+39f12043/model.hlo_module.pb.lock",
        ]
        assert names(neuron_cache.finished(tmp_path)) == ["whole"]
        assert neuron_cache.unfinished(tmp_path) == {}
    assert list((tmp_path / VERSION).glob("*/*.lock")) == []


USE = """
import sys
from pathlib import Path
from hyperpod_ft.job import neuron_cache
with neuron_cache.using(Path(sys.argv[1])):
    print("using it", flush=True)
    sys.stdin.read()
"""


def test_what_another_job_compiles_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", USE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as another_job:
        assert another_job.stdout is not None
        assert another_job.stdout.readline() == "using it\n"
        compiling = add(tmp_path, "compiling", compiled=False)
        (compiling / "model.hlo_module.pb.lock").touch()
        add(tmp_path, "waiting", compiled=False)
        neff(add(tmp_path, "cut") / "model.neff", cut=1)
        abandoned = add(tmp_path, "abandoned", compiled=False)
        long_ago = time.time() - 7 * 3600
        for path in (*abandoned.iterdir(), abandoned):
            os.utime(path, (long_ago, long_ago))
        with neuron_cache.using(tmp_path) as removed:
            assert names(set(removed)) == ["abandoned", "cut"]
            assert names(set(neuron_cache.unfinished(tmp_path))) == ["compiling", "waiting"]
        another_job.kill()
    with neuron_cache.using(tmp_path) as removed:
        assert names(set(removed)) == ["compiling", "waiting"], "the kernel let go of the dead job's lock"
