"""The code blocks of README and docs, and a shell that runs those of a page in the order in which they stand."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str = "sh", heading: str = "") -> list[str]:
    """The blocks of a page, by its path in the checkout; of one section if its heading is given."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading:
        text = text[text.index(f"\n## {heading}") + 1 :].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def uncommented(block: str) -> str:
    """A block with the lines of keys that it has as comments."""
    return re.sub(r"^( *)# (\w+:)", r"\1\2", block, flags=re.MULTILINE)


def run_blocks(
    page: str,
    found: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    timeout: float = 700,
    answers: Sequence[str] = (),
) -> list[str]:
    """Type the blocks into one bash in `directory`; returns what each has printed. The first error ends it.

    `answers`: what the reader types at a terminal, one line for each question of a command.
    """
    marker = "--- end of a block ---"
    script = "\n".join(["set -Eeuo pipefail", *(f"{block}\necho {shlex.quote(marker)}" for block in found)])
    with _typed(answers) as terminal:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=directory,
            env=dict(environment),
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    assert done.returncode == 0, f"{page}:\n{done.stdout}"
    assert "Traceback" not in done.stdout, done.stdout
    return done.stdout.split(f"{marker}\n")[:-1]


@contextmanager
def _typed(answers: Sequence[str]) -> Iterator[int]:
    """A terminal at which these lines have been typed, and then its end; without lines no terminal."""
    if not answers:
        yield subprocess.DEVNULL
        return
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, "\n".join([*answers, "\x04"]).encode())
        yield terminal
    finally:
        os.close(terminal)
        os.close(keyboard)
