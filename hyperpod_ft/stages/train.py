"""Stage train: fine-tune the model on the run's prepared rows.

    python -m hyperpod_ft.job.torchrun --nnodes N --nproc-per-node P ... -m hyperpod_ft.stages.train RUN_DIR [--trial]

Every process runs this module. Rank 0 alone does what every stage does (skip when done, check, lock, record), plans the
layout, and gives it to the others, which then begin. Writes `layout.json`, `checkpoints/step-*/` and `metrics.jsonl`.
When started again, it resumes from the newest complete checkpoint. Exit status: 0 done, 2 a user's error, 128 + signal
when a signal stopped it after saving.

With `--trial` it runs only a few steps, for stage precompile: nothing is skipped, resumed, saved or recorded.
"""

import os
import sys

if __name__ == "__main__" and "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    import signal

    from hyperpod_ft import heartbeat
    from hyperpod_ft.processes import die_with_parent

    # A rank that outlives its torchrun, when that is killed, must not join the next attempt. Before the imports, which
    # take seconds.
    die_with_parent(os.getppid(), signal.SIGKILL)
    heartbeat.begin()

from hyperpod_ft import gc_pause, heartbeat

if __name__ == "__main__":
    gc_pause.pause_collection()  # until the engine is imported, see _engine

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.data import tokenizer
from hyperpod_ft.data.images.reader import ImageReader, of_prompts
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.data.text import run_prompts
from hyperpod_ft.engines import engine
from hyperpod_ft.engines.interface import Engine, TrainingResult, TrainingTask
from hyperpod_ft.engines.ranks import NO_TIMEOUT, Interrupted, Ranks, join_ranks
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError, print_error
from hyperpod_ft.job import neuron_cache
from hyperpod_ft.job.job_host import this_host
from hyperpod_ft.planning.layout import Layout
from hyperpod_ft.planning.model_fit import check_model_directory
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.assets import with_adapter
from hyperpod_ft.runs.job_files import JOB_ID
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import first_changed
from hyperpod_ft.runs.results import holdings, places, usage
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.stages import stage

_LAYOUT = "hyperpod_ft/train/layout"  # store key: the layout with which training begins; empty when it does not
_TRIAL = "--trial"
_REPORTED = "hyperpod_ft/train/reported"  # store key: rank 0 has printed why it ends


def main() -> None:
    """Run the stage from the command line."""
    try:
        run, ranks = _join()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks have the same error; one prints it
            print_error("train", str(error))
        sys.exit(EXIT_USER_ERROR)
    if sys.argv[2:] == [_TRIAL]:
        _trial(run, ranks)
    elif ranks.is_rank_0:
        _run_rank_0(ranks)
    else:
        _run_other_rank(run, ranks)


def _join() -> tuple[Run, Ranks]:
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], [_TRIAL]):
        raise UserError(f"usage: python -m hyperpod_ft.stages.train RUN_DIR [{_TRIAL}]")
    run = Run.open(Path(sys.argv[1]))
    return run, join_ranks(run.plan.degrees.world_size)


def _run_rank_0(ranks: Ranks) -> None:
    """Rank 0: run the stage as every stage is run, and give the others the layout when training begins."""

    def work(run: Run) -> stage.Result:
        heartbeat.beat("start")
        chosen = _engine(run.config)
        layout = plan_layout(run)
        check_data(run.journal)
        check_prompts(run)
        with _counted_graphs(run) as graphs, usage.recording_usage(run):
            _give_layout(layout, run.paths, ranks)
            trained: TrainingResult = chosen.train(_task_here(run, layout), ranks)
            heartbeat.beat("end")  # before the graphs are counted, and the usage is written
        restarted = {"restarts": [restart.as_dict() for restart in attempts.history(run.paths, "train")]}
        ran = {"places": [asdict(place) for place in places.read(run.paths)]}
        return stage.Result(
            (trained.checkpoint, run.paths.metrics_path),
            trained.facts | graphs | restarted | ran | _held(run),
            sha256=description.digests(trained.checkpoint),
        )

    try:
        heartbeat.beat("waiting")  # for the stage's lock
        stage.main("train", work)
    except Interrupted as interrupted:
        print(f"train: {interrupted}", flush=True)
        sys.exit(interrupted.exit_status)
    finally:
        if not ranks.store.check([_LAYOUT]):
            ranks.store.set(_LAYOUT, "")
        ranks.store.set(_REPORTED, "yes")


def _held(run: Run) -> dict[str, Any]:
    """What nodes were held for until now; nothing if a file that others write cannot be read: the training is done."""
    with contextlib.suppress(UserError, OSError):
        return holdings.facts(run)
    return {}


def _run_other_rank(run: Run, ranks: Ranks) -> None:
    """Any other rank: train when rank 0 has given the layout; rank 0 prints errors."""
    layout = _await_layout(ranks)
    if layout is None:
        return
    try:
        _engine(run.config).train(_task_here(run, layout), ranks)
    except UserError as error:
        _exit_for_user_error(error, ranks)
    except Interrupted as interrupted:
        with contextlib.suppress(RuntimeError):
            ranks.store.wait([_REPORTED], timedelta(seconds=30))
        sys.exit(interrupted.exit_status)


def _trial(run: Run, ranks: Ranks) -> None:
    """Run one rank of the trial; stage precompile does everything else."""
    try:
        chosen = _engine(run.config)
        if ranks.is_rank_0:
            try:
                _give_layout(plan_layout(run), run.paths, ranks)
            except BaseException:
                ranks.store.set(_LAYOUT, "")
                raise
        layout = _await_layout(ranks)
        if layout is None:
            raise UserError("rank 0 has refused the run")
        facts = chosen.precompile(training_task(run, layout), ranks)
    except UserError as error:
        _exit_for_user_error(error, ranks)
    if ranks.is_rank_0:
        publish.write_json(run.paths.trial_facts, facts)


