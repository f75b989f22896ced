"""Faults that a test machine cannot have: file systems without locks or space, other clocks, other drivers."""

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperpod_ft.doctor import head_node, machine, node, software, volume
from hyperpod_ft.doctor.check import DoctorCheck, Expectations, run_checks
from hyperpod_ft.doctor.node import NodeFindings
from hyperpod_ft.environments import interpreters
from hyperpod_ft.errors import UserError
from hyperpod_ft.findings import Finding, error, ok
from hyperpod_ft.launch.slurm.site import SlurmNode, SlurmSite
from hyperpod_ft.planning.pins import NEURON_DRIVERS
from hyperpod_ft.shipped import PACKAGE
from tests.conftest import MakeRun
from tests.unit.stage_runs import finish

LUSTRE = "50 28 0:1 / /fsx rw,noatime - lustre 10.1.0.1@tcp:/4owupbev rw,{},lazystatfs\n"
ROOT = "28 1 8:1 / / rw,relatime - ext4 /dev/root rw\n"


def rows_of(checks: list[DoctorCheck]) -> dict[str, Finding]:
    return {row.name: row for row in run_checks(checks)}


def at(addresses: list[str]) -> SlurmSite:
    """A Slurm whose nodes have these addresses."""
    nodes = [SlurmNode(f"n{place}", "dev", "idle", 4, 1000, one, "") for place, one in enumerate(addresses)]
    return SimpleNamespace(nodes=lambda: nodes, default_partition=lambda: "dev")  # type: ignore[return-value]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_volume_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Lustre without the option answers ENOSYS."""

    def flock(stream: object, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    row = volume.locks(tmp_path)
    assert row.verdict == "error"
    assert "mount it with flock" in row.remedy
    assert list(tmp_path.iterdir()) == []


def test_locks_that_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda stream, operation: None)
    assert "lets two hold a lock" in volume.locks(tmp_path).found


def test_the_mount_of_a_path() -> None:
    table = ROOT + LUSTRE.format("flock")
    assert volume.mount_of(Path("/fsx/me"), table)[0] == "lustre"
    assert volume.mount_of(Path("/fsx-other"), table)[0] == "ext4"
    assert "flock" in volume.mount_of(Path("/fsx"), table)[1]


@pytest.mark.parametrize(
    ("option", "addresses", "verdict"),
    [
        ("flock", ["10.1.0.12"], "ok"),
        ("localflock", ["10.1.0.12"], "error"),
        ("", ["10.1.0.12"], "error"),  # a disk of the head node
        ("", ["127.0.0.1"], "ok"),
    ],
)
def test_the_volume(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    addresses: list[str],
    verdict: str,
) -> None:
    kind, options = ("lustre", {option}) if option else ("ext4", set[str]())
    monkeypatch.setattr(volume, "mount_of", lambda path, table: (kind, options))
    row = rows_of(volume.checks(Expectations(tmp_path, make_run().config, at(addresses))))["volume"]
    assert row.verdict == verdict, row


def test_a_root_that_cannot_be_made(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    expected = Expectations(tmp_path / "hyperpod-ft", make_run().config, at([]))
    row = rows_of(volume.checks(expected))["cluster.root"]
    assert row.verdict == "error"
    assert f"sudo install -d -o $USER {tmp_path / 'hyperpod-ft'}" in row.remedy


def test_a_volume_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(UserError, match="Read-only file system"):
        volume.locks(tmp_path)


def test_a_rename_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    row = volume.renames(tmp_path)
    assert row.verdict == "error"
    assert "Input/output error" in row.found


def test_little_space(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=3 * 2**30))
    assert machine.temporary().verdict == "error"
    expected = Expectations(tmp_path, make_run().config, at([]))
    assert rows_of(volume.checks(expected))["free space"].verdict == "error"


def test_certificates_of_the_volume(make_run: MakeRun, tmp_path: Path) -> None:
    """The row covers all runs on the volume, whichever run file is given, and skips damaged records."""
    run = make_run()
    expected = Expectations(run.paths.root, None, at([]))
    assert rows_of(volume.checks(expected))["certificates"].found == f"none in {run.paths.root}"
    finish(run, "certify", facts={"not_packed": "sinks", "model_type": "gpt_oss\33[2J", "method": "lora"})
    for name in ("certify-1", "certify-2"):
        llama = make_run(model__revision=name)
        finish(llama, "certify", facts={"model_type": "llama", "method": "full"})
    (run.paths.root / "records" / "certify-3.json").write_text("{")
    row = rows_of(volume.checks(expected))["certificates"]
    assert row.verdict == "ok"
    assert sorted(row.found.split("; ")) == ["gpt_oss?[2J (lora): one example a row", "llama (full): packed (2 times)"]


