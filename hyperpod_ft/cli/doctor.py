"""The command that checks a cluster against what the kit assumes."""

from pathlib import Path
from typing import Annotated

import typer

from hyperpod_ft.cli.options import Json
from hyperpod_ft.errors import UserError

Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Also write a text for a bug report, without secrets.")
]


def doctor(
    run_file: Annotated[
        str | None,
        typer.Argument(metavar="[RUN_FILE]", help="Check what this run needs: a run file, or a recipe's name."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. cluster.root=/fsx/me.")
    ] = None,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Also check every idle node, in a small job of a few seconds.")
    ] = False,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Check this head node and its cluster against what the kit assumes; exit code 1 if anything differs.

    Changes nothing: it writes a few small files below cluster.root, and removes them.
    """
    from hyperpod_ft.cli.output.tables import conclude
    from hyperpod_ft.config import run_file as run_files
    from hyperpod_ft.config.sections.cluster import Cluster
    from hyperpod_ft.doctor import head_node
    from hyperpod_ft.doctor.check import Expectations

    config = run_files.load(run_files.find(run_file), overrides or ()) if run_file else None
    if overrides and config is None:
        raise UserError("--set: needs a run file", "give one, or the name of a recipe")
    expected = Expectations.of(config, Path(config.cluster.root if config else Cluster().root))
    conclude(head_node.inside(expected, nodes), report, as_json, expected)
