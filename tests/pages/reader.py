"""The reader of a page whose commands ask AWS: programs and variables of a shell, with a home of its own."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.pages.blocks import ROOT

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

BIN = Path(sys.executable).parent  # of the kit, and of the AWS CLI


def environment(aws: "Aws", home: Path, poll_seconds: int) -> dict[str, str]:
    """Programs of `home`/bin come before all others."""
    return {
        **aws.environment,
        "PATH": os.pathsep.join([str(home / "bin"), str(BIN), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "HYPERPOD_FT_POLL_SECONDS": str(poll_seconds),
        "OMP_NUM_THREADS": "1",
    }
