"""Programs that stand in for others."""

from pathlib import Path


def write_program(path: Path, text: str) -> None:
    """Write a shell script: `text` after its #! line, unless it has one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
