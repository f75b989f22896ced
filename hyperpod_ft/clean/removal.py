"""Remove items that were asked for: decide and rename while nothing is submitted, then delete.

What cannot be decided stays: a run whose launcher does not answer counts as at work.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.annexes import annexes
from hyperpod_ft.clean.inventory import Inventory, Item, Kind, KnownRun, take_inventory, usages
from hyperpod_ft.clean.needs import NeedIndex
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs import volume_lock

_ASKED_AT_ONCE = 8  # launchers


@dataclass(frozen=True)
class Removal:
    """What to remove: items by name, relative to the root, and all of a kind that need not be named."""

    names: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    changed_before: float | None = None  # Unix time; items of a kind that changed later stay


@dataclass(frozen=True)
class Selected:
    """The items that may be removed, and those of the wanted kinds that a job may use."""

    items: tuple[Item, ...]
    at_work: tuple[tuple[Item, str], ...]  # with the reason


def select(inventory: Inventory, wanted: Removal, launchers: Launchers) -> Selected:
    """The wanted items. Asks the launchers of the runs that they belong to, and of those that use them.

    Raises UserError for a name that is not among the items, must stay, or is used by a job.
    """
    known = {item.name: item for item in inventory.items}
    named = []
    for name in wanted.names:
        item = known.get(name)
        if item is None:
            raise UserError(
                f"{name}: not found below {inventory.root}", f"hyperpod-ft clean {inventory.root} lists what there is"
            )
        if item.kept:
            raise UserError(f"{name}: {item.kept}", f"hyperpod-ft clean {inventory.root} lists what can be removed")
        named.append(item)
    by_kind = [
        item for item in inventory.items if item.kind in wanted.kinds and not item.kept and not item.only_by_name
    ]
    if wanted.changed_before is not None:
        taken = usages(item.path for item in by_kind)
        by_kind = [item for item in by_kind if taken[item.path].changed < wanted.changed_before]
    chosen = list(dict.fromkeys([*named, *by_kind]))
    busy = _busy(inventory, chosen, launchers)
    for item in named:
        if why := busy.get(item.name):
            raise UserError(f"{item.name}: {why}", "wait, or cancel it")
    inside = {f"{item.name}/" for item in chosen if item.name not in busy}
    free = [item for item in chosen if item.name not in busy and not any(item.name.startswith(one) for one in inside)]
    return Selected(tuple(free), tuple((item, busy[item.name]) for item in by_kind if item.name in busy))


def remove(root: Path, wanted: Removal, launchers: Launchers) -> Iterator[Item]:
    """Remove what is wanted and may go; yields each item once it is gone. Raises UserError as `select` does.

    The decision is made again here, while no run is submitted: what was listed before may be needed by now.
    """
    failed: OSError | None = None
    renamed = []
    with volume_lock.removing(root):
        for item in select(take_inventory(root, wanted.names), wanted, launchers).items:
            try:
                renamed.append((item, _rename(item.path)))
            except OSError as error:
                failed = failed or error
    for item, path in renamed:
        with contextlib.suppress(FileNotFoundError):  # another clean removes this leftover too
            publish.remove(path)
        if item.kind == "runs":
            _remove_if_empty(item.path.parent)
        yield item
    if failed:
        raise failed


def _rename(path: Path) -> Path:
    """Give it a name under which nothing finds it, and which the next removal takes for a leftover."""
    hidden = path.with_name(f".{path.name.removeprefix('.')}.{os.getpid()}.replaced")
    path.rename(hidden)
    return hidden


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # other runs are in it
        directory.rmdir()


def _busy(inventory: Inventory, chosen: Sequence[Item], launchers: Launchers) -> dict[str, str]:
    """By item, why a job may use it."""
    users = {item.name: _users(inventory, item) for item in chosen}
    asked = {known.name: known for runs in users.values() for known in runs}
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        reasons = dict(zip(asked, pool.map(partial(_at_work, launchers), asked.values()), strict=True))
    return {
        name: f"{known.name}: {reasons[known.name]}"
        for name, runs in users.items()
        for known in runs
        if reasons[known.name]
    }


def _users(inventory: Inventory, item: Item) -> list[KnownRun]:
    """The run that the item belongs to, or the finished runs whose needs include it."""
    if item.run:
        return [known for known in inventory.runs if known.name == item.run]
    if not item.only_by_name:
        return []
    return [known for known in inventory.runs if NeedIndex([(known.name, known.needs)]).runs_that_need(item.name)]


def _at_work(launchers: Launchers, known: KnownRun) -> str:
    """The jobs of the run that have not ended, or why that cannot be seen; empty when there are none."""
    run = known.run
    try:
        active = launchers.active_or_by_hand(run)
    except UserError as error:
        return f"cannot tell whether it has active jobs: {error.problem}"
    try:
        others = [job for annex in annexes() for job in annex.other_jobs(run)]
    except UserError as error:
        return f"cannot tell whether a job serves it: {error.problem}"
    jobs = ", ".join(f"{job.stage} {job.job_id}" for job in [*active, *others])
    return f"is at work: {jobs}" if jobs else ""
