"""Arguments and options that mean the same in several commands."""

from typing import Annotated

import typer

RunReference = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run directory, run file or recipe. Default: the run submitted last; runs of sweeps do not count.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. training.epochs=1.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")]
Profile = Annotated[str | None, typer.Option("--profile", help="Profile of the AWS configuration.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
