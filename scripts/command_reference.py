"""docs/commands.md: each command with its usage, its help and its own options. `python scripts/reference.py` writes it.

What several commands share is described once, at the beginning.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import keys
import typer

from hyperpod_ft.cli.main import app
from hyperpod_ft.cli.options import A_RUN

_SHARED_BY = 3  # commands at least
_AWS = ("--region", "--profile")  # on this page: of all commands that call AWS
_BEGINNING = """# Commands

Run each as `hyperpod-ft COMMAND`. This page has the first sentence of each command's help; `-h` prints all of it.
`hyperpod-ft --install-completion` sets up completion in your shell.

{overview}

## What commands share

These options and arguments are explained only here. A command's usage line names those that it takes, except the first
two; a command without such a line takes at most these two.

- `--profile NAME`, of `cluster`, `deploy` and `sagemaker`: Profile of the AWS configuration.
- `--region NAME`, of the same commands: AWS region, where no file names it. Default: that of the AWS configuration.
"""


@dataclass(frozen=True)
class Parameter:
    """An argument or option: as it is typed, and its help."""

    name: str  # `RUN`, `--json`
    usage: str  # `RUN`, `--set KEY=VALUE`
    help: str  # with its default
    required: bool
    several: bool  # it takes all words but those of the arguments after it

    @property
    def is_option(self) -> bool:
        return self.name.startswith("-")

    @property
    def subject(self) -> tuple[str, str]:
        """The same for parameters that differ in an example or in their default."""
        return self.name, re.split(r", e\.g\. | Default: | \(", self.help)[0].rstrip(".")


Commands = Mapping[tuple[str, ...], tuple[Any, list[Parameter]]]  # by path


def page() -> str:
    """The page's text."""
    root = typer.main.get_command(app)
    commands: Commands = {path: (command, list(_parameters(command))) for path, command in _walk(root)}
    count = Counter(parameter.subject for _, found in commands.values() for parameter in found)
    shared = {subject for subject, times in count.items() if times >= (_SHARED_BY if subject[0][0] == "-" else 2)}
    ordered = sorted(shared, key=lambda subject: (subject[0], -count[subject]))
    parts = {
        heading: {path: command for path, command in commands.items() if path[0] in names.split()}
        for heading, names in root.headings.items()
    }
    overview = "\n".join(f"- {heading}: {', '.join(_linked(found))}" for heading, found in parts.items())
    lines = [*_BEGINNING.format(overview=overview).splitlines(), *_shared(commands, ordered), ""]
    for heading, found in parts.items():
        lines += [f"## {heading}", ""]
        for path, command in found.items():
            lines += [*_command(path, *command, shared), ""]
    return keys.linked("\n".join(lines))


def _title(path: tuple[str, ...]) -> str:
    """A command's heading; a group's default is named by the group alone."""
    return " ".join(word for word in path if word[0] != "[")


def _linked(paths: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Links to commands, those of a group in brackets after its name."""
    for name, found in groupby(paths, key=lambda path: path[0]):
        links = {path: f"[`{_title(path[-1:]) or name}`](#{_title(path).replace(' ', '-')})" for path in found}
        alone = [link for path, link in links.items() if _title(path) == name]
        inner = [link for link in links.values() if link not in alone]
        yield (alone[0] if alone else f"`{name}`") + (f" ({', '.join(inner)})" if inner else "")


def _walk(group: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path, in the order of the help."""
    for name in " ".join(group.headings.values()).split() or group.list_commands(None):
        command = group.commands.get(name)
        if hasattr(command, "commands"):
            yield from _walk(command, (*above, name))
        elif command:  # an annex may be missing
            yield (*above, f"[{name}]" if name == group.default else name), command


def _parameters(command: Any) -> Iterator[Parameter]:
    for found in command.params:
        typed, text = found.get_help_record(typer.Context(command))
        typed = re.sub(r" <(str|list|path|int|float)( range)?(\[str\])?>", lambda kind: f" {_VALUES[kind[1]]}", typed)
        if found.param_type_name == "argument":
            metavar, kind = typed.rsplit(" ", 1)
            typed = kind.strip("<>") if kind[0] == "<" else metavar.strip("[]").upper()
        name = next((option for option in found.opts if option.startswith("--")), found.opts[0])
        yield Parameter(
            name if typed[0] == "-" else typed,
            typed,
            _sentences(text),
            found.required,
            found.nargs == -1 and "..." not in typed,
        )


_VALUES = {"str": "NAME", "list": "NAME", "path": "PATH", "int": "N", "float": "X"}


def _sentences(text: str) -> str:
    """A parameter's help, with its default in a sentence at its end; names and paths are code."""
    text, _, facts = text.partition("  [")
    text = re.sub(r"to copy: .*", "to copy.", text)  # the recipes, which docs/run-file.md lists
    if text[1:] != A_RUN[1:]:
        text = text.replace(A_RUN, "a `RUN`.")
    default = re.search(r"default: \(?([^];)]+)", facts)
    if default is None:
        return text
    value = re.sub(r"^[^ 0-9][^ ]*$", r"`\g<0>`", default[1].removesuffix(".0"))
    return f"{text.rstrip('.')}. Default: {value}."


def _shared(commands: Commands, shared: list[tuple[str, str]]) -> Iterator[str]:
    """A line for each shared parameter, with its default, or the usual one and those of other commands."""
    names = Counter(name for name, _ in shared)
    for name, text in (subject for subject in shared if subject[0] not in _AWS):
        uses = {path: one for path, (_, found) in commands.items() for one in found if one.subject == (name, text)}
        groups = {path[0] for path in uses}
        where = f", of `{groups.pop()}`" if names[name] > 1 and len(groups) == 1 else ""
        yield f"- `{next(iter(uses.values())).usage}`{where}: {_help_of_all(text, uses)}"


def _help_of_all(text: str, uses: Mapping[tuple[str, ...], Parameter]) -> str:
    """The help that these commands share; where only defaults differ, the usual one, then the others'."""
    (usual, _), *others = Counter(one.help for one in uses.values()).most_common()
    if not others:
        return usual
    default = {one.help: re.search(r" Default: ([\d.]+)\.$", one.help) for one in uses.values()}
    if not all(default.values()):
        return f"{text}."
    exceptions = [
        f"`{_title(path)}`: {found[1]}"
        for path, one in uses.items()
        if one.help != usual and (found := default[one.help])
    ]
    return f"{usual.rstrip('.')}; {', '.join(exceptions)}."


def _command(
    path: tuple[str, ...], command: Any, parameters: list[Parameter], shared: set[tuple[str, str]]
) -> Iterator[str]:
    shown = [one for one in parameters if one.name not in _AWS]
    own = [one for one in shown if one.subject not in shared]
    arguments = [one for one in shown if not one.is_option]
    options = [one for one in shown if one.is_option and (one.required or one not in own)]
    usage = [
        (one.usage if one.required else f"[{one.usage}]") + "..." * (one.several and one is arguments[-1])
        for one in arguments
    ]
    usage += [one.usage.replace("-o, ", "") if one.required else f"[{one.name}]" for one in options]
    yield from (f"### {_title(path)}", "")
    if usage:
        yield from (f"`{' '.join([*path, *usage])}`", "")
    yield command.get_short_help_str(1000)
    explained = [one for one in own if one.is_option or not one.required or "|" in one.usage]
    if explained:
        yield ""
    yield from (f"- `{one.usage}`: {one.help}" for one in explained)
