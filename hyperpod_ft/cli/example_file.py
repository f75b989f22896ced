"""`init` writes a file for the user to edit."""

from pathlib import Path

from hyperpod_ft.errors import UserError


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
