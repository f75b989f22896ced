"""Arguments, options and groups that mean the same in several commands."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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


def with_default(command: str) -> type[TyperGroup]:
    """A group whose command is this one where none is named: `sweep FILE` is `sweep submit FILE`."""

    class WithDefault(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
                args = [command, *args]
            return super().parse_args(ctx, args)

    return WithDefault
