"""The chain of digests from a run's data to its answers: a record has those of what its stage left and had read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.plan import StagePlan, plan
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.records import CARD, Output, first_changed
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths

TOOLS = ("env", "certify", "tasks", "precompile")  # what these stages leave may be made again, and changes no result
_SETTINGS, _ENDPOINT = "settings", "endpoint"


@dataclass(frozen=True)
class Link:
    """What a stage had read and left, or the settings of all, or the endpoint, beside what is there now."""

    name: str
    files: int = 0  # that are as recorded
    gone: int = 0  # removed since, with all that they are part of, or kept in a store
    waits: str = ""  # why there is nothing to check
    broken: str = ""  # what differs, and what to do


def links(run: Run) -> Iterator[Link]:
    """Every link, to the first that is broken. Reads all files that are here. Raises UserError as planning does."""
    for link in _links(run):
        yield link
        if link.broken:
            return


def input_digests(journal: Journal, stage: StagePlan) -> dict[str, str]:
    """Digests of the records of the stages that this one needs: what it reads."""
    needs = (need for need in stage.needs if need not in TOOLS)
    return {need: record.digest for need in needs if (record := journal.record(need))}


def model_digest(journal: Journal) -> str:
    """The digest of the tuned model's record; empty without one."""
    record = journal.record(journal.plan.model_stage)
    return record.digest if record else ""


def _links(run: Run) -> Iterator[Link]:
    yield Link(_SETTINGS, broken=_changed_settings(run))
    for stage in run.plan.stages:
        if stage.name not in TOOLS:
            yield _of_stage(run.journal, stage)
    if run.paths.endpoint_proof.exists():
        yield Link(_ENDPOINT, broken=_other_model(run.journal))


def _changed_settings(run: Run) -> str:
    now = {stage.name: stage.fingerprint for stage in plan(run.config).stages}
    for stage in run.plan.stages:
        if now.get(stage.name) != stage.fingerprint:
            problem = f"{run.paths.config_path}: was edited, or planned by another version: other settings of stage"
            return str(UserError(f"{problem} {stage.name}", "restore it, or submit it as a run file"))
    return ""


def _of_stage(journal: Journal, stage: StagePlan) -> Link:
    record, root = journal.valid_record(stage.name), journal.paths.root
    if record is None:
        return Link(stage.name, waits=journal.why_not_done(stage.name))
    read = input_digests(journal, stage)
    for need, digest in record.input_digests.items():
        if read.get(need) != digest:
            problem = f"{journal.paths.record_path(need)}: is not of what stage {stage.name} has read"
            return Link(stage.name, broken=str(UserError(problem, _again(journal, stage.name))))
    outputs = [output for output in record.outputs if Path(output.path).name != CARD]
    here, in_store = list[Output](), journal.sizes_in_store()
    for output in outputs:
        if (root / output.path).exists():
            here.append(output)
        elif output.path not in in_store and _whole(journal.paths, root / output.path).exists():
            return _broken(journal, stage, output, "is missing")
    if changed := first_changed(root, here):
        return _broken(journal, stage, changed, f"differs from what stage {stage.name} left")
    return Link(stage.name, len(here), len(outputs) - len(here))


def _whole(paths: RunPaths, file: Path) -> Path:
    """The model, dataset, checkpoint or other directory that the file is of, which is removed whole."""
    shared, above = (*paths.inputs, paths.dataset_path), (paths.checkpoints, paths.directory)
    return next((place for place in file.parents if place in shared or place.parent in above), paths.root)


def _broken(journal: Journal, stage: StagePlan, output: Output, how: str) -> Link:
    problem, remedy = f"{journal.paths.root / output.path}: {how}", _again(journal, stage.name)
    return Link(stage.name, broken=str(UserError(problem, f"restore it, or remove it and {remedy}")))


def _again(journal: Journal, stage: str) -> str:
    return f"run: {journal.submit_command(f'{journal.paths.config_path} --from {stage} --force')}"


def _other_model(journal: Journal) -> str:
    """Why the endpoint did not answer with the tuned model; empty if it did."""
    path = journal.paths.endpoint_proof
    try:
        asked = json.loads(path.read_bytes()).get("model")
    except (OSError, ValueError, AttributeError):
        return str(UserError(f"{path}: is damaged", "run: hyperpod-ft deploy"))
    if asked == model_digest(journal):
        return ""
    return str(UserError(f"{path}: the endpoint was asked with another model", "run: hyperpod-ft deploy"))
