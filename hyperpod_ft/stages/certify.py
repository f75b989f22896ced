"""Stage `certify`: prove on CPUs, with a small random model of the same kind, that training the model will work.

python -m hyperpod_ft.stages.certify RUN_DIR

Its record is the certificate (planning/certificate.py); runs with the same model, adapters and packages share it.
"""

import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from hyperpod_ft.engines.torch.certificate.certify import certify
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main


def work(run: Run) -> Result:
    lora = run.config.lora if run.config.training.method == "lora" else None
    with tempfile.TemporaryDirectory(prefix="hyperpod-ft-certify-") as scratch:
        found = certify(run.paths.base_model, lora, Path(scratch))
    found.check(run.config, run.plan.degrees)
    print(f"certify: {found}", flush=True)
    return Result(facts=asdict(found))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for a process group of one
    main("certify", work)
