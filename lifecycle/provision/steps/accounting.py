"""Slurm's accounting in a MariaDB on the first controller, for `sacct` (optional, legacy path).

Runs before slurmctld first starts: started without accounting, it chooses another cluster id and later refuses the
database. The password is generated here and stored only in slurmdbd.conf, which only slurmdbd's user can read; it is
set in MariaDB through the socket, which root may use without a password.
"""

from __future__ import annotations

import os
import pwd
import secrets
import stat
import subprocess
import time
from typing import Sequence

from provision import apt, slurm_conf, systemd
from provision.errors import NodeError, PassingError
from provision.files import File, read, write
from provision.node import Node
from provision.step import Step
from provision.steps.slurm_configuration import accounting_host

_READY_SECONDS = 120.0


class Accounting(Step):
    name = "accounting"
    needs = ("identify", "slurm_configuration")
    deadline = 900.0

    def needed(self, node: Node) -> bool:
        wanted = node.live and node.settings.provisioning == "legacy" and node.settings.accounting
        return wanted and node.identity.address == accounting_host(node)

    def missing(self, node: Node) -> Sequence[str]:
        found = [*_configuration_missing(node), *systemd.not_kept_running(node, "mariadb")]
        found += systemd.not_kept_running(node, "slurmdbd")
        return found or ([] if _cluster(node) in _clusters(node).stdout.split() else ["no cluster in the accounting"])

    def do(self, node: Node) -> None:
        if systemd.show(node, "mariadb", "LoadState") != "loaded":
            apt.install(node, ["mariadb-server"])
        systemd.keep_running(node, "mariadb")
        fresh = bool(_configuration_missing(node))
        if fresh:
            _write_configuration(node)
        _sql(node, slurm_conf.database_statements(slurm_conf.password_of(read(node, slurm_conf.SLURMDBD_CONF))))
        systemd.keep_running(node, "slurmdbd")
        if fresh:
            node.run("systemctl", "restart", "slurmdbd")
        _wait_until_ready(node)
        if _cluster(node) not in _clusters(node).stdout.split():
            node.run("sacctmgr", "--immediate", "add", "cluster", _cluster(node))


def _owner(node: Node) -> pwd.struct_passwd:
    """The user of Slurm's daemons, from slurm.conf."""
    name = slurm_conf.value(read(node, slurm_conf.SLURM_CONF), "SlurmUser") or "root"
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise NodeError(f"{slurm_conf.SLURM_CONF}: no user {name}", "use HyperPod's AMI") from None


def _configuration_missing(node: Node) -> list[str]:
    text = read(node, slurm_conf.SLURMDBD_CONF)
    owner = _owner(node)
    password = slurm_conf.password_of(text)
    if not password or text != slurm_conf.slurmdbd(node.identity.address, owner.pw_name, password):
        return [f"{slurm_conf.SLURMDBD_CONF} was not written by these scripts"]
    status = node.path(slurm_conf.SLURMDBD_CONF).stat()
    if (stat.S_IMODE(status.st_mode), status.st_uid) != (0o600, owner.pw_uid):
        return [f"{slurm_conf.SLURMDBD_CONF} is not {owner.pw_name}'s alone"]
    return []


def _write_configuration(node: Node) -> None:
    password = slurm_conf.password_of(read(node, slurm_conf.SLURMDBD_CONF)) or secrets.token_urlsafe(24)
    owner = _owner(node)
    write(
        node, File(slurm_conf.SLURMDBD_CONF, slurm_conf.slurmdbd(node.identity.address, owner.pw_name, password), 0o600)
    )
    os.chown(node.path(slurm_conf.SLURMDBD_CONF), owner.pw_uid, owner.pw_gid)


def _sql(node: Node, statements: str) -> None:
    # MariaDB's messages quote statements that they do not understand, which may contain the password.
    done = node.run("mysql", "--user=root", "--batch", stdin=statements, check=False)
    if done.returncode != 0:
        number = done.stderr.partition(":")[0].strip()[:40]
        raise PassingError(
            f"MariaDB failed to create the database {slurm_conf.DATABASE}: {number}", "see journalctl -u mariadb"
        )


def _wait_until_ready(node: Node) -> None:
    end = time.monotonic() + _READY_SECONDS
    while _clusters(node).returncode:
        if time.monotonic() >= end:
            why = systemd.journal(node, "slurmdbd") or "see /var/log/slurm/slurmdbd.log"
            raise PassingError(f"slurmdbd does not answer after {_READY_SECONDS:.0f} s: {why}")
        time.sleep(0.5)


def _cluster(node: Node) -> str:
    return slurm_conf.value(read(node, slurm_conf.SLURM_CONF), "ClusterName").lower()


def _clusters(node: Node) -> subprocess.CompletedProcess[str]:
    """The clusters that slurmdbd knows, one a line."""
    shown = ("sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=cluster")
    return node.run("timeout", "20", *shown, check=False)
