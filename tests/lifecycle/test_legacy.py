"""The legacy path on real nodes: the scripts themselves set up Slurm and its accounting, and mount the file system.

The tests follow each other on one cluster as its life does; each leaves it working.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.lifecycle.cluster import USER, Cluster, log_of, provisioning_again_changes_nothing, runs_a_job
from tests.lifecycle.instances import CONTROLLER, LOGIN, WORKERS, Instance
from tests.lifecycle.nodes import Node, container
from tests.waiting import wait_for

pytestmark = pytest.mark.lifecycle


@pytest.fixture(scope="module")
def cluster(nodes_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with container(tmp_path_factory.mktemp("container")) as opened:
        logs = tmp_path_factory.mktemp("logs")
        yield Cluster(opened, [CONTROLLER, *WORKERS, LOGIN], logs, provisioning="legacy", accounting=True)


def test_nodes_that_are_provisioned_at_once_run_a_job(cluster: Cluster) -> None:
    # With topology/tree and no topology.conf, slurmctld 22.05 does not come up; newer ones do and refuse jobs.
    cluster.provision(cluster.nodes, meanwhile=lambda: cluster.write_slurm_conf("TopologyPlugin=topology/tree"))

    runs_a_job(cluster, cluster.nodes[-1])
    assert cluster.job(cluster.controller, "id -u; pwd").split()[0] == "2001"
    assert not (cluster.nodes[-1].root / "opt/slurm/etc/slurm.conf").exists()
    for node in cluster.nodes:
        enabled = {
            unit: node.run("systemctl", "is-enabled", unit, check=False).stdout.strip()
            for unit in ("slurmctld", "slurmd")
        }
        here, elsewhere = ("slurmctld", "slurmd") if node is cluster.controller else ("slurmd", "slurmctld")
        assert enabled == {here: "enabled", elsewhere: "masked"}


def test_what_jobs_took_is_accounted(cluster: Cluster) -> None:
    cluster.wait_for_associations()
    number = cluster.submit(cluster.nodes[-1], "true", "--nodes=2")
    cluster.wait_for_job(number)
    words = ("sacct", "-n", "-P", "-X", "-j", str(number), "-o", "user,account,nnodes,state")

    def accounted() -> str:
        return cluster.controller.run(*words, user=USER).stdout.strip()

    wait_for(lambda: accounted() == f"{USER}|root|2|COMPLETED", 300, accounted, every=0.1)


def test_the_password_of_the_database_is_slurmdbds_alone(cluster: Cluster) -> None:
    conf = cluster.controller.root / "opt/slurm/etc/slurmdbd.conf"
    status = conf.stat()
    password = next(line for line in conf.read_text().splitlines() if line.startswith("StoragePass=")).partition("=")[2]
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, int(cluster.controller.run("id", "-u", "slurm").stdout))
    assert len(password) >= 32
    holders = [
        str(path.relative_to(cluster.controller.changes))
        for path in cluster.controller.changes.rglob("*")
        if not path.is_symlink() and password.encode() in content(path)
    ]
    assert holders == ["opt/slurm/etc/slurmdbd.conf"]
    assert not any(password in log.read_text() for log in cluster.logs.iterdir())


def test_provisioning_again_everywhere_at_once_changes_nothing(cluster: Cluster) -> None:
    provisioning_again_changes_nothing(cluster)


def test_a_worker_that_slurm_keeps_down_because_it_rebooted_is_resumed_and_said(cluster: Cluster) -> None:
    worker = cluster.compute[0]
    reason = "reason=Node unexpectedly rebooted"
    # As slurmctld itself, whose name is in the reason then.
    down = ("scontrol", "update", f"nodename={worker.instance.hostname}", "state=down", reason)
    cluster.controller.run("runuser", "-u", "slurm", "--", *down)
    cluster.provision([worker])
    assert "DOWN: Node unexpectedly rebooted" in log_of(worker)
    runs_a_job(cluster, cluster.nodes[-1])


def test_a_worker_without_its_file_system_takes_no_jobs(cluster: Cluster) -> None:
    """As after a boot while FSx is away."""
    worker = cluster.compute[0]
    known = "/opt/stand-ins/fsx"
    worker.run("systemctl", "stop", "slurmd")
    worker.run("umount", "/fsx")
    worker.run("mount", "--bind", "/dev/null", known)
    assert worker.run("systemctl", "start", "slurmd", check=False).returncode != 0
    worker.run("umount", known)
    worker.run("systemctl", "start", "slurmd")
    cluster.provision([worker])
    runs_a_job(cluster, cluster.nodes[-1])


def test_a_slurmd_that_cannot_start_yet_is_waited_for(cluster: Cluster) -> None:
    """Where its unit tells systemd when it is ready, starting it fails until a controller answers."""
    worker = cluster.compute[0]
    drop_in = worker.root / "etc/systemd/system/slurmd.service.d/10-test.conf"
    drop_in.write_text("[Service]\nExecStartPre=/usr/bin/test -e /run/controller-answers\n")
    worker.run("systemctl", "daemon-reload")
    worker.run("systemctl", "stop", "slurmd")
    cluster.provision([worker], meanwhile=lambda: _later(3, worker, "run/controller-answers"))
    drop_in.unlink()
    worker.run("systemctl", "daemon-reload")
    runs_a_job(cluster, cluster.nodes[-1])


def test_a_worker_that_slurm_conf_does_not_name_yet_joins_when_it_does(cluster: Cluster) -> None:
    new = Instance("worker-group-1", "10.1.0.15", "i-0123456789abcde15", "ml.trn1.32xlarge")
    cluster.instances.append(new)
    node = cluster.power_on(new)
    cluster.provision([node])
    assert "HyperPod's agent adds it" in log_of(node)

    cluster.write_slurm_conf("TopologyPlugin=topology/tree")
    cluster.controller.run("rm", "/opt/slurm/etc/topology.conf")
    cluster.controller.run("systemctl", "restart", "slurmctld")
    cluster.provision([cluster.controller])
    wait_for(lambda: "idle" in cluster.controller.run("sinfo", "-h", "-n", new.hostname, "-o", "%T").stdout, every=0.1)
    assert cluster.job(node, "hostname", f"--nodelist={new.hostname}").strip() == new.hostname
    node.power_off()
    cluster.instances.remove(new)


def test_accounting_can_be_turned_on_later(nodes_possible: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    with container(tmp_path_factory.mktemp("container")) as opened:
        logs = tmp_path_factory.mktemp("logs")
        cluster = Cluster(opened, [CONTROLLER, WORKERS[0]], logs, provisioning="legacy")
        cluster.write_slurm_conf()
        worker = cluster.nodes[1]
        cluster.provision(cluster.nodes)
        number = cluster.submit(cluster.controller, "sleep 12")

        cluster.change_settings(accounting=True)
        cluster.provision(cluster.nodes)

        assert cluster.wait_for_job(number) == "COMPLETED"
        words = ("sacct", "-n", "-X", "-j", str(number), "-o", "user")
        wait_for(lambda: cluster.controller.run(*words, user=USER).stdout.strip() == USER, every=0.1)
        wait_for(
            lambda: "accounting_storage/slurmdbd" in worker.run("sh", "-c", "cat /run/slurm/conf/*").stdout, every=0.1
        )


def content(path: Path) -> bytes:
    """Of a file; empty for what is none, or no longer: daemons rename theirs."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


def _later(seconds: float, node: Node, path: str) -> None:
    time.sleep(seconds)
    (node.root / path).touch()