def check_prompts(run: Run) -> None:
    """Raise UserError when stage generate would refuse a prompt after the training.

    Stage dataset checks those of the run that prepared the rows; other runs share them.
    """
    asked = run.config.dataset.questions
    if run.config.generate.prompts and asked.may_have_messages:
        chats = run_prompts.are_chats(asked, PreparedDataset.open(run.paths.dataset_path).samples("train"))
        model, prompts = run.paths.base_model, run.config.generate.prompts
        images = of_prompts(ImageReader.load(model) if asked.images else None, run.paths.prompt_images)
        run_prompts.as_asked(prompts, asked, tokenizer.load(model), chats=chats, images=images)


def _give_layout(layout: Layout, paths: RunPaths, ranks: Ranks) -> None:
    """Freeze the layout, and let the other ranks begin."""
    publish.write_text(paths.layout_path, layout.as_json())
    ranks.store.set(_LAYOUT, layout.as_json())


def _await_layout(ranks: Ranks) -> Layout | None:
    """The layout that rank 0 gives; None when there is nothing to train."""
    # rank 0 may be waiting for another job's lock
    ranks.store.wait([_LAYOUT], NO_TIMEOUT)
    given = ranks.store.get(_LAYOUT)
    return Layout.of_json(given) if given else None


def _engine(config: RunConfig) -> Engine:
    """The engine of the run, with the packages that it imports."""
    chosen = engine(config.engine)
    gc_pause.resume_collection()
    return chosen


@contextlib.contextmanager
def _counted_graphs(run: Run) -> Iterator[dict[str, Any]]:
    """Repair the compile cache, if there is one, for training; afterwards count the graphs that were still compiled.

    The count includes graphs that another job with the same shapes compiled at the same time.
    """
    facts: dict[str, Any] = {}
    if "precompile" not in run.plan:
        yield facts
        return
    cache = run.paths.neuron_cache
    with neuron_cache.using(cache) as removed:
        neuron_cache.print_removed("train", removed)
        before = neuron_cache.finished(cache)
        yield facts
        facts["graphs_compiled"] = len(neuron_cache.finished(cache) - before)
    print(f"train: {facts['graphs_compiled']} graphs were compiled during training", flush=True)


def _exit_for_user_error(error: UserError, ranks: Ranks) -> NoReturn:
    """Exit with an error that all ranks have: rank 0 prints it; another rank only if rank 0 does not."""
    if ranks.is_rank_0:
        print_error("train", str(error))
        ranks.store.set(_REPORTED, "yes")
        sys.exit(EXIT_USER_ERROR)
    # torchrun ends every rank as soon as one fails: rank 0 gets time to print
    try:
        ranks.store.wait([_REPORTED], timedelta(seconds=30))
    except RuntimeError:
        print_error("train", str(error))
    sys.exit(EXIT_USER_ERROR)


def plan_layout(run: Run) -> Layout:
    """The layout of a run whose base model is on disk. Raises UserError when the run cannot train it."""
    certificate = run.journal.certificate()
    degrees, paths = run.plan.degrees, run.paths
    return check_model_directory(run.config, degrees, paths.base_model, certificate, paths.teacher).layout


def check_data(journal: Journal) -> None:
    """Reject rows other than those that stage dataset recorded, since the plan's fingerprints stand for those only."""
    record = journal.record("dataset")
    certificate = journal.certificate()
    packed = record is not None and record.facts.get("packing") in ("bfd", "wrapped")
    if packed and certificate and certificate.not_packed:
        raise UserError(
            f"dataset: its rows have several examples, which the newest certificate excludes: {certificate.not_packed}",
            "prepare it again: hyperpod-ft submit RUN_FILE --only dataset --force",
        )
    outputs = [output for output in record.outputs if output.sha256] if record else []
    if changed := first_changed(journal.paths.root, outputs):
        raise UserError(
            f"{journal.paths.root / changed.path}: differs from what stage dataset wrote",
            "run: hyperpod-ft submit RUN_FILE --only dataset --force",
        )


def training_task(run: Run, layout: Layout) -> TrainingTask:
    """What an engine is asked to train; stages download and dataset are done."""
    record = run.journal.record("dataset")
    facts = record.facts if record else {}
    examples, rows = facts.get("train_examples"), facts.get("train_rows")
    return TrainingTask(
        config=with_adapter(run.config),
        layout=layout,
        fingerprint=run.plan["train"].fingerprint,
        base_model=run.paths.base_model,
        dataset=run.paths.dataset_path,
        documents_per_row=examples / rows if examples and rows else None,
        directory=run.paths.directory,
        compile_cache=run.paths.compile_cache,
        adapter=run.paths.starting_adapter,
        teacher=run.paths.teacher,
    )


def _task_here(run: Run, layout: Layout) -> TrainingTask:
    """The task, with this node's memory for checkpoints, if the run wants them and a job can start the ranks again."""
    task, wanted = training_task(run, layout), run.config.training.memory_checkpoint_every_steps
    return replace(task, memory=this_host().memory(run.paths.directory)) if wanted and JOB_ID in os.environ else task


def run() -> int:
    """Run the command line; returns the exit status, 1 after a traceback.

    The process is to end with `os._exit`. All is written by then. Python's exit would tear down the threads of gloo and
    NCCL, which sometimes aborts the process ("terminate called without an active exception") or waits for ranks that
    are gone: the supervisor would see another status, and retry a user's error or count a finished training as failed.
    """
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):  # whoever read the output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    return status if isinstance(status, int) else 1


if __name__ == "__main__":
    os._exit(run())
