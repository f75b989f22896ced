"""A volume of a few pages that fills up, as a full disk does; needs root."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_volume(directory: Path, size: int) -> Iterator[None]:
    """Mount a tmpfs of `size` bytes on a new directory for the block; skips the test where that is not allowed."""
    directory.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
