"""`hyperpod-ft clean`: what grows on the volume, and removing what was asked for."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import Root, Yes
from hyperpod_ft.cli.output.tables import print_json

if TYPE_CHECKING:
    from hyperpod_ft.clean.inventory import DiskUsage, Inventory, Item

_DAY = 86_400.0
_SHOWN = 40  # the largest items


def clean(
    root: Root = None,
    what: Annotated[
        list[str] | None,
        typer.Option("--what", metavar="KIND", help="Remove all of a kind that no run needs, e.g. checkpoints."),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME", help="Remove one thing that is listed, e.g. runs/NAME/ID."),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", help="With --what: only what has not changed for so long."),
    ] = None,
    yes: Yes = False,
    everything: Annotated[bool, typer.Option("--all", help="List everything, not only the largest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. Removes nothing.")] = False,
) -> None:
    """Show what grows on the volume, with sizes, ages and what needs it. Removes only what you ask for.

    Nothing that an unfinished run needs or a job may use is removed, and nothing of another user's.
    """
    from hyperpod_ft.clean.inventory import KINDS, take_inventory, usages
    from hyperpod_ft.clean.removal import Removal, remove, select
    from hyperpod_ft.cli.options import require_yes
    from hyperpod_ft.errors import UserError, did_you_mean, printable
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.progress import format_bytes
    from hyperpod_ft.runs import references

    kinds = tuple(kind for kind in KINDS if kind in (what or ()))
    for given in what or ():
        if given not in KINDS:
            raise UserError(f"--what {given}: is not a kind{did_you_mean(given, KINDS)}", f"kinds: {', '.join(KINDS)}")
    if older_than is not None and not kinds:
        raise UserError("--older-than: needs --what", "add --what KIND")
    chosen = (root or references.last_root()).resolve()
    listed = tuple(name.rstrip("/") for name in names or ())
    wanted = Removal(listed, kinds, None if older_than is None else time.time() - older_than * _DAY)
    inventory = take_inventory(chosen, listed)
    if as_json:
        _print_inventory_json(inventory, usages(item.path for item in inventory.items))
    elif not listed and not kinds:
        _show(inventory, usages(item.path for item in inventory.items), everything)
    else:
        launchers = Launchers()
        selected = select(inventory, wanted, launchers)
        for item, why in selected.at_work:
            print(printable(f"stays: {item.name}: {why}"))
        if not selected.items:
            print("nothing to remove")
            return
        sizes = usages(item.path for item in selected.items)
        for item in selected.items:
            print(f"{format_bytes(sizes[item.path].size):>10}  {printable(item.name)}")
        total = format_bytes(sum(usage.size for usage in sizes.values()))
        require_yes(f"Remove these {len(selected.items)} ({total})?", yes)
        count = sum(1 for _ in remove(chosen, wanted, launchers))
        print(f"removed {count} of {len(selected.items)} below {chosen}")


def _show(inventory: "Inventory", sizes: "dict[Path, DiskUsage]", everything: bool) -> None:
    from hyperpod_ft.clean.inventory import KINDS
    from hyperpod_ft.cli.output.tables import console, table
    from hyperpod_ft.errors import printable
    from hyperpod_ft.progress import format_bytes

    by_kind = table("kind", "items", "size", "of that, no run needs")
    for column in by_kind.columns[1:]:
        column.justify = "right"
    for kind in KINDS:
        if items := [item for item in inventory.items if item.kind == kind]:
            free = sum(sizes[item.path].size for item in items if not item.kept and not item.only_by_name)
            total = sum(sizes[item.path].size for item in items)
            by_kind.add_row(kind, str(len(items)), format_bytes(total), format_bytes(free) if free else "")
    console().print(by_kind)
    largest = sorted(inventory.items, key=lambda item: -sizes[item.path].size)
    shown = largest if everything else largest[:_SHOWN]
    listed = table("size", "changed", "name", "")
    listed.columns[0].justify = "right"
    for item in shown:
        usage = sizes[item.path]
        listed.add_row(format_bytes(usage.size), _age(usage.changed), printable(item.name), _state(item))
    console().print(listed)
    if len(shown) < len(largest):
        print(f"{len(largest) - len(shown)} smaller ones: --all")
    for line in inventory.unreadable:
        print(f"all that runs share is kept, because a run cannot be opened: {printable(line)}")
    print("Remove what no run needs: hyperpod-ft clean --what KIND; one thing: --remove NAME")


def _state(item: "Item") -> str:
    if item.kept:
        return f"stays: {item.kept}"
    return f"only by name: {item.only_by_name}" if item.only_by_name else "no run needs it"


def _age(changed: float) -> str:
    days = (time.time() - changed) / _DAY
    return f"{days:.0f} days ago" if days >= 1.5 else f"{max(days, 0) * 24:.0f} h ago"


def _print_inventory_json(inventory: "Inventory", sizes: "dict[Path, DiskUsage]") -> None:
    print_json(
        {
            "root": str(inventory.root),
            "unreadable": inventory.unreadable,
            "items": [
                {
                    "kind": item.kind,
                    "name": item.name,
                    "bytes": sizes[item.path].size,
                    "changed": sizes[item.path].changed,
                    "kept": item.kept,
                    "only_by_name": item.only_by_name,
                }
                for item in inventory.items
            ],
        }
    )
