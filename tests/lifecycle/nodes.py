"""Nodes of a HyperPod cluster on this machine, for tests of `lifecycle/`. Needs root; nothing of it shows outside.

A `Room` is a mount, network and process-id namespace with a bridge (10.1.0.0/24, routed nowhere). Each `Node` in it has
all namespaces that Linux offers a machine (files, network, processes, hostname, IPC, control groups), and real systemd
as its init. Its files are an overlay: the test machine's own root, the image (`image.py`: what the AMI holds), the
instance (what HyperPod writes before lifecycle scripts run), and on top an empty layer, which afterwards holds exactly
what happened on this node. What the nodes share with the machine is its kernel: settings without a namespace are
read-only.

    pytest ── room.sh ── sleep (init of the room)
           └─ nsenter ── unshare ── systemd (init of a node) ── munged, slurmd, ...

Whatever way pytest ends, room.sh's standard input ends, and with the room's init every process, mount and network in
it; so two copies of a test may run at once.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hyperpod_ft.processes import descendants
from tests.lifecycle.image import Instance, write_image, write_instance

HERE = Path(__file__).parent
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "slurmdbd", "mariadbd", "sshd")
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}


def why_not_here() -> str:
    """Why nodes cannot stand on this machine; empty when they can."""
    if os.geteuid() != 0:
        return "nodes need root: namespaces, mounts and users are real"
    if not Path("/lib/systemd/systemd").exists():
        return "nodes need systemd installed (it does not have to run)"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if missing := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        return f"nodes need {', '.join(missing)}: scripts/setup.sh installs them"
    if subprocess.run(["unshare", "-nmpuCf", "true"], check=False, capture_output=True).returncode:
        return "nodes need namespaces, which this container does not allow"
    return ""


class Room:
    """Where nodes stand. `directory` has to be there and stays empty: what is in it only the room sees."""

    def __init__(self, directory: Path, fsx_source: str) -> None:
        self.directory = directory
        self.keeper = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "bash",
                str(HERE / "room.sh"),
                str(directory),
                fsx_source,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for pytest alone, which then ends the room
        )
        assert self.keeper.stdout is not None
        assert self.keeper.stdout.readline() == "ready\n", "no room: see room.sh's message above"
        self.init = descendants(self.keeper.pid)[-1]
        self.files = Path(f"/proc/{self.keeper.pid}/root{directory}")
        write_image(self.files / "image")
        self.nodes: list[Node] = []

    def power_on(self, instance: Instance, cluster: Sequence[Instance]) -> "Node":
        """A new machine of this image, with an empty disk; returns when systemd has started everything."""
        files = self.files / "nodes" / instance.hostname
        shutil.rmtree(files, ignore_errors=True)
        for part in ("instance", "upper", "work", "root"):
            (files / part).mkdir(parents=True)
        (files / "console.log").touch()
        write_instance(files / "instance", instance, cluster)
        node = Node(instance, files, self._boot(instance))
        self.nodes.append(node)
        node.wait_until_up()
        return node

    def _boot(self, instance: Instance) -> "subprocess.Popen[bytes]":
        with (self.files / "nodes" / instance.hostname / "console.log").open("ab") as console:
            return subprocess.Popen(
                [
                    *("nsenter", "--target", str(self.init), "--mount", "--net", "--pid"),
                    *("unshare", "--mount", "--propagation", "private", "--net"),
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
        self.keeper.wait(30)
        for node in self.nodes:
            node.switch.wait(30)


@contextmanager
def room(directory: Path, fsx_source: str) -> Iterator[Room]:
    """A room until the block ends."""
    opened = Room(directory, fsx_source)
    try:
        yield opened
    finally:
        opened.close()


@dataclass
class Node:
    """A running machine. `switch` is the process outside that ends with it; `files` holds its layers."""

    instance: Instance
    files: Path
    switch: "subprocess.Popen[bytes]"
    init: int = field(default=0)

    def wait_until_up(self) -> None:
        """Until systemd has started what is enabled, or `TimeoutError` with what the console shows."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.switch.poll() is None:
            below = descendants(self.switch.pid)
            self.init = next((pid for pid in below if _command(pid) == "systemd"), 0)
            if self.init and self.run("systemctl", "is-active", "multi-user.target", check=False).returncode == 0:
                return
            time.sleep(0.05)
        raise TimeoutError(f"{self.instance.hostname} does not start:\n{(self.files / 'console.log').read_text()}")

    @property
    def root(self) -> Path:
        """Its files, as it sees them, mounts included; only while it runs."""
        return Path(f"/proc/{self.init}/root")

    @property
    def changes(self) -> Path:
        """What was written to its disk since it was powered on."""
        return self.files / "upper"

    def start(self, *argv: str, user: str = "root", log: Path | None = None) -> "subprocess.Popen[str]":
        """Start a program on the node as if by a login; with `log` its output goes there."""
        if user != "root":
            argv = ("runuser", "--login", user, "--command", shlex.join(argv))
        output = log.open("w") if log else subprocess.PIPE
        return subprocess.Popen(
            ["nsenter", "--target", str(self.init), "--all", *argv],
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, *argv: str, user: str = "root", check: bool = True, timeout: float = 60
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program on the node; `AssertionError` with its output where it must not fail."""
        process = self.start(*argv, user=user)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            raise
        finally:
            if process.stdout:
                process.stdout.close()
        assert not check or process.returncode == 0, (
            f"{self.instance.hostname}: {argv} -> {process.returncode}\n{output}"
        )
        return subprocess.CompletedProcess(argv, process.returncode, output, "")

    def power_off(self) -> None:
        """Cut the power: every process of the node is gone."""
        os.kill(self.init, signal.SIGKILL)
        self.switch.wait(30)


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
