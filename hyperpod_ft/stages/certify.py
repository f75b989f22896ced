"""Stage `certify`: prove on CPUs, with a small random model of the same kind, that training the model will work.

python -m hyperpod_ft.stages.certify RUN_DIR

Its record is the certificate (planning/certificate.py); runs with the same model, adapters and packages share it.
"""

import contextlib
import io
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.planning.certificate import naming_trl
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main


def work(run: Run) -> Result:
    # seconds of CPU that a run whose model is certified already does not need
    from hyperpod_ft.engines.torch.certificate.certify import SMALL, certify  # noqa: PLC0415
    from hyperpod_ft.engines.torch.certificate.division import check_division  # noqa: PLC0415

    lora = run.config.lora if run.config.training.method == "lora" else None
    model_config = read_config(run.paths.base_model)
    with (
        naming_trl(run.config, run.plan.degrees, model_config),
        tempfile.TemporaryDirectory(prefix="hyperpod-ft-certify-") as scratch,
    ):
        found = certify(run.paths.base_model, lora, Path(scratch))
        found.check(run.config, run.plan.degrees)
        small = Path(scratch, SMALL)
        if small.exists() and not found.not_proven:
            with contextlib.redirect_stdout(io.StringIO()):
                check_division(small, lora, Path(scratch), run.plan.degrees, packed=not found.not_packed)
    print(f"certify: {found}", flush=True)
    # of what it is, for doctor: records of the volume's runs say it nowhere else
    model_type = model_config.get("model_type")
    return Result(facts=asdict(found) | {"model_type": model_type, "method": run.config.training.method})


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for a process group of one
    main("certify", work)
