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

from hyperpod_ft import gc_pause
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.planning.certificate import Certificate, naming_trl
from hyperpod_ft.planning.model_fit import check_all_nodes
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main


def work(run: Run) -> Result:
    model_config = read_config(run.paths.base_model)
    with (
        naming_trl(run.config, run.plan.degrees, model_config),
        tempfile.TemporaryDirectory(prefix="hyperpod-ft-certify-") as scratch,
    ):
        found = (_trl if run.config.engine == "trl" else _torch)(run, Path(scratch))
    print(f"certify: {found}", flush=True)
    # of what it is, for doctor: records of the volume's runs say it nowhere else
    model_type = model_config.get("model_type")
    return Result(facts=asdict(found) | {"model_type": model_type, "method": run.config.training.method})


# Imports take seconds of CPU that a run whose model is certified already does not need.


def _torch(run: Run, scratch: Path) -> Certificate:
    gc_pause.pause_collection()
    from hyperpod_ft.engines.torch.certificate.certify import SMALL, certify  # noqa: PLC0415
    from hyperpod_ft.engines.torch.certificate.division import check_division  # noqa: PLC0415

    gc_pause.resume_collection()
    lora = run.config.lora if run.config.training.method == "lora" else None
    found = certify(run.paths.base_model, lora, scratch)
    check_all_nodes(run.config, run.plan.degrees, run.paths.base_model, found)
    small = scratch / SMALL
    if small.exists() and not found.not_proven:
        with contextlib.redirect_stdout(io.StringIO()):
            check_division(small, lora, scratch, run.plan.degrees, packed=not found.not_packed)
    return found


def _trl(run: Run, scratch: Path) -> Certificate:
    gc_pause.pause_collection()
    from hyperpod_ft.engines.trl.certificate import certify  # noqa: PLC0415

    gc_pause.resume_collection()
    found = certify(run.config, run.paths.base_model, run.paths.teacher, scratch)
    check_all_nodes(run.config, run.plan.degrees, run.paths.base_model, found, run.paths.teacher)
    return found


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for a process group of one
    main("certify", work)
