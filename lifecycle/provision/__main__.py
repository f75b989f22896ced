"""`python3 -m provision`: bring this node into the state that the cluster file describes.

Exit status: 0 when every step is done, already so or not needed here; 1 when a step failed; 2 when nothing was tried.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from provision.errors import NodeError
from provision.journal import Journal
from provision.node import Node
from provision.runner import locked, run, select
from provision.settings import read_settings
from provision.steps import STEPS

STEPS_LOG = "/var/log/provision/steps.jsonl"


def main() -> int:
    arguments = _arguments()
    scripts = Path(__file__).resolve().parent.parent
    root: Path = arguments.root.resolve()
    journal = Journal(None if arguments.dry_run else root / STEPS_LOG.lstrip("/"))
    signal.signal(signal.SIGTERM, _terminate)
    # The caller's umask must not change who can read the files.
    os.umask(0o022)
    try:
        steps = select(STEPS, arguments.only)
        settings = read_settings(arguments.settings or scripts / "settings.json")
        node = Node(root=root, settings=settings, journal=journal, scripts=scripts)
        with nullcontext() if arguments.dry_run else locked(node):
            return 0 if run(steps, node, arguments.dry_run) else 1
    except (NodeError, OSError) as error:
        print(f"provision: {error}", file=sys.stderr)
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="provision", description="Set up this node as the cluster file describes.")
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="act only on the files below DIR")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="instead of settings.json next to provision.sh")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done; change nothing")
    parser.add_argument(
        "--only", action="append", default=[], metavar="STEP",
        help=f"this step and those it needs; repeatable; steps: {', '.join(step.name for step in STEPS)}",
    )  # fmt: skip
    return parser.parse_args()


def _terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
