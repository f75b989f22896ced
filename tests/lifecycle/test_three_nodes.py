"""`lifecycle/` on real nodes: three machines and a login node become a Slurm cluster that runs a job.

Real here: systemd, users, mounts, Slurm's daemons, munge, MariaDB, sshd. Stand-ins: see image.py. The tests follow each
other on one cluster as its life does; each leaves it working.
"""

import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests.lifecycle.cluster import USER, Cluster, daemons, disk, shared_disk
from tests.lifecycle.instances import CONTROLLER, FSX_SOURCE, LOGIN, WORKERS, Instance
from tests.lifecycle.nodes import Node, container, kill_tree

pytestmark = pytest.mark.lifecycle

# One line from each node, and a file in the user's home that the user wrote.
TWO_NODES = """\
srun hostname
srun bash -c 'id -un > "$HOME/from-$(hostname)"'
stat -c %u:%g "$HOME"/from-*
"""
WORKER_NAMES = [worker.hostname for worker in WORKERS]


@pytest.fixture(scope="module")
def cluster(nodes_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with container(tmp_path_factory.mktemp("container")) as opened:
        yield Cluster(opened, [CONTROLLER, *WORKERS, LOGIN], tmp_path_factory.mktemp("logs"), accounting=True)


def test_nodes_that_are_provisioned_at_once_run_a_job(cluster: Cluster) -> None:
    # With topology/tree and no topology.conf, slurmctld 22.05 does not come up; newer ones do and refuse jobs.
    cluster.provision(cluster.nodes, meanwhile=lambda: cluster.write_slurm_conf("TopologyPlugin=topology/tree"))

    _runs_a_job(cluster, cluster.nodes[-1])
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
    number = cluster.submit(cluster.nodes[-1], "true", "--nodes=2")
    cluster.wait_for_job(number)
    deadline = time.monotonic() + 20
    shown = ""
    while "COMPLETED" not in shown and time.monotonic() < deadline:
        time.sleep(0.2)
        words = ("sacct", "-n", "-P", "-X", "-j", str(number), "-o", "user,account,nnodes,state")
        shown = cluster.nodes[-1].run(*words, user=USER).stdout
    assert shown.strip() == f"{USER}|users|2|COMPLETED"


def test_users_reach_every_node_by_ssh_without_being_asked(cluster: Cluster) -> None:
    for node in cluster.nodes:
        words = (
            "ssh",
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=10",
            node.instance.hostname,
            "id -un; hostname; pwd",
        )
        said = cluster.nodes[-1].run(*words, user=USER).stdout.split()
        assert said == [USER, node.instance.hostname, f"/fsx/{USER}"]


def test_the_password_of_the_database_is_slurmdbds_alone(cluster: Cluster) -> None:
    conf = cluster.controller.root / "opt/slurm/etc/slurmdbd.conf"
    status = conf.stat()
    password = next(line for line in conf.read_text().splitlines() if line.startswith("StoragePass=")).partition("=")[2]
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, int(cluster.controller.run("id", "-u", "slurm").stdout))
    assert len(password) >= 32
    holders = [
        str(path.relative_to(cluster.controller.changes))
        for path in cluster.controller.changes.rglob("*")
        if path.is_file() and not path.is_symlink() and password.encode() in path.read_bytes()
    ]
    assert holders == ["opt/slurm/etc/slurmdbd.conf"]
    assert not any(password in log.read_text() for log in cluster.logs.iterdir())


def test_provisioning_again_everywhere_at_once_changes_nothing(cluster: Cluster) -> None:
    number = cluster.submit(cluster.nodes[-1], "srun sleep 6", "--nodes=2", "--output=/dev/null")
    _wait_until(lambda: "RUNNING" in cluster.controller.run("squeue", "-h", "-j", str(number), "-o", "%T").stdout)
    home = shared_disk(cluster.controller)
    before = [(disk(node), daemons(node)) for node in cluster.nodes]

    cluster.provision(cluster.nodes)

    for node, (files, processes) in zip(cluster.nodes, before, strict=True):
        assert disk(node) == files
        assert daemons(node) == processes
    assert shared_disk(cluster.controller) == home
    assert cluster.wait_for_job(number) == "COMPLETED"


