"""`hyperpod-ft init`: a run file to start from."""

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperpod_ft.cli.example_file import copy_example, write_new
from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import PACKAGE

if TYPE_CHECKING:
    from hyperpod_ft.authoring.conversion.convert import Supplement
    from hyperpod_ft.authoring.new_run import NewRun


class Method(str, Enum):
    """What is trained."""

    lora = "lora"
    full = "full"


class Format(str, Enum):
    """The formats of a dataset that need no template."""

    dolly = "dolly"
    alpaca = "alpaca"
    prompt_completion = "prompt-completion"
    chat = "chat"
    text = "text"
    preference = "preference"


def _recipes() -> str:
    return ", ".join(sorted(path.stem for path in (PACKAGE / "recipes").glob("*.yaml")))


def init(
    recipe: Annotated[str | None, typer.Argument(help=f"A packaged recipe, to be copied: {_recipes()}.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="A Hub id, S3 URI or directory of a model.")] = None,
    dataset: Annotated[str | None, typer.Option(help="A Hub id, S3 URI, file or directory.")] = None,
    instance: Annotated[
        str | None, typer.Option(help="Instance type of the training nodes; `local` for this machine's CPUs.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of training nodes.")] = 1,
    method: Annotated[Method, typer.Option(help="Train LoRA adapters, or all parameters.")] = Method.lora,
    dataset_format: Annotated[
        Format | None, typer.Option("--format", help="The dataset's format. Default: recognized from its first rows.")
    ] = None,
    other: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Convert a file of axolotl, LLaMA-Factory or `trl sft --config`."),
    ] = None,
) -> None:
    """Write a run file: a recipe's, one that fits a model and an instance type, or one converted from another tool.

    On a terminal, asks for what is missing.
    """
    if output.exists():
        raise UserError(f"{output} exists", "give another name with -o")
    known_format = dataset_format.value if dataset_format else None
    if recipe is not None:
        if model or dataset or instance or other:
            raise UserError(f"{recipe}: a recipe has its own model, dataset and instance type", "give one or the other")
        _copy(recipe, output)
    elif other is not None:
        from hyperpod_ft.authoring.conversion.convert import Supplement

        _convert(
            other,
            Supplement(_asked("instance type", instance, "--instance"), nodes, model, dataset, known_format),
            output,
        )
    else:
        from hyperpod_ft.authoring.new_run import NewRun

        _require_some(model, dataset, instance)
        wanted = NewRun(
            _asked("model (Hub id, s3:// or directory)", model, "--model"),
            _asked("dataset (Hub id, s3://, file or directory)", dataset, "--dataset"),
            _asked("instance type (local: CPUs of this machine)", instance, "--instance"),
            nodes,
            method.value,
            known_format,
        )
        _write(wanted, output)
    print(f"Wrote {output}. Edit it, then: hyperpod-ft plan {output}")


def _copy(recipe: str, output: Path) -> None:
    from hyperpod_ft.config import run_file

    recipes = run_file.recipes()
    if recipe not in recipes:
        raise UserError(f"no recipe {recipe!r}", f"recipes: {', '.join(recipes)}")
    copy_example(recipes[recipe], output)


def _write(wanted: "NewRun", output: Path) -> None:
    from hyperpod_ft.authoring.new_run import new_run

    draft = new_run(wanted, output)
    for line in draft.head[1:]:
        print(f"note: {line}", file=sys.stderr)
    write_new(draft.text(), output)


def _convert(other: Path, supplement: "Supplement", output: Path) -> None:
    from hyperpod_ft.authoring.conversion.convert import convert

    converted = convert(other, supplement, output)
    write_new(converted.draft.text(), output)
    for line in converted.draft.head[1:]:
        print(f"note: {line}", file=sys.stderr)
    for key, reason in converted.left.items():
        print(f"not converted: {key}: {reason}")


def _require_some(*given: str | None) -> None:
    if not any(given) and not sys.stdin.isatty():
        raise UserError(
            "init: nothing to write a run file for",
            "give a recipe (`hyperpod-ft init quickstart`), or --model, --dataset and --instance",
        )


def _asked(what: str, given: str | None, option: str) -> str:
    """The value, asked for on a terminal. Raises UserError elsewhere."""
    if given:
        return given
    if not sys.stdin.isatty():
        raise UserError(f"{option}: is missing, and this is not a terminal", f"give {option}")
    answer: str = typer.prompt(what.capitalize())
    return answer
