"""What the Slurm steps write and read as text, below a temporary root; no Slurm runs and nobody has to be root."""

import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from provision import slurm_conf, slurm_state
from provision.errors import PassingError
from provision.identity import RECORD, Identity, record
from provision.journal import Journal
from provision.node import Node
from provision.settings import FsxSettings, Settings
from provision.steps import slurm, slurm_configuration
from provision.steps.slurm import Slurm
from provision.steps.slurm_configuration import SlurmConfiguration

from tests.lifecycle.instances import CONTROLLER, WORKERS
from tests.lifecycle.instances import slurm_conf as agents_slurm_conf

CONF = agents_slurm_conf(CONTROLLER, WORKERS, "TopologyPlugin=topology/tree")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    settings = Settings("legacy", "ubuntu", FsxSettings("fs-1", "m", "/fsx"), {}, (), False)
    identity = Identity("c", "controller-machine", "controller", "i-1", "ml.m5.large", "10.1.0.11", ("10.1.0.11",))
    node = Node(tmp_path, settings, Journal(None), tmp_path)
    _put(node, RECORD, record(identity))
    return node


def test_configuration_is_written_once_and_whole(node: Node) -> None:
    _put(node, slurm_conf.SLURM_CONF, CONF)
    _put(node, slurm_conf.INCLUDED_CONF, "Epilog=/from/before.sh\nEpilog=/twice.sh\n")
    step = SlurmConfiguration()
    assert step.needed(node)
    assert step.missing(node)
    step.do(node)
    step.do(node)
    assert not step.missing(node)
    ours = node.path(slurm_conf.INCLUDED_CONF).read_text()
    assert ours.count("Epilog=") == 1
    assert "AccountingStorageType" not in ours
    assert node.path(slurm_conf.SLURM_CONF).read_text() == CONF
    switches = slurm_conf.lines(node.path(slurm_conf.TOPOLOGY_CONF).read_text())
    assert switches == ["SwitchName=all Nodes=ip-10-1-0-12,ip-10-1-0-13"]


def test_accounting_is_configured_before_slurmctld_starts(node: Node) -> None:
    node = dataclasses.replace(node, settings=dataclasses.replace(node.settings, accounting=True))
    _put(node, slurm_conf.SLURM_CONF, CONF)
    SlurmConfiguration().do(node)
    ours = node.path(slurm_conf.INCLUDED_CONF).read_text()
    assert slurm_conf.value(ours, "AccountingStorageType") == "accounting_storage/slurmdbd"
    assert slurm_conf.value(ours, "AccountingStorageHost") == "10.1.0.11"


def test_a_slurm_conf_without_the_include_gets_it_once(node: Node) -> None:
    _put(node, slurm_conf.SLURM_CONF, CONF.replace("include accounting.conf\n", ""))
    SlurmConfiguration().do(node)
    SlurmConfiguration().do(node)
    assert node.path(slurm_conf.SLURM_CONF).read_text() == CONF


def test_a_slurm_conf_that_comes_late_is_waited_for(node: Node) -> None:
    # The AMI's, or another cluster's: 10.1.0.1 begins the controller's address and is not it.
    _put(node, slurm_conf.SLURM_CONF, "SlurmctldHost=ip-10-1-0-1(10.1.0.1)\n#SlurmctldHost=x(10.1.0.11)\n")
    late = threading.Timer(0.5, _put, (node, slurm_conf.SLURM_CONF, CONF))
    late.start()
    SlurmConfiguration().do(node)
    late.join()
    assert not SlurmConfiguration().missing(node)


