"""What HyperPod itself does on a node on the API-driven path, before lifecycle scripts run and after.

As AWS's notes from real nodes have it (awslabs/awsome-distributed-ai, 1.architectures/5.sagemaker-hyperpod:
hyperpod-mental-model.md and Extensions/), and where they disagree or are silent, the worse case:

- Slurm starts only when the scripts have ended; until then scontrol has no configuration, except on the controller.
- slurmdbd runs on the controller, and lets only registered users submit jobs.
- The partition `dev` is the default and has all nodes.
- Login nodes are outside Slurm; they have its configuration, but no slurmd.
- Prologs and epilogs of several owners are in prolog.d and epilog.d; Slurm's logs are rotated.
"""

from collections.abc import Sequence

from tests.lifecycle.instances import FSX_SOURCE, Instance
from tests.lifecycle.instances import slurm_conf as base_slurm_conf
from tests.lifecycle.nodes import Node
from tests.waiting import wait_for

ETC = "opt/slurm/etc"
_LOGROTATE = """\
"/var/log/slurm/*.log" {
    rotate 2
    size 50M
    copytruncate
    missingok
}
"""
_SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost=localhost
SlurmUser=slurm
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=hyperpod
StoragePass=of-hyperpod
StorageLoc=slurm_acct_db
"""
_DATABASE = """\
CREATE DATABASE slurm_acct_db;
GRANT ALL ON slurm_acct_db.* TO hyperpod@localhost IDENTIFIED BY 'of-hyperpod';
"""


def slurm_conf(instances: Sequence[Instance], *extra: str) -> str:
    """What HyperPod's agent writes on the controller, the first of the instances."""
    controller, *others = instances
    nodes = [each for each in others if not each.group.startswith("login")]
    return base_slurm_conf(
        controller,
        nodes,
        f"Prolog=/{ETC}/prolog.d/*",
        f"Epilog=/{ETC}/epilog.d/*",
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={controller.address}",
        "AccountingStorageEnforce=associations",
        f"PartitionName=trn1 Nodes={','.join(node.hostname for node in nodes)} State=UP",
        *extra,
    ).replace("include accounting.conf\n", "")


def set_up(node: Node, controller: Instance) -> None:
    """Before the scripts: the file system, and on nodes with Slurm its files."""
    node.run("mkdir", "/fsx")
    node.run("mount", "-t", "lustre", FSX_SOURCE, "/fsx")
    if not node.kind.systemd:
        return
    (node.root / "etc/logrotate.d/sagemaker-hyperpod-slurm").write_text(_LOGROTATE)
    for folder, name in (("prolog.d", "700_dcgm_job_map_register.sh"), ("epilog.d", "700_dcgm_job_map_cleanup.sh")):
        script = node.root / ETC / folder / name
        script.parent.mkdir()
        script.write_text("#!/bin/bash\nexit 0\n")
        script.chmod(0o755)
    unit = node.root / "etc/systemd/system/slurmd.service"
    unit.write_text(unit.read_text().replace("$SLURMD_OPTIONS", f"--conf-server {controller.address}"))
    node.run("systemctl", "daemon-reload")


def start_slurm(node: Node, controller: Node) -> None:
    """After the scripts: slurmdbd and slurmctld, or slurmd; nothing that runs is started again."""
    if node is controller:
        _start_slurmdbd(node)
        node.run("systemctl", "start", "slurmctld")
        wait_for(lambda: " UP" in node.run("scontrol", "ping", check=False).stdout, every=0.1)
    elif not node.instance.group.startswith("login"):
        node.run("systemctl", "start", "slurmd")
    elif not (conf := node.root / ETC / "slurm.conf").exists():
        conf.write_text((controller.root / ETC / "slurm.conf").read_text())


def _start_slurmdbd(node: Node) -> None:
    conf = node.root / ETC / "slurmdbd.conf"
    if not conf.exists():
        node.run("systemctl", "start", "mariadb")
        node.run("mysql", "--execute", _DATABASE)
        conf.write_text(_SLURMDBD_CONF)
        conf.chmod(0o600)
        node.run("chown", "slurm:slurm", f"/{ETC}/slurmdbd.conf")
    node.run("systemctl", "start", "slurmdbd")
    wait_for(lambda: node.run("timeout", "5", "sacctmgr", "show", "cluster", check=False).returncode == 0, every=0.1)
