"""`lifecycle/` on real nodes: three machines and a login node become a Slurm cluster that runs a job.

Real here: systemd, users, mounts, Slurm's daemons, munge, MariaDB, sshd. Stand-ins: see image.py and hyperpod.py. The
tests follow each other on one cluster as its life does; each leaves it working.
"""

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.cluster import USER, Cluster, daemons, disk, log_of, provisioning_again_changes_nothing, runs_a_job
from tests.lifecycle.instances import CONTROLLER, LOGIN, WORKERS, Instance
from tests.lifecycle.nodes import Node, container, kill_tree
from tests.waiting import wait_for

pytestmark = pytest.mark.lifecycle

PAGE = Path(__file__).parents[2] / "docs" / "cluster-day-two.md"
WORKER_NAMES = [worker.hostname for worker in WORKERS]


@pytest.fixture(scope="module")
def cluster(nodes_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with container(tmp_path_factory.mktemp("container")) as opened:
        yield Cluster(opened, [CONTROLLER, *WORKERS, LOGIN], tmp_path_factory.mktemp("logs"))


def test_nodes_that_are_provisioned_at_once_before_slurm_starts_run_a_job(cluster: Cluster) -> None:
    cluster.provision(cluster.nodes)

    for node in cluster.nodes:
        assert "slurm: warning" in log_of(node)
        assert "still missing: no slurmctld answers: " in log_of(node)
        # HyperPod rotates Slurm's.
        assert "/var/log/slurm/" not in (node.root / "etc/logrotate.d/hyperpod-ft").read_text()
    runs_a_job(cluster, cluster.nodes[-1])
    # Without a partition: to `dev`, which has all nodes.
    assert cluster.job(cluster.controller, "id -u; pwd").split()[0] == "2001"


def test_the_cluster_is_as_awkward_as_real_ones(cluster: Cluster) -> None:
    """What these tests rely on; see hyperpod.py and image.py."""
    controller, login = cluster.controller, cluster.nodes[-1]
    assert controller.run("sinfo", "-h", "-o", "%P %D").stdout.split("\n") == ["dev* 2", "trn1 2", ""]
    assert login.run("systemctl", "is-active", "slurmd", check=False).stdout == "inactive\n"
    stranger = ("runuser", "-u", "nobody", "--", "sbatch", "--chdir=/tmp", "--wrap=true")
    assert "Invalid account" in controller.run(*stranger, check=False).stderr
    assert "python3-venv" in login.run("python3", "-m", "venv", "/tmp/venv", check=False).stdout


def test_users_may_submit_and_what_jobs_took_is_accounted(cluster: Cluster) -> None:
    number = cluster.submit(cluster.nodes[-1], "true", "--nodes=2")
    cluster.wait_for_job(number)
    words = ("sacct", "-n", "-P", "-X", "-j", str(number), "-o", "user,account,nnodes,state")
    wanted = f"{USER}|root|2|COMPLETED"
    wait_for(lambda: cluster.controller.run(*words, user=USER).stdout.strip() == wanted, every=0.1)


def test_users_reach_every_node_by_ssh_without_being_asked(cluster: Cluster) -> None:
    for node in cluster.nodes:
        words = (
            "ssh",
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=300",
            node.instance.hostname,
            "id -un; hostname; pwd",
        )
        said = cluster.nodes[-1].run(*words, user=USER).stdout.split()
        assert said == [USER, node.instance.hostname, f"/fsx/{USER}"]


def test_provisioning_again_everywhere_at_once_changes_nothing(cluster: Cluster) -> None:
    provisioning_again_changes_nothing(cluster)


def test_a_worker_is_replaced_while_slurm_has_set_its_name_aside(cluster: Cluster) -> None:
    """Here HyperPod starts slurmd before the scripts: nothing that it wrote or started changes."""
    lost = cluster.compute[1]
    place = cluster.nodes.index(lost)
    name = lost.instance.hostname
    cluster.controller.run("scontrol", "update", f"nodename={name}", "state=fail", "reason=Action:Replace")
    lost.power_off()
    new = Instance(lost.instance.group, lost.instance.address, "i-0fedcba9876543210", lost.instance.instance_type)
    cluster.instances[place] = new
    worker = cluster.nodes[place] = cluster.power_on(new)
    cluster.start_slurm([worker])
    before = (_slurm_files(worker), daemons(worker))

    cluster.provision([worker])

    assert f"slurmctld reports {name} as " in log_of(worker)
    assert "Action:Replace" in log_of(worker)
    assert (_slurm_files(worker), daemons(worker)) == before
    assert "fail" in cluster.controller.run("sinfo", "-h", "-n", name, "-o", "%T").stdout
    cluster.controller.run("scontrol", "update", f"nodename={name}", "state=resume")
    runs_a_job(cluster, cluster.nodes[-1])
    cluster.provision([worker])
    assert "slurm: already so" in log_of(worker)


def test_a_worker_that_slurm_does_not_know_yet_is_provisioned(cluster: Cluster) -> None:
    """HyperPod adds the nodes of a larger group to slurm.conf minutes after their scripts have ended."""
    new = Instance("worker-group-1", "10.1.0.15", "i-0123456789abcde15", "ml.trn1.32xlarge")
    cluster.instances.append(new)
    node = cluster.power_on(new)
    conf = "opt/slurm/etc/slurm.conf"
    (node.root / conf).write_text((cluster.controller.root / conf).read_text())
    node.provision()
    assert "slurmctld knows no node with address 10.1.0.15 yet" in log_of(node)
    node.power_off()
    cluster.instances.remove(new)


def test_topology_that_hyperpod_has_not_written_is_reported(cluster: Cluster) -> None:
    cluster.write_slurm_conf("TopologyPlugin=topology/tree")
    cluster.provision([cluster.controller])
    assert "topology.conf has no switch: jobs are refused" in log_of(cluster.controller)
    cluster.write_slurm_conf()


def test_the_epilog_is_where_slurm_looks_for_it(cluster: Cluster) -> None:
    worker = cluster.compute[0]
    place = (f"--nodelist={worker.instance.hostname}", "--ntasks=1")
    cluster.job(cluster.controller, "setsid sleep 602 >/dev/null 2>&1 &", *place)
    wait_for(lambda: worker.run("pgrep", "-u", USER, check=False).returncode == 1, every=0.1)


def test_the_end_of_a_job_leaves_the_users_other_jobs_alone(cluster: Cluster) -> None:
    name = WORKER_NAMES[0]
    stopped = cluster.submit(cluster.controller, "srun sleep 600", f"--nodelist={name}", "--ntasks=1")
    wait_for(lambda: "sleep" in cluster.compute[0].run("pgrep", "-lu", USER, check=False).stdout, every=0.1)
    cluster.controller.run("scancel", "--full", "--signal=STOP", str(stopped))
    wait_for(
        lambda: "STOPPED" in cluster.controller.run("squeue", "-h", "-o", "%T", "-j", str(stopped)).stdout, every=0.1
    )
    cluster.job(cluster.controller, "true", f"--nodelist={name}", "--ntasks=1")
    assert "sleep" in cluster.compute[0].run("pgrep", "-lu", USER).stdout
    cluster.controller.run("scancel", "--signal=KILL", str(stopped))
    cluster.wait_for_job(stopped)


def test_provisioning_that_is_killed_anywhere_is_made_good_by_the_next(cluster: Cluster) -> None:
    wanted = [set(disk(node)) for node in cluster.nodes]
    instances = list(cluster.instances)
    for node in cluster.nodes:
        node.power_off()
    cluster.nodes = [cluster.power_on(instance) for instance in instances]
    cluster.write_slurm_conf()
    moments = random.Random(20261121)
    for _ in range(3):
        started = [cluster.start_provisioning(node)[0] for node in cluster.nodes]
        for process in moments.sample(started, k=len(started)):
            time.sleep(moments.uniform(0, 1.5))
            kill_tree(process.pid)
            process.wait(300)

    # This time HyperPod starts Slurm while the scripts run.
    cluster.provision(cluster.nodes, meanwhile=lambda: cluster.start_slurm(cluster.nodes))

    assert [set(disk(node)) for node in cluster.nodes] == wanted
    runs_a_job(cluster, cluster.nodes[-1])


def test_a_user_who_is_added_later_may_submit_too(cluster: Cluster) -> None:
    """By the commands of docs/cluster-day-two.md; `aws` is a stand-in that copies a folder of the node."""
    users = cluster.settings["users"]
    cluster.change_settings(users=[*users, {**users[0], "name": "carol", "uid": 2003, "gid": 2003}])
    (block,) = re.findall(r"```sh\nsudo -i\n(aws s3 .*?)```", PAGE.read_text(), re.DOTALL)
    for node in cluster.nodes:
        folder = node.download_uploaded("/srv/s3/bucket", cluster.settings)
        node.path("/usr/local/bin/aws").write_text('#!/bin/sh\ncp -r "/srv/s3/${5#s3://}" "$6"\n')
        node.path("/usr/local/bin/aws").chmod(0o755)
        commands = block.replace("BUCKET/lifecycle/NAME", str(folder.parent.relative_to("/srv/s3")))
        node.run("bash", "-c", "cd; " + commands.replace("DIGEST", folder.name))
    wait_for(lambda: "carol" in cluster.controller.run("sacctmgr", "-n", "show", "association").stdout, every=0.1)
    assert cluster.job(cluster.controller, "id -un", user="carol").strip() == "carol"


def _slurm_files(node: Node) -> dict[str, str]:
    """Slurm's files that somebody has written, but for those that are the kit's alone."""
    return {
        path: what
        for path, what in disk(node).items()
        if "slurm" in path and not what.startswith("d") and "hyperpod-ft" not in path
    }
