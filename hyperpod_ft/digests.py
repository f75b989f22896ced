"""What identifies files and texts: their SHA-256, and which files a directory has, always in the same order."""

import hashlib
from pathlib import Path


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def text_sha256(text: str) -> str:
    """Hex SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def files_below(path: Path) -> list[Path]:
    """The file itself, or every regular file below a directory, sorted."""
    if path.is_file():
        return [path]
    return sorted(found for found in path.rglob("*") if found.is_file())
