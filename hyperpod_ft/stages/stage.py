"""The common frame of stage programs: skip finished work, check the inputs, lock, work, write the record last.

A stage is `python -m hyperpod_ft.stages.<name> RUN_DIR`. It may be started at any time, twice at once, or after a
kill at any line: a lock lets one attempt work, outputs appear whole, and the record is written last.
"""

import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from hyperpod_ft import __version__, publish
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error, volume_failure
from hyperpod_ft.runs import chain
from hyperpod_ft.runs.jobs import own_job_id
from hyperpod_ft.runs.records import Record, outputs_of, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import choose

# long enough for the previous attempt of a requeued job to end
_TRAINING_PATIENCE_SECONDS = 120
_REPORTED_PACKAGES = (
    "torch",
    "torch-neuronx",
    "transformers",
    "peft",
    "tokenizers",
    "tiktoken",
    "safetensors",
    "optimum-neuron",
    "lm_eval",
    "datasets",
)


@dataclass(frozen=True)
class Result:
    """The result of a stage: the files or directories it wrote, and facts for its record.

    `sha256`, `xxh3`: digests of the files, where they are known.
    """

    outputs: Sequence[Path] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    sha256: Mapping[Path, str] = field(default_factory=dict)
    xxh3: Mapping[Path, str] = field(default_factory=dict)


def main(name: str, work: Callable[[Run], Result], arguments: Sequence[str] | None = None) -> None:
    """Run one stage from the command line and exit: 0 done, 2 a user's error in one line; bugs keep their traceback.

    Errors of the volume are one line too; the status of an I/O error is 1.

    `arguments`: the run directory; by default the program's own arguments.
    """
    try:
        given = sys.argv[1:] if arguments is None else arguments
        if len(given) != 1:
            raise UserError(f"usage: python -m hyperpod_ft.stages.{name} RUN_DIR")
        perform(Run.open(Path(given[0])), name, work)
    except UserError as error:
        _end(name, str(error))
    except OSError as error:
        _end(name, *volume_failure(error))


def _end(name: str, message: str, status: int = EXIT_USER_ERROR) -> NoReturn:
    print_error(name, message)
    sys.exit(status)


def perform(run: Run, name: str, work: Callable[[Run], Result]) -> None:
    """Do the stage's work unless its record says that it is done. Raises UserError when what it needs is missing."""
    stage_plan = run.plan[name]
    for need in stage_plan.needs:
        if reason := run.journal.why_not_done(need):
            raise UserError(f"needs stage {need}: {reason}", f"run it: hyperpod-ft resume {run.paths.directory}")
    # a job must not hold accelerators while another does the same work, unless both use the result
    patience = _TRAINING_PATIENCE_SECONDS if stage_plan.starts_ranks and not stage_plan.shared else None
    with publish.lock(
        run.paths.lock_path(name), f"{name}: another job is running this stage; waiting for it", patience
    ):
        if run.journal.is_done(name):
            print(f"{name}: already done, nothing to do", flush=True)
            return
        started, clock = utc_now(), time.monotonic()
        read = chain.input_digests(run.journal, stage_plan)
        result = work(run)
        Record(
            stage=name,
            fingerprint=stage_plan.fingerprint,
            inputs={need: run.plan[need].fingerprint for need in stage_plan.needs},
            outputs=outputs_of(
                run.paths.root,
                result.outputs,
                digests=name not in chain.TOOLS,
                sha256=result.sha256,
                xxh3=result.xxh3,
            ),
            facts=result.facts,
            started=started,
            seconds=round(time.monotonic() - clock, 3),
            host=platform.node(),
            job_id=own_job_id(),
            versions=versions(),
            input_digests=read,
        ).write(run.paths.record_path(name))
    print(f"{name}: done in {time.monotonic() - clock:.1f} s", flush=True)
    _report_finished(run, name)


def _report_finished(run: Run, name: str) -> None:
    """Write the page about the run if this was its last stage. A page that cannot be written fails no stage."""
    try:
        if choose(run):
            return
        from hyperpod_ft.report.gather import gather  # noqa: PLC0415 - only the last stage needs them
        from hyperpod_ft.report.page import write_report  # noqa: PLC0415

        write_report([gather(run)], run.paths.report_path)
    except Exception:
        traceback.print_exc()
        print(f"{name}: the report was not written; try: hyperpod-ft report {run.paths.directory}", flush=True)
    else:
        print(f"{name}: report {run.paths.report_path}", flush=True)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results, read without importing them."""
    found = {"python": platform.python_version(), "hyperpod-ft": __version__}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
