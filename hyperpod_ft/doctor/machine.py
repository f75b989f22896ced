"""Checks of this machine: its clock, its temporary files, and the names that it must resolve."""

import os
import shutil
import socket
import subprocess
import tempfile
from urllib.parse import urlsplit

from hyperpod_ft.doctor.check import DoctorCheck, Expectations
from hyperpod_ft.findings import Finding, error, ok, warning
from hyperpod_ft.job.health import TEMPORARY_GIB
from hyperpod_ft.runs.assets import assets

_HUB = "https://huggingface.co"


def checks(expected: Expectations) -> list[DoctorCheck]:
    return [
        DoctorCheck("clock", clock),
        DoctorCheck("temporary files", temporary),
        DoctorCheck("names", lambda: _names(expected)),
    ]


def clock() -> Finding:
    """munge, TLS and AWS's signatures fail when clocks differ by minutes."""
    try:
        done = subprocess.run(
            ["timedatectl", "show", "--property=NTPSynchronized", "--value"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return warning("clock", "timedatectl does not answer")
    answer = done.stdout.strip()
    if answer not in ("yes", "no"):
        return warning("clock", "timedatectl gives no answer")
    if answer == "no":
        return error("clock", "is not synchronized", "see `timedatectl timesync-status` or `chronyc tracking`")
    return ok("clock", "is synchronized")


def temporary() -> Finding:
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free / 2**30
    if free < TEMPORARY_GIB:
        return error(
            "temporary files", f"{free:.1f} GiB free in {directory}, less than {TEMPORARY_GIB}", "free some space"
        )
    return ok("temporary files", f"{free:.1f} GiB free in {directory}")


def _names(expected: Expectations) -> Finding:
    """The hosts that stages env and download ask. No connection is made."""
    hosts = sorted({host for url in _urls(expected) if (host := urlsplit(url).hostname)})
    if expected.config is None:
        return warning("names", "which hosts a run asks depends on its sources", "give a run file")
    if not hosts:
        return ok("names", "the run file names no host")
    lost = [host for host in hosts if not _resolves(host)]
    if lost:
        return error("names", f"cannot resolve {', '.join(lost)}", "check /etc/resolv.conf and the VPC's DNS support")
    return ok("names", f"resolves {', '.join(hosts)}")


def _urls(expected: Expectations) -> list[str]:
    config = expected.config
    if config is None:
        return []
    hub = [os.environ.get("HF_ENDPOINT", _HUB)] if any(asset.kind == "hub" for _, _, asset in assets(config)) else []
    return [*hub, *config.env.package_repositories]


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False
