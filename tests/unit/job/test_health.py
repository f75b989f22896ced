"""Nodes are checked before they train. neuron-ls, modinfo, fi_info and nvidia-smi are stand-ins on PATH that print
what the documentation of each shows; there is no accelerator here."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hyperpod_ft.config.instances import CATALOGUE
from hyperpod_ft.errors import UserError
from hyperpod_ft.job import health, job_host, node, node_report
from hyperpod_ft.job.health import doubts, problems
from hyperpod_ft.job.job_host import JobHost, SlurmHost
from hyperpod_ft.job.node_report import NodeReport, observe
from hyperpod_ft.job.recovery import ATTEMPT_DIRECTORY, failures
from hyperpod_ft.runs.attempts import NodeFailure
from hyperpod_ft.runs.run import Run

MakeRun = Callable[..., Run]
TRN1, TRN2 = CATALOGUE["trn1.32xlarge"], CATALOGUE["trn2.48xlarge"]


def replace_words(node: str) -> str:
    return f"replace {node}"


def fit(node: str, **values: Any) -> NodeReport:
    report = NodeReport(node, 16, (2,) * 16, 16, 8, 1000.0, 100.0, {"python": "3.10.12", "torch": "2.8.0"})
    return replace(report, **values)


def test_a_fit_node_has_no_problem() -> None:
    assert problems([fit("node1"), fit("node2")], TRN1, replace_words) == []
    trn2 = fit("node1", device_cores=(8,) * 16, efa=16)
    assert problems([trn2], TRN2, replace_words) == []
    assert problems([replace(trn2, device_cores=(4,) * 16)], TRN2, replace_words) == [], "logical cores at LNC=2"
    assert problems([NodeReport("here")], CATALOGUE["local"], replace_words) == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"devices": 15, "device_cores": (2,) * 15}, "neuron-ls lists 15 devices, trn1.32xlarge has 16"),
        ({"device_cores": (2,) * 15 + (1,)}, "1 devices with 1 NeuronCores instead of 2"),
        ({"device_files": 15}, "15 of 16 device files /dev/neuron*"),
        ({"efa": 0}, "fi_info lists 0 EFA interfaces, trn1.32xlarge has 8"),
    ],
)
def test_each_problem_is_a_line_with_the_node_and_what_to_do(values: Mapping[str, Any], line: str) -> None:
    found = problems([fit("node1"), fit("node2", **values)], TRN1, replace_words)
    assert found == [f"node2: {line}; replace node2"]


def test_efa_interfaces_that_other_nodes_have_are_missing_and_another_number_of_all_is_doubted() -> None:
    nodes = [fit("node1", efa=7), fit("node2", efa=7)]
    assert problems(nodes, TRN1, replace_words) == []
    assert doubts(nodes, TRN1)[1] == "node2: fi_info lists 7 EFA interfaces, trn1.32xlarge has 8"
    found = problems([fit("node1"), *nodes[1:]], TRN1, replace_words)
    assert found == ["node2: fi_info lists 7 EFA interfaces, trn1.32xlarge has 8; another node has 8; replace node2"]
    assert doubts([fit("node1"), fit("node2", efa=0, instance_type="m5.large")], TRN1) == []


def test_a_node_of_another_type_is_not_replaced() -> None:
    """It has none of what is expected, other versions, and nothing is wrong with it."""
    other = NodeReport("node2", None, (), 0, 0, 1000.0, 100.0, {"neuron driver": ""}, ("no driver",), "m5.4xlarge")
    found = problems([fit("node1", instance_type="trn1.32xlarge"), other, fit("node3")], TRN1, replace_words)
    (line,) = found
    assert line.startswith("node2: is a m5.4xlarge, not a trn1.32xlarge; set cluster.partition")


def test_a_node_may_be_of_another_type_that_the_run_file_allows() -> None:
    other = CATALOGUE["trn1n.32xlarge"]
    for known in ("", "trn1n.32xlarge"):
        nodes = [fit("node1"), fit("node2", efa=16, instance_type=known)]
        assert problems(nodes, TRN1, replace_words, [other]) == doubts(nodes, TRN1, [other]) == []
        assert problems(nodes, TRN1, replace_words) + doubts(nodes, TRN1) != []
    (line,) = doubts([fit("node1", efa=15, instance_type="trn1n.32xlarge")], TRN1, [other])
    assert "15 EFA interfaces, trn1n.32xlarge has 16" in line


def test_the_type_is_read_on_hyperpod_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "product_name"
    model.write_text("m5.4xlarge\n")
    monkeypatch.setattr(node_report, "_MODEL", model)
    monkeypatch.setattr(node_report, "HYPERPOD", tmp_path / "absent")
    assert observe(TRN1, 1, tmp_path).instance_type == ""
    monkeypatch.setattr(node_report, "HYPERPOD", tmp_path)
    assert observe(TRN1, 1, tmp_path).instance_type == "m5.4xlarge"


def test_a_full_disk_is_no_reason_to_replace_a_node() -> None:
    found = problems([fit("node1"), fit("node2", temporary_gib=0.5)], TRN1, replace_words)
    assert found == ["node2: 0.5 GiB free for temporary files, less than 5; free some space"]


def test_a_full_volume_is_not_a_fault_of_a_node() -> None:
    found = problems([fit("node1", volume_gib=2.0), fit("node2", volume_gib=2.1)], TRN1, replace_words)
    assert found == ["2.0 GiB free on the shared volume, less than 10; free some space"]


def test_versions_are_those_of_most_nodes() -> None:
    odd = {"python": "3.10.12", "torch": "2.7.0", "extra": "1"}
    found = problems([fit("node1", versions=odd), fit("node2"), fit("node3")], TRN1, replace_words)
    assert found == [
        "node1: versions differ from the other nodes' (theirs): extra 1 (missing), torch 2.7.0 (2.8.0); replace node1"
    ]
    many = {str(number): "1" for number in range(9)}
    assert "4 more" in problems([fit("node1"), fit("node2", versions={**fit("").versions, **many})], TRN1, str)[0]  # type: ignore[dict-item]


def test_replacement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job_host, "HYPERPOD", tmp_path / "absent")
    assert "scontrol update nodename=node3 state=drain reason=" in SlurmHost("node1").replacement("node3")
    monkeypatch.setattr(job_host, "HYPERPOD", tmp_path)
    assert 'scontrol update node=node3 state=fail reason="Action:Replace"' in SlurmHost("node1").replacement("node3")
    monkeypatch.setenv("PATH", "")
    assert 'state=fail reason="Action:Replace"' in JobHost("node1").replacement("node1"), "over ssh, in no job"
    monkeypatch.setattr(job_host, "HYPERPOD", tmp_path / "absent")
    assert "scontrol" not in JobHost("node1").replacement("node1"), "without Slurm"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a program on PATH that prints a text."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")

    def write(program: str, text: str) -> None:
        (directory / f"{program}.txt").write_text(text)
        (directory / program).write_text(f"#!/bin/sh\ncat '{directory / program}.txt'\n")
        (directory / program).chmod(0o755)

    return write


def listed(interfaces: int) -> str:
    endpoints = (("rdm", "FI_EP_RDM"), ("dgrm", "FI_EP_DGRAM"))
    return "".join(
        f"provider: efa\n    fabric: efa\n    domain: rdmap{16 + number}s27-{suffix}\n    version: 121.0\n"
        f"    type: {kind}\n    protocol: FI_PROTO_EFA\n"
        for number in range(interfaces)
        for suffix, kind in endpoints
    )


def test_a_trainium_node_is_read(stand_in: Callable[[str, str], None], tmp_path: Path) -> None:
    device = {"bdf": "10:1c.0", "connected_to": [1], "memory_size": 34359738368, "neuron_processes": []}
    stand_in(
        "neuron-ls", json.dumps([device | {"neuron_device": number, "nc_count": 2} for number in range(16)], indent=4)
    )
    stand_in("modinfo", "2.21.37.0\n")
    stand_in("fi_info", listed(8))
    report = observe(TRN1, 2, tmp_path)
    assert (report.devices, report.device_cores, report.efa) == (16, (2,) * 16, 8)
    assert report.versions is not None and report.versions["neuron driver"] == "2.21.37.0"
    assert report.versions["pytest"] == pytest.__version__
    assert report.volume_gib and report.temporary_gib
    assert observe(TRN1, 1, tmp_path).efa is None, "a node alone needs none"


@pytest.mark.parametrize(("vendor", "counted"), [("Amazon EC2", 0), ("Supermicro", None)])
def test_efa_is_expected_on_aws_only(
    stand_in: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, counted: int
) -> None:
    (tmp_path / "sys_vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(node_report, "_VENDOR", tmp_path / "sys_vendor")
    stand_in("fi_info", "")
    assert observe(CATALOGUE["p5.48xlarge"], 2, tmp_path).efa == counted


def test_a_program_that_fails_is_reported_without_replacing_the_node(
    stand_in: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = observe(TRN1, 2, tmp_path)
    assert (report.devices, report.efa, report.faults) == (None, None, ()), "no neuron-ls, no fi_info"

    def fails(_: Path) -> list[dict[str, Any]]:
        raise UserError("neuron-ls: no driver", "have the image updated")

    stand_in("neuron-ls", "")
    monkeypatch.setattr(node_report, "neuron_devices", fails)
    report = observe(TRN1, 1, tmp_path)
    assert problems([replace(report, device_files=16)], TRN1, replace_words) == [
        f"{report.node}: neuron-ls: no driver; have the image updated"
    ]


def test_gpus_are_counted(stand_in: Callable[[str, str], None], tmp_path: Path) -> None:
    stand_in("nvidia-smi", "570.172.08\n" * 7)
    report = replace(observe(CATALOGUE["p5.48xlarge"], 1, tmp_path), volume_gib=99.0, temporary_gib=99.0)
    found = problems([report], CATALOGUE["p5.48xlarge"], replace_words)
    assert found == [f"{report.node}: nvidia-smi lists 7 devices, p5.48xlarge has 8; replace {report.node}"]


@pytest.fixture
def with_efa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EFA device in a tree like sysfs."""
    device, driver = tmp_path / "infiniband" / "rdmap0s6" / "device", tmp_path / "drivers" / "efa"
    for directory in (device, driver):
        directory.mkdir(parents=True)
    (device / "driver").symlink_to(driver)
    monkeypatch.setattr(health, "_RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.delenv("NCCL_NET", raising=False)
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)


