"""The sizes that `clean` shows."""

import os
import time
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.clean.inventory import usages


def test_sizes_are_those_on_disk_and_links_are_not_followed(tmp_path: Path) -> None:
    publish.write_text(tmp_path / "tree" / "a" / "b", "x" * 100_000)
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "elsewhere")
    publish.write_text(tmp_path / "elsewhere" / "file", "x" * 1_000_000)
    old = time.time() - 5 * 86_400
    for path in sorted((tmp_path / "tree").rglob("*")):
        os.utime(path, (old, old), follow_symlinks=False)
    os.utime(tmp_path / "tree", (old, old))
    usage = usages([tmp_path / "tree"])[tmp_path / "tree"]
    assert 100_000 <= usage.size < 200_000
    assert usage.changed == pytest.approx(old, abs=1)
