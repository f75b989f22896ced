"""Recorded checksums: `XXH128SUMS` next to the weights, in xxhsum's format: `<32 hex digits>  <name>` per line.

`xxhsum --check XXH128SUMS` (from the package xxhash) checks them without this kit. XXH3 detects damage at a
tenth of SHA-256's cost; it does not protect against forgery.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError

CHECKSUMS = "XXH128SUMS"
_LINE = re.compile(r"([0-9a-f]{32})  (.+)")


def recorded(directory: Path) -> dict[str, str]:
    """The recorded digest of each file, by its name below `directory`; empty when none are recorded.

    Raises UserError when the record is damaged, or names a file outside the directory.
    """
    file = directory / CHECKSUMS
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
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
            raise UserError(
                f"{file}: names a file outside its directory: {parsed[2]}",
                "do not use the model unless you trust its source",
            )
        digests[parsed[2]] = parsed[1]
    return digests


def by_path(directory: Path) -> dict[Path, str]:
    """The same, by path."""
    return {directory / name: digest for name, digest in recorded(directory).items()}


def record(directory: Path, digests: Mapping[str, str]) -> None:
    """Record the digests of files, by their names below `directory`, next to each of them."""
    lines_of: dict[Path, list[str]] = defaultdict(list)
    for name, digest in sorted(digests.items()):
        file = directory / name
        lines_of[file.parent].append(f"{digest}  {file.name}\n")
    for parent, lines in lines_of.items():
        publish.write_text(parent / CHECKSUMS, "".join(lines))