def test_a_new_machine_takes_the_place_of_a_worker(cluster: Cluster) -> None:
    lost = cluster.compute[1]
    place = cluster.nodes.index(lost)
    lost.power_off()
    # slurmctld would notice by itself after SlurmdTimeout; HyperPod's agent tells it.
    cluster.controller.run(
        "scontrol", "update", f"nodename={lost.instance.hostname}", "state=down", "reason=Not responding"
    )
    new = Instance(lost.instance.group, lost.instance.address, "i-0fedcba9876543210", lost.instance.instance_type)
    cluster.instances[place] = new
    cluster.nodes[place] = cluster.power_on(new)
    cluster.provision([cluster.nodes[place]])
    _runs_a_job(cluster, cluster.nodes[-1])


def test_a_worker_that_slurm_keeps_down_because_it_rebooted_is_resumed_and_said(cluster: Cluster) -> None:
    worker = cluster.compute[0]
    reason = "reason=Node unexpectedly rebooted"
    # As slurmctld itself, whose name is in the reason then.
    down = ("scontrol", "update", f"nodename={worker.instance.hostname}", "state=down", reason)
    cluster.controller.run("runuser", "-u", "slurm", "--", *down)
    cluster.provision([worker])
    assert "DOWN: Node unexpectedly rebooted" in _log(worker)
    _runs_a_job(cluster, cluster.nodes[-1])


def test_a_worker_that_somebody_drained_stays_drained_and_says_so(cluster: Cluster) -> None:
    worker = cluster.compute[0]
    name = worker.instance.hostname
    cluster.controller.run("scontrol", "update", f"nodename={name}", "state=drain", "reason=Action:Replace")
    worker.run("systemctl", "stop", "slurmd")
    cluster.provision([worker])
    assert "Action:Replace" in _log(worker)
    assert "drain" in cluster.controller.run("sinfo", "-h", "-n", name, "-o", "%T").stdout
    cluster.controller.run("scontrol", "update", f"nodename={name}", "state=resume")
    _runs_a_job(cluster, cluster.nodes[-1])


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
    _runs_a_job(cluster, cluster.nodes[-1])


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
    _runs_a_job(cluster, cluster.nodes[-1])


def test_the_end_of_a_job_leaves_the_users_other_jobs_alone(cluster: Cluster) -> None:
    name = WORKER_NAMES[0]
    stopped = cluster.submit(cluster.controller, "srun sleep 600", f"--nodelist={name}", "--ntasks=1")
    _wait_until(lambda: "sleep" in cluster.compute[0].run("pgrep", "-lu", USER, check=False).stdout)
    cluster.controller.run("scancel", "--full", "--signal=STOP", str(stopped))
    _wait_until(lambda: "STOPPED" in cluster.controller.run("squeue", "-h", "-o", "%T", "-j", str(stopped)).stdout)
    cluster.job(cluster.controller, "true", f"--nodelist={name}", "--ntasks=1")
    assert "sleep" in cluster.compute[0].run("pgrep", "-lu", USER).stdout
    cluster.controller.run("scancel", "--signal=KILL", str(stopped))
    cluster.wait_for_job(stopped)


def test_a_worker_that_slurm_conf_does_not_name_yet_joins_when_it_does(cluster: Cluster) -> None:
    new = Instance("worker-group-1", "10.1.0.15", "i-0123456789abcde15", "ml.trn1.32xlarge")
    cluster.instances.append(new)
    node = cluster.power_on(new)
    cluster.provision([node])
    assert "HyperPod's agent adds it" in _log(node)

    cluster.write_slurm_conf("TopologyPlugin=topology/tree")
    cluster.controller.run("rm", "/opt/slurm/etc/topology.conf")
    cluster.controller.run("systemctl", "restart", "slurmctld")
    cluster.provision([cluster.controller])
    _wait_until(lambda: "idle" in cluster.controller.run("sinfo", "-h", "-n", new.hostname, "-o", "%T").stdout)
    assert cluster.job(node, "hostname", f"--nodelist={new.hostname}").strip() == new.hostname
    node.power_off()
    cluster.instances.remove(new)


