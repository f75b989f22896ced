"""`hyperpod-ft init`: a run file to start from.

What its options leave open is asked on a terminal: each answer is checked when it is given, and none is lost.
"""

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import PACKAGE

if TYPE_CHECKING:
    from hyperpod_ft.authoring.conversion.convert import Supplement
    from hyperpod_ft.authoring.new_run import NewRun


@dataclass(frozen=True)
class Question:
    """What an option would have said."""

    option: str
    text: str
    given: str | None  # by the option
    check: Callable[[str], object]  # raises UserError for a wrong answer


@dataclass
class Interview:
    """Questions, and the answers given until now, as options."""

    options: list[str] = field(default_factory=list)

    def ask(self, *questions: Question) -> list[str]:
        """The answers, asked for where no option gives them, and again where they are wrong.

        Raises UserError when an option is wrong, before anything is asked, or missing where there is no terminal.
        """
        for question in questions:
            if question.given:
                question.check(question.given)
            elif not sys.stdin.isatty():
                raise UserError(f"{question.option} is missing, and this is not a terminal", f"give {question.option}")
        return [question.given or self._answer(question) for question in questions]

    def _answer(self, question: Question) -> str:
        while True:
            answer: str = typer.prompt(question.text)
            try:
                question.check(answer)
            except UserError as error:
                print(error, file=sys.stderr)
                continue
            self.options.append(f"{question.option}={answer}")
            return answer


@contextlib.contextmanager
def answers() -> Iterator[Interview]:
    """When the command fails or is interrupted, print how to go on with the answers that it has."""
    asked = Interview()
    try:
        yield asked
    except (UserError, typer.Abort, KeyboardInterrupt):
        if asked.options:
            command = shlex.join(["hyperpod-ft", *sys.argv[1:], *asked.options])
            print(f"\nTo continue with these answers: {command}", file=sys.stderr)
        raise


Format = Literal["dolly", "alpaca", "prompt-completion", "chat", "text", "preference", "unpaired-preference"]
"""The formats of a dataset that need no template."""


def _recipes() -> str:
    return ", ".join(sorted(path.stem for path in (PACKAGE / "recipes").glob("*.yaml")))


def init(
    recipe: Annotated[str | None, typer.Argument(help=f"A recipe to copy: {_recipes()}.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="A Hub id, S3 URI or directory of a model.")] = None,
    dataset: Annotated[str | None, typer.Option(help="A Hub id, S3 URI, file or directory.")] = None,
    instance: Annotated[
        str | None, typer.Option(help="Instance type of the training nodes; `local`: this machine's CPUs.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of training nodes.", show_default="1")] = None,
    method: Annotated[
        Literal["lora", "full"] | None,
        typer.Option(help="Train LoRA adapters, or all parameters.", show_default="lora"),
    ] = None,
    dataset_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="The dataset's format. Default: recognized from the first rows of local files, known for some"
            " datasets of the Hub, otherwise asked for on a terminal.",
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of the dataset, or rows of one, such as `train[:90%]`.")
    ] = None,
    other: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Convert a file of axolotl, LLaMA-Factory or TRL."),
    ] = None,
) -> None:
    """Write a run file: from a recipe, for a model and an instance type, or from another tool's file.

    On a terminal, asks for what is missing.
    """
    if output.exists():
        raise UserError(f"{output} exists", "give another name with -o")
    if recipe is not None:
        if model or dataset or instance or nodes or method or dataset_format or split or other:
            raise UserError(
                f"{recipe}: a recipe has its own model, dataset, method and cluster",
                "give one or the other, and edit the run file",
            )
        _copy(recipe, output)
    else:
        with answers() as asked:
            if other is not None:
                for option, given, key in (("split", split, "dataset.split"), ("method", method, "training.method")):
                    if given:
                        raise UserError(f"--{option}: a converted file has its own", f"edit {key} in the run file")
                from hyperpod_ft.authoring.conversion.convert import Supplement

                (instance,) = asked.ask(_instance(instance))
                _convert(other, Supplement(instance, nodes or 1, model, dataset, dataset_format), output)
            else:
                from hyperpod_ft.authoring.new_run import NewRun

                _require_some(model, dataset, instance)
                questions = *_sources(model, dataset, dataset_format, split, output), _instance(instance)
                model, dataset, instance = asked.ask(*questions)
                wanted = NewRun(model, dataset, instance, nodes or 1, method or "lora", dataset_format, split)
                _write(wanted, output, asked)
    print(f"Wrote {output}. Edit it, then: hyperpod-ft plan {output}")


