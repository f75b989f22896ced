"""Nodes made of namespaces: each a machine of its own to `provision`, all with one shared file system.

A node has a root (an overlay of this machine's, in memory), processes, host name and network (loopback alone) of its
own. All of it goes when its first process ends, which does so when this process closes a pipe or dies. Stand-ins: the
shared file system is a tmpfs that /sbin/mount.lustre binds; instance metadata is a web server on the node's loopback;
the AMI is this machine with a user `ubuntu`. Needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIFECYCLE = Path(__file__).resolve().parents[2] / "lifecycle"
FILE_SYSTEM = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com"
MOUNT_NAME = "4owupbev"
SCRIPTS = "/tmp/sagemaker-lifecycle"
_IMDS_PORT = 8169

SETTINGS: dict[str, Any] = {
    "version": 1,
    "provisioning": "legacy",
    "default_user": "ubuntu",
    "fsx": {"dns_name": FILE_SYSTEM, "mount_name": MOUNT_NAME, "mount_path": "/fsx"},
    "groups": {"controller-machine": "controller", "login-group": "login", "worker-group-1": "compute"},
    "users": [{"name": "alice", "uid": 2001, "gid": 2001}, {"name": "bob", "uid": 2002, "gid": 2002}],
    "accounting": False,
    "metrics": False,
}

# There is no Slurm on these nodes.
ONLY = tuple(
    word
    for step in ("keep_scripts", "limits", "neuron", "ssh_keys", "logrotate", "prolog_epilog")
    for word in ("--only", step)
)

ENVIRONMENT = {
    "PROVISION_IMDS": f"http://127.0.0.1:{_IMDS_PORT}",
    "PROVISION_FSX_TYPE": "tmpfs",
    "PROVISION_DNS_SECONDS": "0",
    "PROVISION_FAILURE_WAIT_SECONDS": "0",
}

_IMDS = """
import http.server, sys
ANSWERS = {"/latest/meta-data/instance-id": sys.argv[1], "/latest/meta-data/local-ipv4": sys.argv[2]}
class Answer(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        self.say("token" if self.headers.get("X-aws-ec2-metadata-token-ttl-seconds") else None)
    def do_GET(self):
        self.say(ANSWERS.get(self.path) if self.headers.get("X-aws-ec2-metadata-token") == "token" else None)
    def say(self, text):
        self.send_response(200 if text else 401)
        self.end_headers()
        self.wfile.write((text or "").encode())
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), Answer).serve_forever()
"""

_MOUNT_LUSTRE = """#!/bin/bash
[[ $1 == SOURCE ]] || { echo "mount.lustre: no file system $1" >&2; exit 1; }
exec mount --bind /srv/lustre "$2"
"""

# On this machine's root, in the node's namespaces: $1 folder, $2 shared file system, $3 host name, $4 files to lay
# over, $5 the metadata server, $6 to $8 its arguments: instance, address, port; $9 a name to resolve.
_SET_UP = r"""
set -e
hostname "$3"
ip link set lo up
ip address add "$7/32" dev lo
mount -t tmpfs -o mode=755 node "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t tmpfs -o mode=755 run run
mount -t tmpfs -o mode=1777 tmp tmp
mkdir -p srv/lustre
mount --bind "$2" srv/lustre
cp -a "$4/." .
echo "127.0.0.1 $9" >>etc/hosts
chroot . bash -ec '
  rm -rf /fsx /home/ubuntu /var/lib/provision /opt/slurm /opt/hyperpod-ft
  other=$(getent passwd 1000 | cut -d : -f 1)
  if [[ -n $other && $other != ubuntu ]]; then userdel --force "$other" 2>/dev/null; fi
  id ubuntu >/dev/null 2>&1 || useradd --uid 1000 --user-group --no-create-home -d /home/ubuntu -s /bin/bash ubuntu
  mkdir -p /home/ubuntu/.ssh /etc/ssh/ssh_config.d && echo "alias ll=\"ls -l\"" >/home/ubuntu/.bashrc
  chmod 700 /home/ubuntu/.ssh && chown -R ubuntu: /home/ubuntu
  rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N "" -f /etc/ssh/ssh_host_ed25519_key