def test_provisioning_that_is_killed_anywhere_is_made_good_by_the_next(cluster: Cluster) -> None:
    wanted = [set(disk(node)) for node in cluster.nodes]
    instances = list(cluster.instances)
    for node in cluster.nodes:
        node.power_off()
    cluster.nodes = [cluster.power_on(instance) for instance in instances]
    cluster.write_slurm_conf("TopologyPlugin=topology/tree")
    moments = random.Random(20261121)
    for _ in range(3):
        started = [cluster.start_provisioning(node)[0] for node in cluster.nodes]
        for process in moments.sample(started, k=len(started)):
            time.sleep(moments.uniform(0, 1.5))
            kill_tree(process.pid)
            process.wait(30)

    cluster.provision(cluster.nodes)

    assert [set(disk(node)) for node in cluster.nodes] == wanted
    _runs_a_job(cluster, cluster.nodes[-1])


def test_where_hyperpod_started_slurm_nothing_of_it_changes(
    nodes_possible: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with container(tmp_path_factory.mktemp("container")) as opened:
        logs = tmp_path_factory.mktemp("logs")
        cluster = Cluster(opened, [CONTROLLER, WORKERS[0]], logs, provisioning="api")
        _start_slurm_as_hyperpod_does(cluster)
        before = [_slurm_files(node) for node in cluster.nodes]
        running = [daemons(node) for node in cluster.nodes]

        cluster.provision(cluster.nodes)

        assert [_slurm_files(node) for node in cluster.nodes] == before
        assert [daemons(node) for node in cluster.nodes] == running
        assert cluster.job(cluster.controller, "hostname", "--nodes=1").strip() == WORKERS[0].hostname


def test_accounting_can_be_turned_on_later(nodes_possible: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    with container(tmp_path_factory.mktemp("container")) as opened:
        logs = tmp_path_factory.mktemp("logs")
        cluster = Cluster(opened, [CONTROLLER, WORKERS[0]], logs)
        cluster.write_slurm_conf()
        worker = cluster.nodes[1]
        cluster.provision(cluster.nodes)
        number = cluster.submit(cluster.controller, "sleep 12")

        cluster.change_settings(accounting=True)
        cluster.provision(cluster.nodes)

        assert cluster.wait_for_job(number) == "COMPLETED"
        shown = cluster.controller.run("sacct", "-n", "-X", "-j", str(number), "-o", "user", user=USER).stdout
        assert shown.strip() == USER
        _wait_until(lambda: "accounting_storage/slurmdbd" in worker.run("sh", "-c", "cat /run/slurm/conf/*").stdout)


def _start_slurm_as_hyperpod_does(cluster: Cluster) -> None:
    """The API-driven path: HyperPod has configured and started Slurm, and mounted /fsx, before scripts run."""
    cluster.write_slurm_conf()
    for node in cluster.nodes:
        node.run("mkdir", "/fsx")
        node.run("mount", "-t", "lustre", FSX_SOURCE, "/fsx")
    # Not enabled: whether the agent starts them at boot, or systemd does, is HyperPod's affair.
    cluster.controller.run("systemctl", "start", "slurmctld")
    _wait_until(lambda: " UP" in cluster.controller.run("scontrol", "ping", check=False).stdout)
    worker = cluster.nodes[1]
    unit = worker.root / "etc/systemd/system/slurmd.service"
    unit.write_text(unit.read_text().replace("$SLURMD_OPTIONS", f"--conf-server {CONTROLLER.address}"))
    worker.run("systemctl", "daemon-reload")
    worker.run("systemctl", "start", "slurmd")
    _wait_until(lambda: "idle" in cluster.controller.run("sinfo", "-h", "-o", "%T").stdout)


def _runs_a_job(cluster: Cluster, node: Node) -> None:
    """From this node, as a user, from its home, on both workers, with files there that are the user's."""
    node.run("bash", "-c", "rm -f from-*", user=USER)
    said = cluster.job(node, TWO_NODES, "--nodes=2", "--partition=dev", f"--nodelist={','.join(WORKER_NAMES)}").split()
    assert sorted(said[:2]) == WORKER_NAMES
    assert said[2:] == ["2001:2001"] * 2


def _later(seconds: float, node: Node, path: str) -> None:
    time.sleep(seconds)
    (node.root / path).touch()


def _slurm_files(node: Node) -> dict[str, str]:
    """Slurm's files that somebody has written, but for those that are the kit's alone."""
    return {
        path: what
        for path, what in disk(node).items()
        if "slurm" in path and not what.startswith("d") and "hyperpod-ft" not in path and "etc/scripts" not in path
    }


def _log(node: Node) -> str:
    return (node.root / "var/log/provision/provisioning.log").read_text()


def _wait_until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
