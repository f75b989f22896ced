"""What several commands share: arguments and options, asking before a change, and groups of commands."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hyperpod_ft.errors import UserError

A_RUN = "the name, name/id, directory or run file of a run. Default: the run submitted last, not counting sweeps."
_RUN = f"{A_RUN[0].upper()}{A_RUN[1:]}"
RunReference = Annotated[str | None, typer.Argument(metavar="RUN", help=_RUN)]
RunReferences = Annotated[list[str] | None, typer.Argument(metavar="RUN", help=_RUN)]
_MODEL = f"A model's directory, or {A_RUN}"
ModelReference = Annotated[str | None, typer.Argument(metavar="RUN|DIR", help=_MODEL)]
ModelReferences = Annotated[list[str] | None, typer.Argument(metavar="RUN|DIR", help=_MODEL)]
Root = Annotated[
    Path | None, typer.Argument(metavar="ROOT", help="A cluster.root. Default: that of the run submitted last.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. training.epochs=1.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")]
Profile = Annotated[str | None, typer.Option("--profile", help="Profile of the AWS configuration.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Confirm = Annotated[str | None, typer.Option("--confirm", metavar="NAME", help="The name, instead of typing it.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def only(references: Sequence[str] | None, other: str) -> str | None:
    """The RUN of a command that takes `other` after it: click gives the last word to that, all before it to RUN."""
    if references and len(references) > 1:
        raise UserError(f"one RUN and one {other}, not {len(references) + 1} words", f"put the {other} in quotes")
    return references[0] if references else None


def require_name(name: str, confirm: str | None) -> None:
    """Have the user type the name, unless it was given with --confirm. Raises UserError for another name."""
    if confirm is None and not sys.stdin.isatty():
        raise UserError(f"cannot confirm the deletion of {name}: not a terminal", f"pass --confirm {name}")
    if (typer.prompt("Type its name to continue") if confirm is None else confirm) != name:
        raise UserError(f"not deleted: the name is {name}", f"type it, or pass --confirm {name}")


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Ctrl-C ends the command, not what AWS does; `advice` is printed then."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {advice}", file=sys.stderr, flush=True)
        raise


def require_yes(question: str, yes: bool) -> None:
    """Ask the user, unless --yes was given. Raises UserError without a terminal, and typer's Exit for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{question} Not a terminal", "pass --yes")
    if not typer.confirm(question):
        raise typer.Exit(1)


class CommandGroup(TyperGroup):
    headings: Mapping[str, str] = {}  # by heading, names of commands separated by spaces; none: all are `Commands`
    default = ""  # the command of `GROUP ARGUMENT...`

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.default and args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in (self.headings or {"Commands": " ".join(self.list_commands(ctx))}).items():
            with formatter.section(heading):
                # typer cuts each sentence at the width of the terminal
                formatter.write_dl(
                    [
                        (name, self.commands[name].get_short_help_str(1000))
                        for name in names.split()
                        if name in self.commands  # an annex may be missing
                    ]
                )


def command_group(default: str = "", headings: Mapping[str, str] | None = None) -> type[CommandGroup]:
    return type("CommandGroup", (CommandGroup,), {"default": default, "headings": headings or {}})
