"""Everything below a root that may be removed, what it takes on disk, and why it stays or is removed only by name."""

import os
import pwd
import re
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from hyperpod_ft.clean.needs import NeedIndex, needs
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.snapshot import is_held
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import runs_directory
from hyperpod_ft.runs.selection import choose

Kind = Literal[
    "runs",
    "checkpoints",
    "discarded",
    "logs",
    "secrets",
    "artifacts",
    "models",
    "datasets",
    "environments",
    "evaluations",
    "graphs",
    "compiled",
    "code",
    "leftovers",
]
# `track` and `eval` may install for a run that is finished, and write nothing for a while
_SETTLED_SECONDS = 3600
KINDS: tuple[Kind, ...] = get_args(Kind)
# directories whose entries runs share; those without a pattern may have any name
_SHARED: tuple[tuple[Kind, str, str], ...] = (
    ("models", "models", r"[^.].*@.*"),
    ("models", "adapters", r"[^.].*@.*"),
    ("datasets", "datasets", r"[0-9a-f]{16}"),
    ("datasets", "datasets/raw", r"[^.].*@.*"),
    ("environments", "envs", r"([a-z]+-)?[0-9a-f]{16}(\.sqsh)?"),
    ("evaluations", "evaluations", r"hub"),
    ("evaluations", "evaluations/base", r"[^.].*@.*"),
    ("evaluations", "evaluations/tasks", r"[^.].*"),
    ("graphs", "neuron-cache", r"[0-9a-f]{16}"),
    ("compiled", "compile-cache", r"torch-.*"),
    ("code", "code", r"hyperpod-ft-.*-[0-9a-f]{32}"),
)
# `publish` writes and removes under such names; the group is what they become
_LEFTOVER = re.compile(r"\.(.+?)(\.partial(-.*)?|(\.\d+)?\.replaced)")


@dataclass(frozen=True)
class KnownRun:
    """A run below the root."""

    run: Run
    finished: bool  # nothing is left to do
    needs: frozenset[str]

    @property
    def name(self) -> str:
        return self.run.paths.full_name


@dataclass(frozen=True)
class Item:
    """Something that may be removed, or why it may not."""

    kind: Kind
    name: str  # its path, relative to the root
    path: Path
    run: str = ""  # the run that it belongs to
    kept: str = ""  # why it must stay; empty if it may go
    only_by_name: str = ""  # why asking for its kind is not enough; empty if it is


@dataclass(frozen=True)
class Inventory:
    """Everything below a root that grows."""

    root: Path
    runs: tuple[KnownRun, ...]
    unreadable: tuple[str, ...]  # why runs could not be opened
    items: tuple[Item, ...]


def take_inventory(root: Path, without: Collection[str] = ()) -> Inventory:
    """The inventory of a root, as if the runs named `without` were gone. Raises UserError for another directory."""
    if not runs_directory(root).is_dir():
        raise UserError(f"{root}: has no directory runs", "give the cluster.root of runs")
    runs: list[KnownRun] = []
    unreadable: list[str] = []
    for directory in _run_directories(root, unreadable):
        try:
            run = Run.open(directory)
            run.journal.jobs()  # a damaged jobs.json is a reason to keep it
            if run.paths.root.resolve() != root.resolve():  # through a link: what needs its files is written there
                raise UserError(f"is a run of {run.paths.root}")
            runs.append(KnownRun(run, not choose(run), needs(run)))
        except (UserError, OSError) as error:
            unreadable.append(f"{directory}: {error.problem if isinstance(error, UserError) else error.strerror}")
    staying = [known for known in runs if known.run.paths.relative(known.run.paths.directory) not in without]
    unfinished = NeedIndex((known.name, known.needs) for known in staying if not known.finished)
    finished = NeedIndex((known.name, known.needs) for known in staying if known.finished)
    shared_stays = "a run cannot be opened, which may need it" if unreadable else ""
    items = []
    for known in runs:
        items += [_judged(item, unfinished, finished) for item in _items_of(known)]
    for item in _shared_items(root):
        judged = _judged(item, unfinished, finished)
        items.append(_kept(judged, shared_stays) if shared_stays and not judged.kept else judged)
    return Inventory(root, tuple(runs), tuple(unreadable), tuple(items))


def _run_directories(root: Path, unreadable: list[str]) -> Iterator[Path]:
    for name in _directories(runs_directory(root), unreadable):
        for directory in _directories(name, unreadable):
            try:
                (directory / "run.yaml").lstat()
            except FileNotFoundError:
                continue  # not a run
            except OSError as error:
                unreadable.append(f"{directory}: {error.strerror}")
                continue
            yield directory


def _directories(parent: Path, unreadable: list[str]) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        unreadable.append(f"{parent}: {error.strerror}")
        return []