def _copy(recipe: str, output: Path) -> None:
    from hyperpod_ft.config import run_file

    recipes = run_file.recipes()
    if recipe not in recipes:
        raise UserError(f"no recipe {recipe!r}", f"recipes: {', '.join(recipes)}")
    copy_example(recipes[recipe], output)


def _sources(
    model: str | None, dataset: str | None, known_format: str | None, split: str | None, output: Path
) -> tuple[Question, ...]:
    from hyperpod_ft.authoring.dataset_format import FormatUnclearError
    from hyperpod_ft.authoring.new_run import check_dataset, check_model

    def check(given: str) -> None:
        with contextlib.suppress(FormatUnclearError):  # asked for, once all else is known
            check_dataset(given, known_format, split, output)

    return (
        Question("--model", "Model (Hub id, s3:// or directory)", model, lambda given: check_model(given, output)),
        Question("--dataset", "Dataset (Hub id, s3://, file or directory)", dataset, check),
    )


def _instance(given: str | None) -> Question:
    from hyperpod_ft.authoring.new_run import instance_of

    return Question("--instance", "Instance type (local: CPUs of this machine)", given, instance_of)


def _asked_format(asked: Interview, why: str) -> str:
    """The format, asked for on a terminal where it cannot be recognized."""
    print(why, file=sys.stderr)
    formats = get_args(Format)

    def check(given: str) -> None:
        if given not in formats:
            raise UserError(f"{given}: is not a format", f"give one of {', '.join(formats)}")

    return asked.ask(Question("--format", f"Format of its rows ({', '.join(formats)})", None, check))[0]


def _write(wanted: "NewRun", output: Path, asked: Interview) -> None:
    from hyperpod_ft.authoring.dataset_format import FormatUnclearError
    from hyperpod_ft.authoring.new_run import new_run

    try:
        draft = new_run(wanted, output)
    except FormatUnclearError as error:
        if not sys.stdin.isatty():
            raise
        draft = new_run(replace(wanted, format=_asked_format(asked, error.problem)), output)
    for line in draft.head[1:]:
        print(f"note: {line}", file=sys.stderr)
    write_new(draft.text(), output)


def _convert(other: Path, supplement: "Supplement", output: Path) -> None:
    from hyperpod_ft.authoring.conversion.convert import convert

    converted = convert(other, supplement, output)
    write_new(converted.draft.text(), output)
    for line in converted.draft.head[1:]:
        print(f"note: {line}", file=sys.stderr)
    for heading, lines in converted.left().items():
        print(heading, *lines, sep="\n")


def _require_some(*given: str | None) -> None:
    if not any(given) and not sys.stdin.isatty():
        raise UserError(
            "init: nothing to write a run file for",
            "give a recipe (`hyperpod-ft init quickstart`), or --model, --dataset and --instance",
        )


def copy_example(example: Path, output: Path) -> None:
    """Copy `example` to `output`. Raises UserError when `output` exists or cannot be written."""
    write_new(example.read_text(encoding="utf-8"), output)


def write_new(text: str, output: Path) -> None:
    """Write a file that does not exist yet. Raises UserError when `output` exists or cannot be written."""
    try:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UserError(f"{output} exists", "give another name with -o") from None
    except OSError as error:
        raise UserError(f"{output}: {error.strerror}", "give another name with -o") from error
