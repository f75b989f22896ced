"""A HyperPod cluster of nodes (nodes.py), from machines just powered on to provisioned ones."""

import hashlib
import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lifecycle import hyperpod
from tests.lifecycle.instances import SETTINGS, WORKERS, Instance, slurm_conf
from tests.lifecycle.nodes import Container, Node
from tests.waiting import wait_for

USER = "alice"
# One line from each node, and a file in the user's home that the user wrote.
_TWO_NODES = """\
srun hostname
srun bash -c 'id -un > "$HOME/from-$(hostname)"'
stat -c %u:%g "$HOME"/from-*
"""

# What daemons write while nothing happens, besides logs. Everything else on a disk is the scripts' doing.
WRITTEN_BY_DAEMONS = (
    "var/log",
    "var/spool/slurmctld",  # slurmctld's state
    "var/spool/slurmd",  # slurmd's, and what it fetched from the controller
    "var/lib/mysql",
    "var/lib/systemd",
)


class Cluster:
    """Machines with lifecycle scripts on them; the first is the controller."""

    def __init__(
        self, container: Container, instances: Sequence[Instance], logs: Path, **settings_changes: object
    ) -> None:
        self.container = container
        self.instances = list(instances)
        self.logs = logs
        self.settings = {**SETTINGS, **settings_changes}
        self.api = self.settings["provisioning"] == "api"
        with ThreadPoolExecutor() as pool:
            self.nodes = list(pool.map(self.power_on, self.instances))
        if self.api and container.kind.systemd:
            self.write_slurm_conf()
        self._runs = 0

    def power_on(self, instance: Instance) -> Node:
        """A new machine, onto which HyperPod has downloaded the scripts."""
        node = self.container.power_on(instance, self.instances)
        if self.api:
            hyperpod.set_up(node, self.instances[0])
        node.download_scripts(self.settings)
        return node

    def change_settings(self, **changes: object) -> None:
        """What a changed cluster file and an upload of the scripts bring to each node."""
        self.settings.update(changes)
        for node in self.nodes:
            node.write_settings(self.settings)

    @property
    def controller(self) -> Node:
        return self.nodes[0]

    @property
    def compute(self) -> list[Node]:
        return [node for node in self.nodes if node.instance.group.startswith("worker")]

    def write_slurm_conf(self, *extra: str) -> None:
        """What HyperPod's agent does on the controller: on the legacy path not at once, and not in one go."""
        controller, *others = self.instances
        text = hyperpod.slurm_conf(self.instances, *extra) if self.api else slurm_conf(controller, others, *extra)
        conf = self.controller.root / "opt/slurm/etc/slurm.conf"
        if not self.api and not conf.exists():
            conf.write_text(text[: len(text) // 3])
            time.sleep(0.5)
        conf.write_text(text)

    def provision(self, nodes: Iterable[Node], meanwhile: Callable[[], None] = lambda: None) -> None:
        """provision.sh on all of them at the same time, and then Slurm, where HyperPod starts it.

        `AssertionError` with the log of one that fails.
        """
        nodes = list(nodes)
        running = [(node, *self.start_provisioning(node)) for node in nodes]
        thread = threading.Thread(target=meanwhile)
        thread.start()
        try:
            for node, process, log in running:
                status = process.wait(300)
                assert status == 0, f"{node.instance.hostname}:\n{log.read_text()}"
        finally:
            thread.join()
        if self.api:
            self.start_slurm(nodes)
            self.wait_for_associations()

    def wait_for_associations(self) -> None:
        """Wait until a service of the controller has registered the user: jobs submitted before have no account."""
        wait_for(lambda: USER in self.controller.run("sacctmgr", "-n", "show", "association").stdout, every=0.1)

    def start_slurm(self, nodes: Iterable[Node]) -> None:
        """What HyperPod does on the API-driven path, the controller first."""
        for node in sorted(nodes, key=lambda node: node is not self.controller):
            hyperpod.start_slurm(node, self.controller)

    def start_provisioning(self, node: Node) -> "tuple[subprocess.Popen[str], Path]":
        """provision.sh as HyperPod runs it, and where its output goes."""
        self._runs += 1
        log = self.logs / f"provision-{self._runs}-{node.instance.hostname}.log"
        return node.start(*node.provision_command(), log=log), log

    def job(self, node: Node, script: str, *options: str, user: str = USER, seconds: float = 300) -> str:
        """Submit a job as a user from its home and wait; returns its output without srun's notes about waiting."""
        number = self.submit(node, script, *options, user=user)
        state = self.wait_for_job(number, seconds)
        output = node.run("sh", "-c", f"cat slurm-{number}.out", user=user).stdout
        assert state == "COMPLETED", f"job {number} is {state}: {output}"
        waiting = (f"srun: Job {number} step creation ", "srun: Step created for ")
        return "".join(line for line in output.splitlines(keepends=True) if not line.startswith(waiting))

    def submit(self, node: Node, script: str, *options: str, user: str = USER) -> int:
        """sbatch; returns the job's number."""
        # What a user types; sbatch reads the script from its standard input.
        command = f"sbatch --parsable --time=5 {' '.join(options)} <<'END'\n#!/bin/bash\n{script}\nEND"
        return int(node.run("bash", "-lc", command, user=user).stdout.strip().splitlines()[-1])

    def wait_for_job(self, number: int, seconds: float = 300) -> str:
        """The state in which a job ended."""

        def shown() -> str:
            return self.controller.run("scontrol", "show", "job", str(number), "--oneliner").stdout

        def ended() -> str:
            state = next(word for word in shown().split() if word.startswith("JobState=")).partition("=")[2]
            return "" if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") else state

        return wait_for(ended, seconds, shown, every=0.1)


def runs_a_job(cluster: Cluster, node: Node) -> None:
    """From this node, as a user, from its home, on both workers, with files there that are the user's."""
    node.run("bash", "-c", "rm -f from-*", user=USER)
    names = [worker.hostname for worker in WORKERS]
    said = cluster.job(node, _TWO_NODES, "--nodes=2", f"--nodelist={','.join(names)}").split()
    assert sorted(said[:2]) == names
    assert said[2:] == ["2001:2001"] * 2


def provisioning_again_changes_nothing(cluster: Cluster) -> None:
    """On all nodes at once, while a job runs on the workers."""
    waits = "srun sh -c 'until [ -e end ]; do sleep 0.1; done'"
    number = cluster.submit(cluster.controller, waits, "--nodes=2", "--output=/dev/null")
    wait_for(
        lambda: "RUNNING" in cluster.controller.run("squeue", "-h", "-j", str(number), "-o", "%T").stdout, every=0.1
    )
    home = shared_disk(cluster.controller)
    before = [(disk(node), daemons(node)) for node in cluster.nodes]

    cluster.provision(cluster.nodes)

    for node, (files, processes) in zip(cluster.nodes, before, strict=True):
        assert disk(node) == files
        assert daemons(node) == processes
    assert shared_disk(cluster.controller) == home
    cluster.controller.run("touch", "end", user=USER)
    assert cluster.wait_for_job(number) == "COMPLETED"


def log_of(node: Node) -> str:
    """What provision.sh has logged there so far."""
    return (node.root / "var/log/provision/provisioning.log").read_text()


def disk(node: Node) -> dict[str, str]:
    """All that happened on a node's disk, by path: kind, mode, owner, time of change and content."""
    return _tree(node.changes, WRITTEN_BY_DAEMONS)


def shared_disk(node: Node) -> dict[str, str]:
    """The same of the shared file system, as this node sees it."""
    return _tree(node.path("/srv/lustre"), ())


def snapshot(node: Node) -> dict[str, str]:
    """All that a node without daemons wrote, but for logs; directories with their times too."""
    parts = {"disk": node.changes, "shared": node.path("/srv/lustre"), "run": node.path("/run")}
    return {
        f"{name}/{path}": what
        for name, top in parts.items()
        for path, what in _tree(top, ("var/log",), directory_times=True).items()
    }


def _tree(top: Path, skip: tuple[str, ...], *, directory_times: bool = False) -> dict[str, str]:
    found = {}
    for folder, folders, files in os.walk(top):
        here = Path(folder).relative_to(top)
        folders[:] = [name for name in folders if str(here / name) not in skip]
        for name in (*folders, *files):
            path = Path(folder) / name
            status = path.lstat()
            what = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid}"
            if path.is_symlink():
                what += f" -> {path.readlink()}"
            elif path.is_file():
                what += f" {status.st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
            elif directory_times:
                what += f" {status.st_mtime_ns}"
            found[str(here / name)] = what
    return found


def daemons(node: Node) -> list[str]:
    """Main process of each of Slurm's services, and since when it runs."""
    return [
        node.run("systemctl", "show", "--property=Id,MainPID,ActiveEnterTimestamp", unit).stdout
        for unit in ("slurmctld", "slurmd", "slurmdbd", "mariadb", "munge")
    ]
