"""What a node finds on its disk when lifecycle scripts start: what AWS's AMI holds, and what HyperPod writes.

Stand-ins, and what they stand for: Debian's Slurm below /opt/slurm for AWS's build there; units of slurmctld, slurmd
and slurmdbd as AWS's scripts expect them (slurmd's deletes slurm.conf before it starts and has `$SLURMD_OPTIONS`);
`mount.lustre` for Lustre's client: it mounts the one directory that all nodes share; `imds.py` for the instance
metadata service; a `neuron-ls` that shows 16 devices; a `loginctl` that shows no sessions. slurm.conf is what
HyperPod's agent leaves on the controller, but for what namespaces cannot have (control groups with controllers) and
CPUs that are not there. What HyperPod does when it sets up Slurm itself: see hyperpod.py.
"""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.lifecycle.instances import FSX_DNS_NAME, FSX_SOURCE, Instance, resource_config

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
# The init of a node without systemd: bash reaps what loses its parent, and ends when the service does.
_INIT = """\
#!/bin/bash
/usr/bin/python3 /opt/stand-ins/imds.py /opt/stand-ins/instance.json &
wait
"""
_MOUNT_LUSTRE = """\
#!/bin/sh
# mount.lustre SOURCE DIRECTORY -o OPTIONS
if ! grep -qFx "$1" /opt/stand-ins/fsx; then
  echo "mount.lustre: mount $1 at $2 failed: No such file or directory" >&2
  exit 2
fi
exec mount --bind /srv/lustre "$2"
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


def write_image(image: Path, *, systemd: bool) -> None:
    """The layer of the AMI, over this machine's root: with systemd as the init and Slurm, or with neither."""
    _write(image / "opt/stand-ins/imds.py", (HERE / "imds.py").read_text())
    _write(image / "opt/stand-ins/fsx", FSX_SOURCE + "\n")
    (image / "srv/lustre").mkdir(parents=True)
    _write(image / "usr/sbin/mount.lustre", _MOUNT_LUSTRE, 0o755)
    _write(image / "opt/aws/neuron/bin/neuron-ls", _NEURON_LS, 0o755)
    _hide(image / "opt")
    _users(image)
    (image / "etc/ssh/ssh_config.d").mkdir(parents=True)
    _hide(image / "etc/logrotate.d")
    # Ubuntu has it in the package python3-venv, which the AMI lacks.
    ensurepip = Path("/usr/lib").glob("python3.*/ensurepip")
    for path in (Path("/fsx"), Path("/var/lib/provision"), *Path("/etc/ssh").glob("ssh_host_*"), *ensurepip):
        _remove(image, path)
    if not systemd:
        _write(image / "opt/stand-ins/init", _INIT, 0o755)
        return
    (image / "opt/stand-ins/init").symlink_to("/lib/systemd/systemd")
    _hide(image / "root")
    (image / "root").chmod(0o700)
    _units(image)
    _slurm(image)
    _write(image / "usr/bin/loginctl", "#!/bin/sh\n", 0o755)
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
    _hide(image / "home")
    home = image / "home/ubuntu"
    shutil.copytree("/etc/skel", home)
    home.chmod(0o750)
    _write(home / ".bashrc", 'alias ll="ls -l"\n')
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


def write_instance(layer: Path, instance: Instance, cluster: Sequence[Instance]) -> None:
    """The layer of what HyperPod and EC2 make of an image on one machine."""
    names = "".join(f"{other.address} {other.hostname}\n" for other in cluster)
    _write(layer / "etc/hostname", instance.hostname + "\n")
    _write(layer / "etc/hosts", f"127.0.0.1 localhost\n{names}10.1.0.1 {FSX_DNS_NAME}\n")
    _write(layer / "etc/machine-id", instance.instance_id[2:].rjust(32, "0") + "\n")
    # Nobody answers names here: refused at once, not after a time.
    _write(layer / "etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    _write(layer / "opt/ml/config/resource_config.json", json.dumps(resource_config(cluster)))
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
    (layer / "etc/ssh").mkdir()
    key = str(layer / "etc/ssh/ssh_host_ed25519_key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)


def _write(path: Path, text: str, mode: int = 0o644, owner: str = "root") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    shutil.chown(path, owner, owner)


def _hide(directory: Path) -> None:
    """Nothing of this machine's directory of that name shows through."""
    directory.mkdir(parents=True, exist_ok=True)
    os.setxattr(directory, "trusted.overlay.opaque", b"y")


def _remove(image: Path, path: Path) -> None:
    """A node does not have this file or directory of the machine's: an overlay's whiteout."""
    if path.exists():
        whiteout = image / path.relative_to("/")
        whiteout.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(whiteout, stat.S_IFCHR)
