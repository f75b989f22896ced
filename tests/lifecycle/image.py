"""What a node finds on its disk when lifecycle scripts start: what AWS's AMI holds, and what HyperPod writes.

Stand-ins, and what they stand for: Debian's Slurm below /opt/slurm for AWS's build there; units of slurmctld, slurmd
and slurmdbd as AWS's scripts expect them (slurmd's deletes slurm.conf before it starts and has `$SLURMD_OPTIONS`);
`mount.lustre` for Lustre's client: it mounts the one directory that all nodes share; `imds.py` for the instance
metadata service; a `neuron-ls` that shows 16 devices. slurm.conf is what HyperPod's agent leaves on the controller, but
for what namespaces cannot have (control groups with controllers) and CPUs that are not there.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SLURM_PROGRAMS = {
    "bin": (
        "sacct",
        "sacctmgr",
        "salloc",
        "sbatch",
        "scancel",
        "scontrol",
        "sdiag",
        "sinfo",
        "squeue",
        "srun",
        "sstat",
    ),
    "sbin": ("slurmctld", "slurmd", "slurmstepd", "slurmdbd"),
}
FSX_DNS_NAME = "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com"
FSX_MOUNT_NAME = "4owupbev"
FSX_SOURCE = f"{FSX_DNS_NAME}@tcp:/{FSX_MOUNT_NAME}"
CLUSTER_NAME = "ml-cluster"

_UNIT = """\
[Unit]
Description={description}
After=munge.service network-online.target

[Service]
Type=simple
EnvironmentFile=-/etc/default/{name}
{before}ExecStart=/opt/slurm/sbin/{name} -D ${options}
ExecReload=/bin/kill -HUP $MAINPID
KillMode=process
LimitNOFILE=131072
LimitMEMLOCK=infinity
LimitSTACK=infinity
Delegate=yes

[Install]
WantedBy=multi-user.target
"""
_IMDS_UNIT = """\
[Service]
ExecStart=/usr/bin/python3 /opt/stand-ins/imds.py /opt/stand-ins/instance.json
"""
_MOUNT_LUSTRE = """\
#!/bin/sh
# mount.lustre SOURCE DIRECTORY -o OPTIONS
if ! grep -qFx "$1" /opt/stand-ins/fsx; then
  echo "mount.lustre: mount $1 at $2 failed: No such file or directory" >&2
  exit 2
fi
exec mount --bind /opt/stand-ins/lustre "$2"
"""
_NEURON_LS = f"""\
#!/bin/sh
# 16 devices, as on a trn1.32xlarge.
cat <<'END'
{json.dumps([{"neuron_device": number, "nc_count": 2, "memory_size": 34359738368} for number in range(16)])}
END
"""
_USERS = {
    "passwd": "ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash",
    "group": "ubuntu:x:1000:",
    "shadow": "ubuntu:!:19000::::::",
}


@dataclass(frozen=True)
class Instance:
    """One machine of an instance group."""

    group: str
    address: str
    instance_id: str
    instance_type: str = "ml.m5.large"

    @property
    def hostname(self) -> str:
        """EC2's: ip-10-1-0-11."""
        return "ip-" + self.address.replace(".", "-")


def write_image(image: Path) -> None:
    """The layer of the AMI, over this machine's root."""
    _write(image / "opt/stand-ins/imds.py", (HERE / "imds.py").read_text())
    _write(image / "opt/stand-ins/fsx", FSX_SOURCE + "\n")
    (image / "opt/stand-ins/lustre").mkdir()
    _write(image / "usr/sbin/mount.lustre", _MOUNT_LUSTRE, 0o755)
    _write(image / "opt/aws/neuron/bin/neuron-ls", _NEURON_LS, 0o755)
    _hide(image / "opt")
    _units(image)
    _slurm(image)
    _users(image)
    _hide(image / "etc/munge")
    shutil.chown(image / "etc/munge", "munge", "munge")
    _write(
        image / "etc/munge/munge.key", "the key that HyperPod distributes: 1024 bits, at least\n" * 3, 0o400, "munge"
    )


