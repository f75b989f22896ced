"""What the ranks of a training are given: the layout, and the task of the engine. Knows the run, but no ranks."""

from concurrent.futures import ThreadPoolExecutor

from hyperpod_ft.digests import file_sha256
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.layout import Layout
from hyperpod_ft.planning.model_fit import check_model_directory
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run


def plan_layout(run: Run) -> Layout:
    """The layout of a run whose base model is on disk. Raises UserError when the run cannot train it."""
    return check_model_directory(run.config, run.plan.degrees, run.paths.base_model).layout


def check_data(journal: Journal) -> None:
    """Reject rows other than those that stage dataset recorded, since the plan's fingerprints stand for those only."""
    record = journal.record("dataset")
    outputs = record.outputs if record else ()
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(file_sha256, (journal.paths.root / output.path for output in outputs)))
    for output, digest in zip(outputs, digests, strict=True):
        if digest != output.sha256:
            raise UserError(
                f"{journal.paths.root / output.path}: differs from what stage dataset wrote",
                "run: hyperpod-ft submit RUN_FILE --only dataset --force",
            )


def training_task(run: Run, layout: Layout) -> TrainingTask:
    """What an engine is asked to train; stages download and dataset are done."""
    record = run.journal.record("dataset")
    facts = record.facts if record else {}
    examples, rows = facts.get("train_examples"), facts.get("train_rows")
    return TrainingTask(
        config=run.config,
        layout=layout,
        fingerprint=run.plan["train"].fingerprint,
        base_model=run.paths.base_model,
        dataset=run.paths.dataset_path,
        documents_per_row=examples / rows if examples and rows else None,
        directory=run.paths.directory,
        compile_cache=run.paths.compile_cache,
    )