def test_a_slurm_conf_that_never_comes_is_an_error_that_names_whose_it_is(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_configuration, "_AGENT_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(PassingError, match=r"slurm\.conf: after .* 10\.1\.0\.11; HyperPod's agent writes it"):
        SlurmConfiguration().do(node)
    assert time.monotonic() - started < 250, "not the agent's 300 s"
    assert not node.path(slurm_conf.INCLUDED_CONF).exists()


@pytest.mark.parametrize(
    ("current", "written"),
    [
        ("", "SwitchName=all Nodes=ip-10-1-0-12,ip-10-1-0-13"),
        ("# nothing\n\n", "SwitchName=all Nodes=ip-10-1-0-12,ip-10-1-0-13"),
        (f"{slurm_conf.MARK}\nSwitchName=all Nodes=gone\n", "SwitchName=all Nodes=ip-10-1-0-12,ip-10-1-0-13"),
        ("SwitchName=hyperpods Nodes=ip-10-1-0-12\n", ""),
    ],
)
def test_switches_are_written_where_there_are_none_and_left_where_hyperpod_wrote_some(
    current: str, written: str
) -> None:
    text = slurm_conf.topology(CONF, current)
    assert "\n".join(slurm_conf.lines(text)) == written


def test_no_switches_without_topology_tree() -> None:
    assert slurm_conf.topology(agents_slurm_conf(CONTROLLER, WORKERS), "") == ""


# What HyperPod's agent left on the Slurm 25.11 AMI: an empty topology.yaml, and a partition with a topology.
_TAGGED = CONF.replace("topology/tree", "topology/default") + "PartitionName=trn1 Nodes=ALL State=UP Topology=tree\n"


@pytest.mark.parametrize(
    ("conf", "topology_conf", "topology_yaml", "says"),
    [
        (CONF, "", None, "topology.conf has no switch: jobs are refused"),
        (CONF, "# SwitchName=all Nodes=x\n", None, "topology.conf has no switch: jobs are refused"),
        (CONF, "SwitchName=all Nodes=ip-10-1-0-[12-13]\n", None, ""),
        (CONF.replace("topology/tree", "topology/flat"), "", None, ""),
        (_TAGGED, "", None, ""),
        (
            _TAGGED,
            "",
            "[]\n",
            "does not define 'tree', the topology of partition trn1: slurmctld may crash",
        ),
        (_TAGGED, "", "- topology: other\n  flat: true\n", "topology.yaml does not define 'tree'"),
        (_TAGGED, "", "---\n- topology: tree\n  cluster_default: true\n  tree:\n    switches: []\n", ""),
    ],
)
def test_topology_faults_are_told(conf: str, topology_conf: str, topology_yaml: str | None, says: str) -> None:
    found = slurm_conf.topology_faults(conf, topology_conf, topology_yaml)
    assert len(found) == bool(says)
    assert says in "".join(found)


def test_an_empty_topology_yaml_is_not_a_missing_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_state, "unreachable", lambda node: ["no slurmctld answers"])
    _put(node, slurm_conf.SLURM_CONF, _TAGGED)
    assert Slurm().missing(node) == ["no slurmctld answers"]
    _put(node, slurm_conf.TOPOLOGY_YAML, "")
    assert "topology.yaml does not define 'tree'" in Slurm().missing(node)[0]


def test_what_is_included_counts_in_its_place() -> None:
    conf = slurm_conf.with_included("Prolog=/a\ninclude accounting.conf\nEpilog=/b\n", "Prolog=/c\nEpilog=/d\n")
    assert slurm_conf.value(conf, "prolog") == "/c"
    assert slurm_conf.value(conf, "Epilog") == "/b"


def test_only_a_password_that_was_made_here_is_used_again() -> None:
    ours = slurm_conf.slurmdbd("10.1.0.11", "slurm", "abcdefghijklmnopqrstuvwxyz012345")
    assert slurm_conf.password_of(ours) == "abcdefghijklmnopqrstuvwxyz012345"
    assert slurm_conf.password_of(ours.replace(slurm_conf.MARK, "")) == ""
    assert slurm_conf.password_of(ours.replace("StoragePass=a", "StoragePass='")) == ""
    with pytest.raises(ValueError, match="not a password"):
        slurm_conf.database_statements("'; DROP DATABASE mysql; --")