def _units(image: Path) -> None:
    for directory in Path("/usr/lib/systemd/system").glob("*.wants"):
        _hide(image / directory.relative_to("/"))
    units = image / "etc/systemd/system"
    _hide(units)
    delete_conf = "ExecStartPre=/bin/rm -f /opt/slurm/etc/slurm.conf\n"
    for name, description, before in (
        ("slurmctld", "Slurm controller daemon", ""),
        ("slurmd", "Slurm node daemon", delete_conf),
        ("slurmdbd", "Slurm DBD accounting daemon", ""),
    ):
        options = f"{name.upper()}_OPTIONS"
        _write(
            units / f"{name}.service", _UNIT.format(name=name, description=description, before=before, options=options)
        )
    _write(units / "imds.service", _IMDS_UNIT)
    wanted = {
        "sysinit.target": ("systemd-journald", "systemd-tmpfiles-setup"),
        "multi-user.target": ("imds", "munge", "ssh", "systemd-user-sessions"),
    }
    for target, names in wanted.items():
        for name in names:
            found = units if name == "imds" else Path("/lib/systemd/system")
            link = units / f"{target}.wants/{name}.service"
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(f"/{found.relative_to(image if name == 'imds' else '/')}/{name}.service")
    (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")


def _slurm(image: Path) -> None:
    slurm = image / "opt/slurm"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for directory, programs in SLURM_PROGRAMS.items():
        (slurm / directory).mkdir(parents=True)
        for program in programs:
            # Debian calls some of them slurmd-wlm, and has slurmd as an alternative.
            if found := shutil.which(program, path=path) or shutil.which(f"{program}-wlm", path=path):
                (slurm / directory / program).symlink_to(found)
    _write(slurm / "etc/accounting.conf", "")
    # Until 24.05 slurmd looks for systemd's scopes over D-Bus unless told v1, which it then leaves alone.
    _write(slurm / "etc/cgroup.conf", "CgroupPlugin=cgroup/v1\n")
    _hide(image / "etc/slurm")
    (image / "etc/slurm").rmdir()
    (image / "etc/slurm").symlink_to("/opt/slurm/etc")  # where Debian's build looks
    for directory in ("spool/slurmctld", "log/slurm"):
        _hide(image / "var" / directory)
        shutil.chown(image / "var" / directory, "slurm", "slurm")
    (image / "var/spool/slurmd").mkdir()
    _write(image / "etc/profile.d/slurm.sh", "PATH=/opt/slurm/bin:/opt/slurm/sbin:$PATH\n")


def _users(image: Path) -> None:
    """This machine's system users, and the AMI's."""
    for name, line in _USERS.items():
        kept = [entry for entry in Path("/etc", name).read_text().splitlines() if _is_system(name, entry)]
        _write(image / "etc" / name, "\n".join([*kept, line, ""]), 0o640 if name == "shadow" else 0o644)
    _hide(image / "root")
    (image / "root").chmod(0o700)
    _hide(image / "home")
    home = image / "home/ubuntu"
    shutil.copytree("/etc/skel", home)
    home.chmod(0o750)
    _write(home / ".ssh/authorized_keys", "")
    (home / ".ssh").chmod(0o700)
    (home / ".ssh/authorized_keys").chmod(0o600)
    for path in (home, *home.rglob("*")):
        os.chown(path, 1000, 1000)


def _is_system(name: str, entry: str) -> bool:
    fields = entry.split(":")
    if name == "shadow":
        passwd = Path("/etc/passwd").read_text().splitlines()
        return any(other.split(":")[0] == fields[0] and _is_system("passwd", other) for other in passwd)
    return not 1000 <= int(fields[2]) < 60000


def resource_config(cluster: Sequence[Instance]) -> str:
    """/opt/ml/config/resource_config.json as HyperPod writes it."""
    groups: dict[str, list[Instance]] = {}
    for instance in cluster:
        groups.setdefault(instance.group, []).append(instance)

    def describe(group: str, place: int, instance: Instance) -> dict[str, Any]:
        return {
            "InstanceName": f"{group}-{place}",
            "InstanceId": instance.instance_id,
            "AgentIpAddress": instance.address.replace("10.1.0.", "172.16.1."),
            "CustomerIpAddress": instance.address,
            "InstanceLabel": None,
        }

    config = {
        "ClusterConfig": {
            "ClusterName": CLUSTER_NAME,
            "ClusterArn": "arn:aws:sagemaker:us-west-2:123456789012:cluster/2hd31rmi9mde",
        },
        "ClusterType": "Slurm",
        "InstanceGroups": [
            {
                "Name": group,
                "InstanceType": instances[0].instance_type,
                "Instances": [describe(group, place, instance) for place, instance in enumerate(instances, 1)],
            }
            for group, instances in groups.items()
        ],
    }
    return json.dumps(config)


def write_instance(layer: Path, instance: Instance, cluster: Sequence[Instance]) -> None:
    """The layer of what HyperPod and EC2 make of an image on one machine."""
    names = "".join(f"{other.address} {other.hostname}\n" for other in cluster)
    _write(layer / "etc/hostname", instance.hostname + "\n")
    _write(layer / "etc/hosts", f"127.0.0.1 localhost\n{names}10.1.0.1 {FSX_DNS_NAME}\n")
    _write(layer / "etc/machine-id", instance.instance_id[2:].rjust(32, "0") + "\n")
    # Nobody answers names here: refused at once, not after a time.
    _write(layer / "etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    _write(layer / "opt/ml/config/resource_config.json", resource_config(cluster))
    identity = {
        "instanceId": instance.instance_id,
        "instanceType": instance.instance_type.removeprefix("ml."),
        "privateIp": instance.address,
        "region": "us-west-2",
    }
    metadata = {
        "/latest/meta-data/instance-id": instance.instance_id,
        "/latest/meta-data/instance-type": identity["instanceType"],
        "/latest/meta-data/local-ipv4": instance.address,
        "/latest/dynamic/instance-identity/document": json.dumps(identity),
    }
    _write(layer / "opt/stand-ins/instance.json", json.dumps(metadata), 0o600)


def slurm_conf(controller: Instance, nodes: Sequence[Instance], *extra: str) -> str:
    """slurm.conf as HyperPod's agent writes it on the controller; `nodes` are those with slurmd, `extra` more lines."""
    return "\n".join(
        [
            f"ClusterName={CLUSTER_NAME}",
            f"SlurmctldHost={controller.hostname}({controller.address})",
            "SlurmctldParameters=enable_configless",
            "SlurmUser=slurm",
            "AuthType=auth/munge",
            "StateSaveLocation=/var/spool/slurmctld",
            "SlurmdSpoolDir=/var/spool/slurmd",
            "SlurmctldLogFile=/var/log/slurm/slurmctld.log",
            "SlurmdLogFile=/var/log/slurm/slurmd.log",
            "SlurmctldPidFile=/run/slurmctld.pid",
            "SlurmdPidFile=/run/slurmd.pid",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "ReturnToService=1",
            "SlurmdTimeout=60",
            "MpiDefault=none",
            # From here: what this machine needs instead of AWS's lines.
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=sched_min_interval=0,sched_interval=2,bf_interval=1,batch_sched_delay=0",
            "MailProg=/bin/true",
            *(
                f"NodeName={node.hostname} NodeAddr={node.address} NodeHostname={node.hostname} CPUs=4 RealMemory=1000"
                for node in nodes
            ),
            "PartitionName=dev Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            *extra,
            "include accounting.conf",
            "",
        ]
    )


def _write(path: Path, text: str, mode: int = 0o644, owner: str = "root") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    shutil.chown(path, owner, owner)


def _hide(directory: Path) -> None:
    """Nothing of this machine's directory of that name shows through."""
    directory.mkdir(parents=True, exist_ok=True)
    os.setxattr(directory, "trusted.overlay.opaque", b"y")