def test_nccl_must_find_its_plugin_for_efa(
    with_efa: None, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(cluster__nodes=2, cluster__instance_type="p5.48xlarge", parallelism={})
    run.freeze()
    monkeypatch.setattr(health, "observe", lambda *_: NodeReport("node1"))
    for name, value in {ATTEMPT_DIRECTORY: str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert health.check(run) == 0
    (fault,) = json.loads((tmp_path / "node-0-1.json").read_text())["faults"]
    assert fault.startswith(
        "has EFA, but NCCL does not find aws-ofi-nccl and would use TCP: libnccl-net.so: cannot open"
    )
    monkeypatch.setenv("NCCL_NET_PLUGIN", "other")
    assert "libnccl-net-other.so" in str(health._plugin_fault())
    monkeypatch.setenv("NCCL_NET_PLUGIN", "libm.so.6")  # any library that loads
    assert health.check(run) == 0
    assert json.loads((tmp_path / "node-0-1.json").read_text())["faults"] == []

    started = Mock()
    monkeypatch.setenv("PATH", os.environ["PATH"])  # main changes it
    monkeypatch.setattr(node.subprocess, "run", Mock(return_value=Mock(returncode=0)))
    monkeypatch.setattr(node, "rendezvous", lambda *_: [])
    monkeypatch.setattr(node.os, "execvp", started)
    monkeypatch.setattr(sys, "argv", ["node", str(run.paths.directory)])
    for given, found in ((None, "AWS Libfabric"), ("Socket", "Socket")):
        if given:
            monkeypatch.setenv("NCCL_NET", given)
        node.main()
        assert os.environ.pop("NCCL_NET") == found
    assert started.call_count == 2


def test_drivers_are_compared_with_the_packages_of_the_ranks(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "observe", lambda *_: NodeReport("node1"))
    monkeypatch.setattr(health.drivers, "cuda_fault", lambda: "torch is built for CUDA 13.0")
    (tmp_path / "version").write_text("2.19.64.0")
    monkeypatch.setattr(health.drivers, "_NEURON", tmp_path / "version")
    assert health.check(make_run(cluster__instance_type="p5.48xlarge", parallelism={})) == 2
    assert capfd.readouterr().err == "error: health: node1: torch is built for CUDA 13.0\n"
    trainium = {"engine": "neuron", "env__python": None, "cluster__instance_type": "trn1.32xlarge", "parallelism": {}}
    assert health.check(make_run(**trainium)) == 0
    assert capfd.readouterr().err.startswith("warning: health: node1: Neuron driver 2.19.64.0 is older than 2.24.7.0")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_first_node_reports_for_all(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(cluster__nodes=2)
    monkeypatch.setenv(ATTEMPT_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NNODES", "2")

    def on(number: int) -> int:
        monkeypatch.setenv("SLURM_NODEID", str(number))
        monkeypatch.setenv("SLURMD_NODENAME", f"node{number + 1}")
        return health.check(run)

    assert [on(1), on(0)] == [0, 0]
    report = json.loads((tmp_path / "node-0-1.json").read_text())
    report["doubts"] = ["may be slow"]
    (tmp_path / "node-0-1.json").write_text(json.dumps(report))
    assert on(0) == 0
    assert capfd.readouterr().err == "warning: health: node2: may be slow\n"
    report["doubts"] = []
    report["versions"]["torch"] = "0.0"
    (tmp_path / "node-0-1.json").write_text(json.dumps(report))
    assert on(0) == 2
    assert failures(tmp_path)[0] == NodeFailure("node1", None, 2, failures(tmp_path)[0].time)
    said = capfd.readouterr().err
    assert said.startswith("error: health: node2: versions differ from the other nodes' (theirs): torch 0.0 (")

    (tmp_path / "node-0-1.json").unlink()
    monkeypatch.setattr(health, "_REPORT_SECONDS", 0.1)
    monkeypatch.setattr(job_host.Slurm, "host_names", lambda *_: ["node1", "node2"])
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    assert on(0) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"error: health: node2: no report on {tmp_path} within 0.1 s; mount the volume there, or ")
    assert said.endswith('drain the node: scontrol update nodename=node2 state=drain reason="hyperpod-ft health"\n')

    monkeypatch.setattr(health.publish, "write_json", full)
    assert on(1) == 2
    said = capfd.readouterr().err
    assert said.startswith(
        f"error: health: node2: cannot write to {tmp_path}: No space left on device; drain the node: "
    )
    monkeypatch.setenv(ATTEMPT_DIRECTORY, str(tmp_path / "elsewhere"))
    assert on(1) == 2
    assert capfd.readouterr().err.startswith(
        f"error: health: node2: does not see {tmp_path / 'elsewhere'}; drain the node: "
    )


def test_by_hand_and_misused(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.freeze()

    def check(*arguments: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "hyperpod_ft.job.health", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert check(run.paths.directory) == (0, "")
    assert check() == (2, f"error: health: {os.uname().nodename}: usage: python -m hyperpod_ft.job.health RUN_DIR\n")
    assert check(tmp_path)[0] == 2
