"""Nodes of a HyperPod cluster on this machine, for tests of `lifecycle/`. Needs root; nothing of it shows outside.

A `Container` is a mount, network and process-id namespace with a bridge (10.1.0.0/24, routed nowhere). Each `Node` in
it has all namespaces that Linux offers a machine (files, network, processes, hostname, IPC, control groups). Its init
is real systemd, which starts Slurm's daemons, or for tests of single steps (`LIGHT`) a shell that keeps the instance
metadata service. Its files are an overlay: the test machine's own root, the image (`image.py`: what the AMI holds),
the instance (what HyperPod writes before lifecycle scripts run), and on top an empty layer, which afterwards holds
exactly what happened on this node. What the nodes share with the machine is its kernel: settings without a namespace
are read-only.

    pytest ── container.sh ── sleep (init of the container)
           └─ nsenter ── unshare ── systemd (init of a node) ── munged, slurmd, ...

Whatever way pytest ends, container.sh's standard input ends, and with the container's init every process, mount and
network in it; so two copies of a test may run at once.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.cluster import config as cluster_config
from hyperpod_ft.cluster.hyperpod import lifecycle_files
from hyperpod_ft.processes import descendants
from tests.lifecycle.image import write_image, write_instance
from tests.lifecycle.instances import FSX_SOURCE, SETTINGS, Instance
from tests.waiting import wait_for

HERE = Path(__file__).parent
LIFECYCLE = HERE.parents[1] / "lifecycle"
# Where HyperPod puts the scripts: below /tmp, by bucket and prefix.
SCRIPTS = "/tmp/sagemaker-ml-cluster-bucket/lifecycle"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "slurmdbd", "mariadbd", "sshd")
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    # The stand-in for Lustre is a tmpfs, and names are in /etc/hosts.
    "PROVISION_FSX_TYPE": "tmpfs",
    "PROVISION_DNS_SECONDS": "0",
    "PROVISION_FAILURE_WAIT_SECONDS": "0",
    "PROVISION_SLURM_SECONDS": "0",
}


@dataclass(frozen=True)
class Kind:
    """What runs on a node. `ready` succeeds there once it is up; `steps` limits provision.sh to what it can do."""

    systemd: bool
    ready: tuple[str, ...]
    steps: tuple[str, ...] = ()


SYSTEMD = Kind(True, ("systemctl", "is-active", "multi-user.target"))
LIGHT = Kind(
    False,
    ("bash", "-c", "exec 3<>/dev/tcp/169.254.169.254/80"),
    ("keep_scripts", "limits", "neuron", "ssh_keys", "ssh_hosts", "logrotate", "epilog"),
)


def why_not_here(kind: Kind) -> str:
    """Why nodes of this kind cannot run on this machine; empty when they can."""
    if os.geteuid() != 0:
        return "nodes need root: namespaces, mounts and users are real"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if kind.systemd and not Path("/lib/systemd/systemd").exists():
        return "nodes need systemd installed (it does not have to run)"
    if kind.systemd and (missing := [program for program in PROGRAMS if not shutil.which(program, path=path)]):
        return f"nodes need {', '.join(missing)}: scripts/setup.sh installs them"
    if subprocess.run(["unshare", "-nmpuCf", "true"], check=False, capture_output=True).returncode:
        return "nodes need namespaces, which this container does not allow"
    return ""


class Container:
    """Holds the nodes of a test. `directory` must exist and stays empty: what is in it only the container sees."""

    def __init__(self, directory: Path, kind: Kind) -> None:
        self.directory = directory
        self.kind = kind
        self.keeper = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "bash",
                str(HERE / "container.sh"),
                str(directory),
                FSX_SOURCE,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for pytest alone, which then ends the container
        )
        assert self.keeper.stdout is not None
        assert self.keeper.stdout.readline() == "ready\n", "no container: see container.sh's message above"
        self.init = descendants(self.keeper.pid)[-1]
        self.files = Path(f"/proc/{self.keeper.pid}/root{directory}")
        write_image(self.files / "image", systemd=kind.systemd)
        self.nodes: list[Node] = []
        self.packages = ""  # a directory of this machine that nodes see as /opt/stand-ins/packages

    def power_on(self, instance: Instance, cluster: Sequence[Instance]) -> "Node":
        """A new machine of this image, with an empty disk; returns when its services run."""
        files = self.files / "nodes" / instance.hostname
        shutil.rmtree(files, ignore_errors=True)
        for part in ("instance", "upper", "work", "root"):
            (files / part).mkdir(parents=True)
        (files / "console.log").touch()
        write_instance(files / "instance", instance, cluster)
        node = Node(instance, self.kind, files, self._boot(instance))
        self.nodes.append(node)
        node.wait_until_up()
        return node

    def _boot(self, instance: Instance) -> "subprocess.Popen[bytes]":
        with (self.files / "nodes" / instance.hostname / "console.log").open("ab") as console:
            return subprocess.Popen(
                [
                    *("nsenter", "--target", str(self.init), "--mount", "--net", "--pid"),
                    *("env", f"PACKAGES={self.packages}", "unshare", "--mount", "--propagation", "private", "--net"),
                    *("bash", str(HERE / "node_boot.sh"), str(self.directory), instance.hostname, instance.address),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    def close(self) -> None:
        """End everything."""
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        self.keeper.wait(300)
        for node in self.nodes:
            node.switch.wait(300)


@contextmanager
def container(directory: Path, kind: Kind = SYSTEMD) -> Iterator[Container]:
    """A container that ends with the block."""
    opened = Container(directory, kind)
    try:
        yield opened
    finally:
        opened.close()


@dataclass
class Node:
    """A running machine. `switch` is the process outside that ends with it; `files` holds its layers."""

    instance: Instance
    kind: Kind
    files: Path
    switch: "subprocess.Popen[bytes]"
    init: int = field(default=0)

    def wait_until_up(self) -> None:
        """Until its services run, or `AssertionError` with what the console shows."""

        def is_up() -> bool:
            below = descendants(self.switch.pid)
            self.init = next((pid for pid in below if _command(pid) in ("init", "systemd")), 0)
            return self.init > 0 and self.run(*self.kind.ready, check=False).returncode == 0

        def shown() -> str:
            return f"{self.instance.hostname} does not start:\n{(self.files / 'console.log').read_text()}"

        wait_for(is_up, 300, shown, every=0.05, process=self.switch)

    @property
    def root(self) -> Path:
        """Its files, as it sees them, mounts included; only while it runs."""
        return Path(f"/proc/{self.init}/root")

    @property
    def changes(self) -> Path:
        """What was written to its disk since it was powered on."""
        return self.files / "upper"

    def path(self, absolute: str) -> Path:
        """One of its files."""
        return self.root / absolute.lstrip("/")

    def start(
        self,
        *argv: str,
        user: str = "root",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> "subprocess.Popen[str]":
        """Start a program on the node as if by a login; with `log` all its output goes there."""
        if environment:
            # By a program of the node: nsenter is found with this machine's PATH, `argv` with the node's.
            argv = ("/usr/bin/env", *(f"{key}={value}" for key, value in environment.items()), *argv)
        if user != "root":
            argv = ("runuser", "--login", user, "--command", shlex.join(argv))
        output = log.open("w") if log else subprocess.PIPE
        return subprocess.Popen(
            ["nsenter", "--target", str(self.init), "--all", *argv],
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        *argv: str,
        user: str = "root",
        environment: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program on the node; `AssertionError` with its output if it fails and `check` is set."""
        with self.start(*argv, user=user, environment=environment) as process:
            try:
                output, errors = process.communicate(timeout=1800)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
                raise
        shown = f"{self.instance.hostname}: {argv} -> {process.returncode}\n{output}\n{errors}"
        assert not check or process.returncode == 0, shown
        return subprocess.CompletedProcess(argv, process.returncode, output, errors)

    def download_scripts(self, settings: Mapping[str, Any] = SETTINGS) -> None:
        """What HyperPod does before it runs provision.sh."""
        shutil.copytree(LIFECYCLE, self.path(SCRIPTS), ignore=shutil.ignore_patterns("__pycache__"))
        self.write_settings(settings)

    def download_uploaded(self, bucket: str, settings: Mapping[str, Any]) -> Path:
        """What `cluster create` uploads, with these settings, in a folder for the bucket; returns its own folder."""
        content = {path.relative_to(LIFECYCLE).as_posix(): path.read_bytes() for path in lifecycle_files.scripts()}
        content["settings.json"] = json.dumps(settings).encode()
        folder = Path(bucket, lifecycle_files.folder(cluster_config.load(cluster_config.example()), content))
        for name, data in {**content, lifecycle_files.MANIFEST: lifecycle_files.manifest(content)}.items():
            file = self.path(f"{folder}/{name}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return folder

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        self.path(f"{SCRIPTS}/settings.json").write_text(json.dumps(settings))

    def provision_command(self, *arguments: str) -> tuple[str, ...]:
        """provision.sh as HyperPod runs it, with the steps that this kind of node can do unless `--only` names some."""
        only = () if "--only" in arguments else tuple(word for step in self.kind.steps for word in ("--only", step))
        return ("bash", f"{SCRIPTS}/provision.sh", *only, *arguments)

    def provision(
        self, *arguments: str, environment: Mapping[str, str] | None = None, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        return self.run(*self.provision_command(*arguments), environment=environment, check=check)

    def power_off(self) -> None:
        """Cut the power: every process of the node is gone."""
        os.kill(self.init, signal.SIGKILL)
        self.switch.wait(300)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all below it, first stopping them so that none starts another meanwhile."""
    seen: set[int] = set()
    while fresh := {pid, *descendants(pid)} - seen:
        seen |= fresh
        _signal(fresh, signal.SIGSTOP)
    _signal(seen, signal.SIGKILL)


def _signal(pids: Sequence[int] | set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
