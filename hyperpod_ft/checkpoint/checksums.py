"""Recorded checksums: `XXH128SUMS` beside the weights, in xxhsum's format, `<32 hex digits>  <name>` a line.

`xxhsum --check XXH128SUMS` (the package xxhash of any distribution) checks them without this kit.
"""

import re
from pathlib import Path

from hyperpod_ft.checkpoint.elements import Stored
from hyperpod_ft.checkpoint.layout import LogicalTensor
from hyperpod_ft.checkpoint.progress import Progress
from hyperpod_ft.checkpoint.safetensors_writer import CHECKSUMS
from hyperpod_ft.checkpoint.scanning import Scanner
from hyperpod_ft.errors import UserError

_LINE = re.compile(r"([0-9a-f]{32})  (.+)")


def recorded(directory: Path) -> dict[str, str]:
    """The recorded digest of each file, by its name below `directory`; empty when none are recorded.

    Raises UserError when the record is damaged, or names a file outside the directory.
    """
    file = directory / CHECKSUMS
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}", "restore the file, or remove it") from error
    digests: dict[str, str] = {}
    for line in lines:
        parsed = _LINE.fullmatch(line)
        if parsed is None or parsed[2] in digests:
            raise UserError(f"{file}: is damaged: {line[:100]!r}", "restore the file, or remove it")
        if Path(parsed[2]).is_absolute() or ".." in Path(parsed[2]).parts:
            raise UserError(f"{file}: names a file outside its directory: {parsed[2]}", "do not trust it")
        digests[parsed[2]] = parsed[1]
    return digests


def check_checksums(directory: Path) -> bool:
    """Whether checksums are recorded; all match then. Reads every file they name, with progress.

    Raises UserError when one of these is missing, or its content is another.
    """
    digests = recorded(directory)
    for name in digests:
        if not (directory / name).is_file():
            raise UserError(f"{directory / name}: is missing, though {CHECKSUMS} names it", "restore the file")
    total = sum((directory / name).stat().st_size for name in digests)
    with Progress("check", total) as progress, Scanner(progress) as scanner:
        for name, digest in digests.items():
            if scanner.scan(directory / name, (), _look_at_nothing) != digest:
                raise UserError(
                    f"{directory / name}: is not what was written: its checksum differs from {CHECKSUMS}",
                    "restore the file, or make it again",
                )
    return bool(digests)


def _look_at_nothing(tensor: LogicalTensor, first: int, stored: Stored) -> None: ...
