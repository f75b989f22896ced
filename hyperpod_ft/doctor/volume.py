"""Checks of the shared volume: torch, pip and this kit lock, rename and fsync files there.

Files are written in a directory of its own below `cluster.root`, or its closest parent that exists, and removed.
"""

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.doctor.check import DoctorCheck, Expectations
from hyperpod_ft.environments.interpreters import ENVIRONMENT_GB
from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.findings import Finding, error, ok, warning
from hyperpod_ft.job.health import VOLUME_GIB
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.runs.records import Record

_OF_ONE_MACHINE = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs", "squashfs", "f2fs")
REMOUNT = "mount it with flock: mount -o remount,flock, and FsxLustreConfig or /etc/fstab"


def checks(expected: Expectations) -> list[DoctorCheck]:
    return [
        DoctorCheck("cluster.root", lambda: _root(expected)),
        DoctorCheck("volume", lambda: _kind(expected)),
        DoctorCheck("locks", lambda: locks(expected.writable)),
        DoctorCheck("rename and fsync", lambda: renames(expected.writable)),
        DoctorCheck("free space", lambda: _space(expected)),
        DoctorCheck("certificates", lambda: certificates(expected.root)),
    ]


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A directory below `parent`, removed afterwards. Raises UserError if `parent` cannot be written to."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=".hyperpod-ft-doctor-", dir=parent))
    except OSError as problem:
        raise UserError(
            f"{parent}: cannot be written to: {problem.strerror}", "choose another cluster.root"
        ) from problem
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _root(expected: Expectations) -> Finding:
    path = expected.writable
    if os.access(path, os.W_OK | os.X_OK):
        what = "is writable" if path == expected.root else f"does not exist yet; {path} is writable"
        return ok("cluster.root", f"{expected.root} {what}")
    return error(
        "cluster.root",
        f"{expected.root} cannot be made: {path} is not writable for this user",
        f"sudo install -d -o $USER {expected.root}, or set cluster.root to a directory of yours",
    )


def _kind(expected: Expectations) -> Finding:
    kind, options = mount_of(expected.writable.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    if "localflock" in options:
        return error("volume", f"{kind} with localflock: locks hold on one node only", REMOUNT)
    if kind not in _OF_ONE_MACHINE:
        return ok("volume", f"{expected.writable} is on {kind}")
    what = f"{expected.writable} is on {kind}, a disk of this machine"
    try:
        addresses = {node.address for node in expected.nodes}
    except UserError:
        return warning("volume", what, "other nodes would not see it")
    if all(address.startswith("127.") or address in (os.uname().nodename, "localhost") for address in addresses):
        return ok("volume", f"{what}, as all nodes are")
    return error("volume", f"{what}: other nodes do not see it", "set cluster.root to a directory of /fsx")


def mount_of(path: Path, mountinfo: str) -> tuple[str, set[str]]:
    """The kind of file system that holds a path, and its options, from /proc/self/mountinfo."""
    found, length = ("unknown", set[str]()), -1
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        where = Path(fields[4].replace("\\040", " "))
        if path.is_relative_to(where) and len(where.parts) >= length:
            found, length = (rest[0], {*fields[5].split(","), *rest[-1].split(",")}), len(where.parts)
    return found


def locks(path: Path) -> Finding:
    """A file that is locked cannot be locked a second time."""
    with scratch(path) as directory:
        file = directory / "lock"
        try:
            with file.open("w") as first, file.open("w") as second:
                fcntl.flock(first, fcntl.LOCK_EX)
                held = is_locked(second.fileno())
        except OSError as problem:
            return error("locks", f"flock fails on {path}: {problem.strerror}", REMOUNT)
    if not held:
        return error("locks", f"flock on {path} lets two hold a lock", REMOUNT)
    return ok("locks", f"flock works on {path}")


def is_locked(descriptor: int) -> bool:
    """Whether another open file holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def renames(path: Path) -> Finding:
    """A file replaces another whole, and both it and its directory can be synced."""
    row = "rename and fsync"
    with scratch(path) as directory:
        try:
            for text in ("first", "second"):
                publish.write_text(directory / "file", text)
            made = directory / "directory"
            with publish.new_directory(made) as partial:
                (partial / "file").write_text("whole", encoding="utf-8")
            texts = [path.read_text(encoding="utf-8") for path in (directory / "file", made / "file")]
        except OSError as problem:
            return error(row, f"{path}: {problem.strerror}", "use a file system with POSIX's rename and fsync")
    if texts != ["second", "whole"]:
        return error(row, f"{path} returned other content than was written", "have the file system checked")
    return ok(row, f"work on {path}")


def _space(expected: Expectations) -> Finding:
    free = shutil.disk_usage(expected.writable).free
    needed = max(VOLUME_GIB * 2**30, ENVIRONMENT_GB * 1e9 if expected.environment_name else 0)
    found = f"{free / 2**30:.1f} GiB free on {expected.writable}"
    if free < needed:
        return error("free space", f"{found}, less than {needed / 2**30:.0f}", "free some space; see `quota`")
    return ok("free space", found)


def certificates(root: Path) -> Finding:
    """What stage certify has proved for runs on the volume: for types of models, with adapters or all parameters."""
    proved: Counter[str] = Counter()
    for record in map(Record.read, sorted((root / "records").glob("certify-*.json"))):
        if record and (found := Certificate.of(record.facts)):
            what = printable(f"{record.facts.get('model_type')} ({record.facts.get('method')})")
            says = "nothing is proven" if found.not_proven else "one example a row" if found.not_packed else "packed"
            proved[f"{what}: {says}"] += 1
    shown = (f"{text}{f' ({count} times)' if count > 1 else ''}" for text, count in proved.items())
    return ok("certificates", "; ".join(shown) or f"none in {root}")
