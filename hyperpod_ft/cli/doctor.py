"""The command that checks a cluster against what the kit assumes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.options import Json, Profile
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.findings import Finding

app = typer.Typer()


@app.command()
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
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="CLUSTER", help="Check a cluster from outside instead: its name or cluster file."
        ),
    ] = None,
    region: Annotated[str | None, typer.Option("--region", help="Region of a cluster given by name.")] = None,
    profile: Profile = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Also write a text for a bug report, without secrets."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this head node, and the cluster behind it, against what the kit assumes; exit code 1 if anything differs.

    Changes nothing: it writes a few small files below cluster.root, and removes them.
    """
    if cluster is not None:
        if run_file or overrides or nodes:
            raise UserError("--cluster: cannot be combined with a run file, --set or --nodes", "leave these out")
        rows, text = _outside(cluster, region, profile)
    else:
        rows, text = _inside(run_file, overrides or (), nodes)
    if report is not None:
        report.write_text(text, encoding="utf-8")
    _show(rows, as_json)
    raise typer.Exit(1 if any(row.verdict == "error" for row in rows) else 0)


def _inside(run_file: str | None, overrides: Sequence[str], nodes: bool) -> "tuple[list[Finding], str]":
    """The rows and the report of this head node."""
    from hyperpod_ft.config import run_file as run_files
    from hyperpod_ft.config.sections.cluster import Cluster
    from hyperpod_ft.doctor import head_node, report
    from hyperpod_ft.doctor.expectations import Expectations

    config = run_files.load(run_files.find(run_file), overrides) if run_file else None
    if overrides and config is None:
        raise UserError("--set: needs a run file", "give one, or the name of a recipe")
    expected = Expectations.of(config, Path(config.cluster.root if config else Cluster().root))
    rows = head_node.inside(expected, nodes)
    return rows, report.text(rows, expected)


def _outside(reference: str, region: str | None, profile: str | None) -> "tuple[list[Finding], str]":
    """The rows and the report of a cluster."""
    from hyperpod_ft.cli.cluster.arguments import access_of, find
    from hyperpod_ft.doctor import outside, report

    rows = outside.cluster(access_of(find(reference, region), profile))
    return rows, report.text(rows)


def _show(rows: "Sequence[Finding]", as_json: bool) -> None:
    from hyperpod_ft.cli.output import tables
    from hyperpod_ft.doctor.check import WORDS, described

    words = [WORDS[row.verdict] for row in rows]
    if as_json:
        from dataclasses import asdict

        tables.print_json([{**asdict(row), "verdict": word} for row, word in zip(rows, words, strict=True)])
        return
    table = tables.table("check", "")
    for row in rows:
        table.add_row(row.name, tables.clip(described(row), 1000))
    tables.console().print(table)
    print(f"{words.count('ok')} ok, {words.count('differs')} differ, {words.count('cannot tell')} cannot tell")