'
chroot . python3 -c "$5" "$6" "$7" "$8" </dev/null >/dev/null 2>&1 &
echo ready
read -r _ || true
"""


def can_make_nodes() -> str:
    """Why not; empty when this machine can."""
    if os.geteuid() != 0:
        return "needs root"
    done = subprocess.run(["unshare", "-mnup", "--fork", "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "namespaces are not allowed here"


@dataclass
class Node:
    """A node. `pid` is its first process, as this machine counts."""

    pid: int
    folder: Path
    address: str

    @property
    def root(self) -> Path:
        """Its root directory, for looking at and changing files from here."""
        return Path(f"/proc/{self.pid}/root{self.folder}/root")

    def path(self, absolute: str) -> Path:
        """Of this node, not following absolute links out of it."""
        return self.root / absolute.lstrip("/")

    def command(self, *argv: str) -> list[str]:
        """What runs `argv` on the node."""
        inside = [_program("chroot"), f"{self.folder}/root", *argv]
        return [_program("nsenter"), "-t", str(self.pid), "-m", "-n", "-u", "-p", *inside]

    def run(
        self, *argv: str, environment: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*argv),
            env=self.environment(environment),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=120,
        )
        if check:
            assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **ENVIRONMENT, **(more or {})}

    def provision(
        self, *arguments: str, environment: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run provision.sh as HyperPod's agent does, without the steps of Slurm if no `--only` says otherwise."""
        only = () if "--only" in arguments else ONLY
        return self.run("bash", f"{SCRIPTS}/provision.sh", *only, *arguments, environment=environment, check=check)

    def settings(self, **changes: Any) -> None:
        """Write settings.json: SETTINGS with these changes."""
        self.path(f"{SCRIPTS}/settings.json").write_text(json.dumps({**SETTINGS, **changes}))

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """Everything that differs from this machine, and the shared file system, without logs."""
        upper = Path(f"/proc/{self.pid}/root{self.folder}/upper")
        found = {}
        for base in (upper, self.path("/srv/lustre"), self.path("/run")):
            for path in sorted(base.rglob("*")):
                name = f"{base.name}/{path.relative_to(base)}"
                if not name.startswith(("upper/var/log/provision", "upper/var/log/journal")):
                    found[name] = _described(path)
        return found


def _program(name: str) -> str:
    """Of this machine, whatever PATH the node is to have."""
    found = shutil.which(name)
    assert found, name
    return found


def _described(path: Path) -> tuple[Any, ...]:
    status = path.lstat()
    content: Any = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, content


@contextmanager
def cluster(folder: Path, addresses: list[str], workers: str = "ml.trn1.32xlarge") -> Iterator[list[Node]]:
    """Nodes with these addresses, the first a controller, the others workers. `folder` is an empty directory."""
    with ExitStack() as stack:
        shared = folder / "lustre"
        shared.mkdir()
        source = f"{FILE_SYSTEM}@tcp:/{MOUNT_NAME}"
        script = 'mount -t tmpfs -o mode=755 "$1" "$2"; echo ready; read -r _ || true'
        outer = _hold(stack, ["unshare", "-m", "bash", "-c", script, "-", source, str(shared)])
        yield [
            _node(stack, outer, folder, shared, addresses, number, source, workers) for number in range(len(addresses))
        ]


def _node(
    stack: ExitStack,
    outer: int,
    folder: Path,
    shared: Path,
    addresses: list[str],
    number: int,
    source: str,
    workers: str,
) -> Node:
    address = addresses[number]
    own = folder / address
    files = folder / f"{address}.files"
    own.mkdir()
    shutil.copytree(LIFECYCLE, files / SCRIPTS.lstrip("/"), ignore=shutil.ignore_patterns("__pycache__"))
    (files / SCRIPTS.lstrip("/") / "settings.json").write_text(json.dumps(SETTINGS))
    config = files / "opt/ml/config/resource_config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(resource_config(addresses, workers)))
    mount = files / "usr/sbin/mount.lustre"
    mount.parent.mkdir(parents=True)
    mount.write_text(_MOUNT_LUSTRE.replace("SOURCE", source))
    mount.chmod(0o755)
    host = "ip-" + address.replace(".", "-")
    arguments = [str(own), str(shared), host, str(files), _IMDS, instance_id(number), address, str(_IMDS_PORT)]
    arguments.append(FILE_SYSTEM)
    inside = ["unshare", "-m", "-n", "-u", "-p", "--fork", "--kill-child", "bash", "-c", _SET_UP, "-", *arguments]
    held = _hold(stack, ["nsenter", "-t", str(outer), "-m", *inside])
    child = Path(f"/proc/{held}/task/{held}/children").read_text().split()[0]
    return Node(int(child), own, address)


def _hold(stack: ExitStack, argv: list[str]) -> int:
    """Start a process that says `ready` and lives until its standard input ends. Returns its number."""
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stack.callback(process.communicate)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process.pid


def instance_id(number: int) -> str:
    return f"i-0aaaaaaaaaaaaaa{number:02d}"


def resource_config(addresses: list[str], workers: str) -> dict[str, Any]:
    """HyperPod's list of instances; the login group has none yet."""
    entries = [
        {"InstanceName": f"node-{number}", "InstanceId": instance_id(number), "CustomerIpAddress": address}
        for number, address in enumerate(addresses)
    ]
    return {
        "ClusterConfig": {"ClusterName": "ml-cluster", "ClusterArn": "arn:aws:sagemaker:us-west-2:1:cluster/x"},
        "InstanceGroups": [
            {"Name": "controller-machine", "InstanceType": "ml.c5.xlarge", "Instances": entries[:1]},
            {"Name": "worker-group-1", "InstanceType": workers, "Instances": entries[1:]},
            {"Name": "login-group", "InstanceType": "ml.m5.xlarge", "Instances": None},
        ],
    }
