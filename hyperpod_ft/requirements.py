"""The pinned packages of each engine's Python environment."""

from functools import cache
from pathlib import Path

_DIRECTORY = Path(__file__).resolve().parent / "pins"


def pins_file(engine: str) -> Path:
    """The requirements file that pip installs for an engine."""
    return _DIRECTORY / f"{engine}.txt"


@cache
def requirements(engine: str) -> tuple[str, ...]:
    """The pins without comments: what the environment's fingerprint depends on."""
    lines = (line.split("#")[0].strip() for line in pins_file(engine).read_text().splitlines())
    return tuple(line for line in lines if line)
