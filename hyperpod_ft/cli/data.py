"""The commands on the rows of a run file."""

from pathlib import Path
from typing import Annotated

import typer

from hyperpod_ft.cli.options import Overrides, command_group
from hyperpod_ft.errors import UserError

app = typer.Typer(cls=command_group(), no_args_is_help=True)

_ON_A_PAGE = 10  # rows


@app.callback()
def _data() -> None: ...


@app.command()
def show(
    run_file: Annotated[str, typer.Argument(metavar="RUN_FILE", help="A run file, or the name of a packaged recipe.")],
    row: Annotated[
        int | None,
        typer.Option(
            "--row",
            metavar="N",
            min=1,
            help="The N-th raw row, in the order of the files. Default: the first that is used.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page instead: of ten rows drawn by chance, or of --row."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="NAME", help="One of several sources.", show_default="the first"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show what is trained of a row, token by token, and why each token is there.

    Needs the rows and the model's tokenizer on this machine, and submits nothing. Exit code 2 for a row that stage
    dataset would not use.
    """
    from hyperpod_ft.config import run_file as run_files
    from hyperpod_ft.data.tokenizer import without_torch
    from hyperpod_ft.runs.shown_rows import Inspection

    config = run_files.load(run_files.find(run_file), overrides or ())
    without_torch()
    inspection = Inspection.of(config, run_file, source)
    if row is not None:
        found = [inspection.numbered(row)]
    else:
        found = inspection.sampled(_ON_A_PAGE) if html else [inspection.first()]
    if html:
        from hyperpod_ft.report.rows_page import write_rows_page

        write_rows_page(config, inspection.dataset.asset.short_name, found, html)
        print(html)
    else:
        from hyperpod_ft.cli.output import show_rows

        show_rows.rows(found)
    if row is not None and (bad := found[0].bad):
        raise UserError(str(bad))