# Lines of `scontrol show node --oneliner`, shortened in the middle.
_22_05 = "NodeName={} Arch=x86_64 NodeAddr=10.1.0.12 NodeHostName=n Version=22.05.8 State={} ThreadsPerCore=1 {}"
_24_11 = "NodeName={} Arch=x86_64 Gres=gpu:1 NodeAddr=10.1.0.12 NodeHostName=n Version=24.11.0 State={} Weight=1 {}"


@pytest.mark.parametrize(
    ("state", "rest", "problem"),
    [
        ("IDLE", "", ""),
        ("MIXED+PLANNED", "", ""),
        ("IDLE+CLOUD", "", ""),
        ("ALLOCATED-", "", ""),
        ("IDLE*", "", "as IDLE+NOT_RESPONDING"),
        ("UNKNOWN*", "", "as NOT_RESPONDING+UNKNOWN"),
        ("DOWN", "", "as DOWN"),
        ("DOWN", "Reason=Node unexpectedly rebooted [slurm@2026-11-21T18:00:00]", "unexpectedly rebooted"),
        ("IDLE+DRAIN+INVALID_REG", "Reason=Low RealMemory (reported:1 < 2) [slurm@2026-11-21T18:00:00]", "Low Real"),
        (
            "IDLE+DRAIN",
            "Reason=bad cable [root@2026-11-21T18:00:00] Comment=asked",
            "bad cable [root@2026-11-21T18:00:00]",
        ),
        ("FAIL*", "Reason=Action:Replace [root@2026-11-21T18:00:00]", "as FAIL+NOT_RESPONDING: Action:Replace"),
    ],
)
@pytest.mark.parametrize("line", [_22_05, _24_11])
def test_what_slurm_says_of_a_node(line: str, state: str, rest: str, problem: str) -> None:
    found = slurm_state.parse_nodes(line.format("ip-10-1-0-12", state, rest) + "\n")["10.1.0.12"]
    assert (found.name, bool(found.problem)) == ("ip-10-1-0-12", bool(problem))
    assert problem in found.problem
    assert "Comment" not in found.reason


@pytest.mark.parametrize(
    ("running", "reported"),
    [
        ({"Epilog": "/opt/slurm/etc/epilog.d/*", "EpilogMsgTime": "2000 usec"}, False),
        ({"Epilog[0]": "/opt/site.sh", "Epilog[1]": "/opt/slurm/etc/epilog.d/*.sh"}, False),
        ({"Epilog": "/opt/slurm/etc/epilog.d/700_dcgm_job_map_cleanup.sh"}, True),
        ({"Epilog": "(null)", "EpilogSlurmctld": "/opt/slurm/etc/epilog.d/*"}, True),
    ],
)
def test_a_slurm_that_does_not_run_our_epilog_is_reported(
    node: Node, monkeypatch: pytest.MonkeyPatch, running: dict[str, str], reported: bool
) -> None:
    monkeypatch.setattr(slurm_state, "unreachable", lambda node: [])
    monkeypatch.setattr(slurm_state, "running_configuration", lambda node: running)
    found = Slurm().missing(node)
    assert [line.partition(",")[0] for line in found] == [
        "Slurm does not run /opt/slurm/etc/epilog.d/800_hyperpod-ft.sh"
    ] * reported


@pytest.mark.parametrize("starts_after", [None, 20])
def test_slurm_is_waited_for_a_minute_at_most(
    node: Node, monkeypatch: pytest.MonkeyPatch, starts_after: float | None
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(slurm, "time", clock)
    monkeypatch.delenv("PROVISION_SLURM_SECONDS", raising=False)
    silent = ["no slurmctld answers"]
    monkeypatch.setattr(Slurm, "missing", lambda *_: [] if starts_after and now[0] >= starts_after else silent)
    Slurm().do(dataclasses.replace(node, settings=dataclasses.replace(node.settings, provisioning="api")))
    assert now == [starts_after or 60]


def _put(node: Node, path: str, text: str) -> None:
    file = node.path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
