"""Says of the host's drivers what is too old for a container's interpreter, before anything is pulled.

    python -m hyperpod_ft.sagemaker.container.drivers PINS

Warnings: the run's own environment is not known yet. The health check before ranks start refuses what cannot work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def look(python: Path, pins: str, code: str) -> None:
    """Run this with the stages' interpreter."""
    environment = {**os.environ, "PYTHONPATH": code}
    subprocess.run([str(python), "-m", __name__, pins], env=environment, check=False)


def main() -> None:
    # not for `look`, whose Python may be older than the stages'
    from hyperpod_ft import drivers  # noqa: PLC0415
    from hyperpod_ft.planning.pins import NEURON_DRIVERS  # noqa: PLC0415

    wanted = NEURON_DRIVERS.get(Path(sys.argv[1]).stem)
    for line in (drivers.neuron_doubt(wanted) if wanted else None, drivers.cuda_fault()):
        if line:
            print(f"warning: {line}", flush=True)


if __name__ == "__main__":
    main()