def test_pins_of_the_evaluation_are_looked_for(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "why_not_found", lambda pin, *_: f"no {pin}" if pin.startswith("lm-eval=") else "")
    for evaluation, verdict in (({"tasks": ["arc_easy"]}, "error"), (None, "ok")):
        expected = Expectations(tmp_path, make_run(env__python=None, eval=evaluation).config, at([]))
        (one,) = [one for one in software.checks(expected) if one.name == "packages"]
        (row,) = run_checks([one])
        assert (row.verdict, "lm-eval" in row.found) == (verdict, verdict == "error")


def test_no_way_to_make_virtual_environments(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "version_of", lambda python: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = Expectations(tmp_path, make_run(env__python=None).config, at([]))
    (one,) = [one for one in software.checks(expected) if one.name == "virtual environment"]
    (lost,) = run_checks([one])
    assert lost.verdict == "error"
    assert "pip install uv" in lost.remedy
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    assert run_checks([one])[0].verdict == "ok"


def test_names_that_do_not_resolve(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: None) -> list[str]:
        if host == "huggingface.co":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [host]

    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = make_run(env__python=None, env__package_repositories=["https://index.example/simple"]).config
    row = rows_of(machine.checks(Expectations(tmp_path, config, at([]))))["names"]
    assert row.verdict == "error"
    assert "huggingface.co" in row.found
    assert "index.example" not in row.found


def test_a_node_with_another_volume(tmp_path: Path) -> None:
    row = node.check_shared(tmp_path / "scratch" / "probe")
    assert row.verdict == "error"
    assert "not the head node's volume" in row.found


def test_a_node_to_which_locks_do_not_reach(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.touch()
    assert "does not hold here" in node.check_shared(probe).found
    with probe.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert node.check_shared(probe).verdict == "ok"


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.24.7.0", "ok"), ("2.26.5.0", "ok"), ("2.9.1.0", "error"), ("", "warning")],
)
def test_the_driver_is_that_of_the_sdk_or_newer(version: str, verdict: str) -> None:
    assert node.check_driver(version, "neuron-2.26.1").verdict == verdict


def test_every_sdk_has_its_driver() -> None:
    named = {path.stem for path in (PACKAGE / "pins").glob("*neuron*.txt")}
    assert set(NEURON_DRIVERS) == named


def said(name: str, time: float, *rows: Finding) -> NodeFindings:
    return NodeFindings(name, time, rows, None)


def test_the_output_of_tasks_may_be_mixed() -> None:
    answers = [said(name, 1.0, ok("locks", name * 2000)) for name in ("n1", "n2")]
    first, second = (node.encode_lines(one) for one in answers)
    assert all(len(line) < 1000 for line in first), "srun cuts longer ones"
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    assert node.parse_output("\n".join(["a site's greeting", *mixed])) == answers
    assert node.parse_output("\n".join([*first, *second[:-1]])) == answers[:1]


def test_clocks_of_nodes_that_differ(make_run: MakeRun, tmp_path: Path) -> None:
    expected = Expectations(tmp_path, make_run().config, at([]))
    (near,) = head_node._compare_nodes(expected, [said("n1", 1000.0), said("n2", 1003.0)])
    assert near.verdict == "ok"
    (apart,) = head_node._compare_nodes(expected, [said("n1", 1000.0), said("n2", 1200.0)])
    assert apart.verdict == "error"
    assert "n2 is ahead" in apart.found


def test_the_row_of_a_node_names_what_differs_there() -> None:
    idle = SlurmNode("n1", "dev", "idle", 4, 1000, "10.0.0.1", "")
    row = head_node._node_row(idle, said("n1", 0.0, ok("locks", "work"), error("clock", "is off", "set it")), "")
    assert (row.verdict, row.found, row.remedy) == ("error", "clock: is off", "set it")


@pytest.mark.parametrize(
    ("state", "idle", "lost"),
    [
        ("idle", True, False),
        ("mixed", False, False),
        ("completing", False, False),
        ("allocated", False, False),
        ("idle*", False, True),
        ("down*", False, True),
        ("drained", False, True),
        ("fail", False, True),
        ("maint", False, False),
        ("idle~", False, False),
    ],
)
def test_states_of_nodes(state: str, idle: bool, lost: bool) -> None:
    one = SlurmNode("n1", "dev", state, 4, 1000, "10.0.0.1", "")
    assert (one.idle, one.lost) == (idle, lost)


def test_a_report_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-private-value")
    found = "hf_abcdefghijklmno arn:aws:iam::123456789012:role/x very-private-value i-0123456789abcde11"
    text = head_node.text([ok("identity", found)])
    assert "*** arn:aws:iam::<account>:role/x *** i-0123456789abcde11" in text


def test_a_bug_in_one_look_does_not_lose_the_other_rows() -> None:
    def rows() -> Iterator[Finding]:
        yield ok("accounting", "answers")
        raise KeyError("getpwuid(): uid not found: 70001")

    lost, well = run_checks([DoctorCheck("accounting", rows), DoctorCheck("locks", lambda: ok("locks", "work"))])
    assert (lost.name, lost.verdict, well.verdict) == ("accounting", "warning", "ok")
    assert "KeyError('getpwuid(): uid not found: 70001')" in lost.found
