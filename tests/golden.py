"""Texts that somebody read once and kept: a change of what is made shows as a change of these files."""

import os
from difflib import SequenceMatcher
from pathlib import Path


def check(file: Path, text: str) -> None:
    """`text` is that of the file, which HYPERPOD_FT_REFRESH_GOLDEN=1 writes."""
    if os.environ.get("HYPERPOD_FT_REFRESH_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def difference(base: str, text: str) -> str:
    """What `text` has in place of lines of `base`, each time below the line that precedes it in `base`.

    Of two cases of one template, one is kept whole and the other as this: what both have is kept once.
    """
    old, new = ["", *base.splitlines()], ["", *text.splitlines()]
    lines: list[str] = []
    for tag, begin, end, new_begin, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            lines += [f"@@ {old[begin - 1]}", *(f"-{line}" for line in old[begin:end])]
            lines += [f"+{line}" for line in new[new_begin:new_end]]
    return "".join(f"{line}\n" for line in lines)