def _items_of(known: KnownRun) -> Iterator[Item]:
    """What a run's own directory has."""
    run = known.run

    def item(kind: Kind, path: Path, kept: str = "", only_by_name: str = "") -> Item:
        return Item(kind, run.paths.relative(path), path, known.name, kept, only_by_name)

    yield item(
        "runs", run.paths.directory, only_by_name="a finished run" if known.finished else "a run that is not finished"
    )
    if run.paths.checkpoints.is_dir():
        yield item(
            "checkpoints", run.paths.checkpoints, "" if run.journal.is_done("consolidate") else "is not consolidated"
        )
    with_discarded = (run.paths.directory, run.paths.restarts_path("train").parent, run.paths.tuned_scores.parent)
    for directory in with_discarded:
        for path in sorted(directory.glob("*.discarded-*")):
            yield item("discarded", path)
    if run.paths.logs.is_dir():
        yield item("logs", run.paths.logs, only_by_name="" if known.finished else "the run is not finished")
    if any(run.paths.secrets_directory.glob("*")):  # that a job without an end of its own has left
        yield item("secrets", run.paths.secrets_directory)
    artifacts = run.paths.serving / "neuron-artifacts"
    if artifacts.is_dir():
        yield item("artifacts", artifacts)
    for directory in (*with_discarded, run.paths.checkpoints):
        for path in _leftovers(directory):
            yield item("leftovers", path, "" if known.finished else "the run is not finished")


def _shared_items(root: Path) -> Iterator[Item]:
    """What runs share."""
    for kind, directory, pattern in _SHARED:
        parent = root / directory
        for path in sorted(parent.glob("*")):
            if re.fullmatch(pattern, path.name):
                yield Item(kind, f"{directory}/{path.name}", path)
    names = [path for path in runs_directory(root).glob("*") if not path.is_symlink()]  # a link may lead anywhere
    for parent in (*(root / directory for _, directory, _ in _SHARED), *names):
        for path in _leftovers(parent):
            yield Item("leftovers", path.relative_to(root).as_posix(), path)


def _leftovers(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(".*") if _LEFTOVER.fullmatch(path.name))


def _judged(item: Item, unfinished: NeedIndex, finished: NeedIndex) -> Item:
    """The item, with why it must stay. A writer may still use a leftover: it counts as the final file."""
    path = Path(item.name)
    leftover = _LEFTOVER.fullmatch(path.name) if item.kind == "leftovers" else None
    name = str(path.with_name(leftover[1])) if leftover else item.name
    if item.kept:
        return item
    if leftover and ".partial" in path.name and usages([item.path])[item.path].changed > time.time() - _SETTLED_SECONDS:
        return _kept(item, "changed within the last hour: it may be being written")
    if owner := _other_owner(item.path):
        return _kept(item, f"belongs to {owner}")
    if waiting := unfinished.runs_that_need(name):
        return _kept(item, f"needed by {_named(waiting)}, not finished")
    if item.kind == "code":
        try:
            if is_held(item.path):
                return _kept(item, "a server imports from it")
        except OSError as error:
            return _kept(item, f"cannot tell whether a server imports from it: {error.strerror}")
    if not leftover and (used := finished.runs_that_need(name)):
        return replace(item, only_by_name=f"used by {_named(used)}, finished")
    return item


def _kept(item: Item, why: str) -> Item:
    return replace(item, kept=why, only_by_name="")


def _named(runs: list[str]) -> str:
    return runs[0] if len(runs) == 1 else f"{runs[0]} and {len(runs) - 1} more"


def _other_owner(path: Path) -> str:
    """The name of the owner if that is another user; empty for this one's, and for root."""
    try:
        owner = path.lstat().st_uid
    except OSError:
        return "another user"
    if owner == os.geteuid() or os.geteuid() == 0:
        return ""
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"user {owner}"


_THREADS = 16
_BLOCK = 512  # bytes, the unit of st_blocks


@dataclass(frozen=True)
class DiskUsage:
    """What a file or tree takes."""

    size: int = 0  # bytes on disk
    changed: float = 0.0  # Unix time of the newest change

    def __add__(self, other: "DiskUsage") -> "DiskUsage":
        return DiskUsage(self.size + other.size, max(self.changed, other.changed))


def usages(paths: Iterable[Path]) -> dict[Path, DiskUsage]:
    """What each file or tree takes, and when it last changed. What cannot be read counts as empty.

    Several threads read: a shared volume answers each request slowly, and many at once.
    """
    found = {path: _own(path) for path in paths}
    # each entry by itself: one tree may hold nearly everything
    children = [(path, child) for path in found for child in _children(path)]
    with ThreadPoolExecutor(_THREADS) as pool:
        for (path, _), usage in zip(children, pool.map(_usage_of, [child for _, child in children]), strict=True):
            found[path] += usage
    return found


def _children(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [] if path.is_symlink() else [entry.path for entry in entries]
    except OSError:  # a file
        return []


def _own(path: Path) -> DiskUsage:
    try:
        status = path.lstat()
    except OSError:
        return DiskUsage()
    return DiskUsage(status.st_blocks * _BLOCK, status.st_mtime)


def _usage_of(path: str) -> DiskUsage:
    """Of a tree, without following links. Hard links are counted as often as they are found."""
    total, newest, waiting = 0, 0.0, [path]
    while waiting:
        current = waiting.pop()
        try:
            status = os.lstat(current)
            total += status.st_blocks * _BLOCK
            newest = max(newest, status.st_mtime)
            if (status.st_mode & 0o170000) == 0o040000:
                with os.scandir(current) as entries:
                    waiting += [entry.path for entry in entries]
        except OSError:
            continue
    return DiskUsage(total, newest)
