"""Slurm's configuration as text (pure): read what HyperPod's agent wrote, render what these scripts add.

Formats: slurm.conf(5), topology.conf(5), slurmdbd.conf(5). Only options that every Slurm since 22.05 knows.
"""

from __future__ import annotations

import re
from typing import Sequence

SLURM_CONF = "/opt/slurm/etc/slurm.conf"
INCLUDED = "accounting.conf"
INCLUDED_CONF = "/opt/slurm/etc/accounting.conf"
TOPOLOGY_CONF = "/opt/slurm/etc/topology.conf"
TOPOLOGY_YAML = "/opt/slurm/etc/topology.yaml"
SLURMDBD_CONF = "/opt/slurm/etc/slurmdbd.conf"
EPILOG = "/opt/slurm/etc/epilog.d/800_hyperpod-ft.sh"
DATABASE = "slurm_acct_db"
DATABASE_USER = "slurm"
SLURMDBD_PORT = 6819
MARK = "# Written whole by hyperpod-ft's lifecycle scripts: changes do not last."

_PASSWORD = re.compile(r"[A-Za-z0-9_-]{16,}", re.ASCII)


def lines(conf: str) -> list[str]:
    """The lines, stripped, without comments and blank lines."""
    bare = (line.split("#", 1)[0].strip() for line in conf.splitlines())
    return [line for line in bare if line]


def value(conf: str, key: str) -> str:
    """The last value of `key`, ignoring case; "" if it is not set."""
    found = ""
    for line in lines(conf):
        name, separator, text = line.partition("=")
        if separator and name.strip().lower() == key.lower():
            found = text.strip()
    return found


def names_controller(conf: str, addresses: Sequence[str]) -> bool:
    """Whether a SlurmctldHost is one of `addresses`: an outdated file, or the AMI's, does not have ours.

    The agent writes `SlurmctldHost=ip-10-1-0-11(10.1.0.11)`.
    """
    hosts = [line.partition("=")[2] for line in lines(conf) if re.match(r"SlurmctldHost(\[\d+\])?\s*=", line, re.I)]
    return any(address in re.split(r"[()\s]+", host) for host in hosts for address in addresses)


def includes(conf: str) -> bool:
    """Whether slurm.conf includes our file."""
    return any(_is_include(line) for line in lines(conf))


def with_included(conf: str, text: str) -> str:
    """slurm.conf as slurmctld reads it, with our file in place of the line that includes it."""
    return "\n".join(text if _is_include(line) else line for line in lines(conf))


def _is_include(line: str) -> bool:
    words = line.split()
    return words[0].lower() == "include" and words[-1] in (INCLUDED, INCLUDED_CONF)


def node_names(conf: str) -> list[str]:
    """Every NodeName, hostlists like `ip-10-1-0-[11-13]` as they are written."""
    found = (re.match(r"NodeName\s*=\s*(\S+)", line, re.I) for line in lines(conf))
    return [match.group(1) for match in found if match and match.group(1).upper() != "DEFAULT"]


def topology(conf: str, current: str) -> str:
    """The text for topology.conf, given slurm.conf and the current topology.conf; "" if there is nothing to write.

    With `topology/tree` and no switch, no node is reachable from another and slurmctld refuses every job. HyperPod's
    switches are kept; those of these scripts are updated with the nodes.
    """
    if value(conf, "TopologyPlugin") != "topology/tree" or not node_names(conf):
        return ""
    if lines(current) and MARK not in current:
        return ""
    return f"{MARK}\nSwitchName=all Nodes={','.join(node_names(conf))}\n"


def topology_faults(conf: str, topology_conf: str, topology_yaml: str | None) -> list[str]:
    """What in these files keeps Slurm from starting jobs, or from starting. `topology_yaml`: None if it is missing.

    Seen on HyperPod's AMIs since April 2026, whose agent writes them (pull requests 14 and 23 of
    aws-samples/sample-physical-ai-scaffolding-kit). topology.yaml(5): if that file exists, topology.conf is ignored.
    """
    partitions = re.findall(r"^\s*PartitionName=(\S+)\s(?:.*\s)?Topology=(\S+)", conf, re.IGNORECASE | re.MULTILINE)
    if topology_yaml is not None:
        known = re.findall(r"^[\s-]*topology:\s*[\"']?([^\s\"'#]+)", topology_yaml, re.MULTILINE)
        return [
            f"{TOPOLOGY_YAML} does not define {name!r}, the topology of partition {partition}: slurmctld may crash; "
            f"remove Topology={name} from {SLURM_CONF}, and {TOPOLOGY_YAML} if it is empty, then restart slurmctld"
            for partition, name in partitions
            if name not in known
        ]
    if value(conf, "TopologyPlugin") == "topology/tree" and "switchname" not in "".join(lines(topology_conf)).lower():
        return [
            f"{SLURM_CONF} has topology/tree, but {TOPOLOGY_CONF} has no switch: jobs are refused with 'Requested "
            "topology configuration is not available'; add a SwitchName with all nodes and run scontrol reconfigure"
        ]
    return []


def included(accounting_host: str) -> str:
    """The file that slurm.conf includes. `accounting_host`: the host of slurmdbd, "" without accounting."""
    text = f"{MARK}\nEpilog=/opt/slurm/etc/epilog.d/*\n"
    if accounting_host:
        text += (
            "JobAcctGatherType=jobacct_gather/linux\n"
            "JobAcctGatherFrequency=30\n"
            "AccountingStorageType=accounting_storage/slurmdbd\n"
            f"AccountingStorageHost={accounting_host}\n"
            f"AccountingStoragePort={SLURMDBD_PORT}\n"
        )
    return text


def slurmdbd(address: str, slurm_user: str, password: str) -> str:
    """slurmdbd.conf: the database on the same machine, through its socket."""
    return (
        f"{MARK}\n"
        "AuthType=auth/munge\n"
        "DbdHost=localhost\n"
        f"DbdAddr={address}\n"
        f"DbdPort={SLURMDBD_PORT}\n"
        f"SlurmUser={slurm_user}\n"
        "LogFile=/var/log/slurm/slurmdbd.log\n"
        "PidFile=/run/slurmdbd.pid\n"
        "StorageType=accounting_storage/mysql\n"
        "StorageHost=localhost\n"
        f"StorageUser={DATABASE_USER}\n"
        f"StoragePass={password}\n"
        f"StorageLoc={DATABASE}\n"
    )


def password_of(slurmdbd_conf: str) -> str:
    """The password in a slurmdbd.conf that these scripts wrote; "" in any other."""
    found = value(slurmdbd_conf, "StoragePass")
    return found if MARK in slurmdbd_conf and _PASSWORD.fullmatch(found) else ""


def database_statements(password: str) -> str:
    """SQL that creates the database and user for slurmdbd, if missing. Never pass it on a command line."""
    if not _PASSWORD.fullmatch(password):
        raise ValueError("not a password of these scripts")
    user = f"'{DATABASE_USER}'@'localhost'"
    return (
        f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
        f"CREATE USER IF NOT EXISTS {user};\n"
        f"ALTER USER {user} IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON {DATABASE}.* TO {user};\n"
    )
