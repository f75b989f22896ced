"""Where a run keeps things, and what can be read of it."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.config import yaml_text
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher
from hyperpod_ft.launch.submit import cancel, prepare, submit
from hyperpod_ft.runs import references
from hyperpod_ft.runs.jobs import GitState, Job, Submission
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection


def test_checkpoints_are_found_by_their_full_names(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert run.paths.checkpoints_by_step() == {}
    for name in ("step-00000400", "step-00000012", "step-12", "step-00000500.partial", ".step-00000600.partial", "x"):
        (run.paths.checkpoints / name).mkdir(parents=True)
    assert list(run.paths.checkpoints_by_step().items()) == [
        (12, run.paths.checkpoint(12)),
        (400, run.paths.checkpoint(400)),
    ]
    assert run.paths.checkpoint(12).name == "step-00000012"


def test_the_exit_status_of_a_job(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert run.journal.exit_status("train", "7") is None
    marker = run.paths.exit_marker("train", "7")
    marker.parent.mkdir(parents=True)
    for text, status in (("0\n", 0), ("143\n", 143), ("", 1), ("?", 1)):
        marker.write_text(text)
        assert run.journal.exit_status("train", "7") == status


def test_the_log_is_the_jobs_own_or_what_cloudwatch_has(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert run.journal.log_here("train", "7") is None
    run.paths.logs.mkdir(parents=True)
    for log in (run.paths.fetched_log("train", "7"), run.paths.log("train", "7")):
        log.touch()
        assert run.journal.log_here("train", "7") == log


def test_submissions_are_read_oldest_first_and_damaged_files_left_out(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert run.journal.submissions() == []
    state = GitState("0123abc", [" M run.yaml"])
    first = Submission("2026-01-01T00:00:00Z", ["submit"], "/home/me", "me", "head", "0.1.0", "/fsx/code/1", state)
    second = replace(first, time="2026-01-01T00:00:01Z", git=None)
    run.journal.add_submission(second, "2026-01-01T000001Z-7")
    run.journal.add_submission(first, "2026-01-01T000000Z-8")
    (run.paths.provenance / "submission-2025-01-01T000000Z-9.json").write_text('{"time": "2025-')
    assert run.journal.submissions() == [first, second]


def test_a_kill_between_the_plan_and_the_run_file_leaves_a_run_that_the_next_submission_completes(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run().freeze()
    changed = make_run(eval={"tasks": ["arc_easy"]})
    write = publish.write_text

    def until_the_run_file(path: Path, text: str) -> None:
        if path == changed.paths.config_path:
            raise KeyboardInterrupt
        write(path, text)

    with monkeypatch.context() as killed:
        killed.setattr(publish, "write_text", until_the_run_file)
        with pytest.raises(KeyboardInterrupt):
            changed.freeze()
    assert Run.open(changed.paths.directory) == changed
    Run.open(changed.paths.directory).freeze()
    assert changed.paths.config_path.read_text() == yaml_text.dump(changed.config)


def test_a_run_file_that_cannot_be_submitted_leaves_a_run_that_commands_can_read(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    class Unreachable(SlurmLauncher):
        def states(self, *_: object, **__: object) -> dict[Job, JobState]:  # type: ignore[override]
            raise UserError("squeue: no answer in 60 s")

    run = make_run()
    with pytest.raises(UserError, match="no answer"):
        submit(run, Launchers((Unreachable(),)), Selection())
    assert references.find(str(run.paths.directory)) == run
    assert cancel(run, Launchers((Unreachable(),))) == ()


def test_the_run_and_the_sweep_that_were_submitted_last_are_remembered_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    references.set_last("run", tmp_path / "a run")
    with pytest.raises(UserError, match="no sweep was submitted yet"):
        references.last_directory("sweep")
    references.set_last("sweep", tmp_path / "a sweep")
    assert references.last_directory("run") == tmp_path / "a run"
    assert references.last_directory("sweep") == tmp_path / "a sweep"
    assert capsys.readouterr().err == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    references.set_last("run", tmp_path)
    assert "not remembered as the last run" in capsys.readouterr().err
    with pytest.raises(UserError, match="no run was submitted yet"):
        references.last_directory("run")


def test_a_volume_with_two_paths_is_used_by_one(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """A bind mount, here a link: jobs that were submitted below one path would not be recognized below the other."""
    run = make_run()
    prepare(run, Launchers())
    other_path = tmp_path / "mounted again"
    other_path.symlink_to(run.paths.root)
    cluster = run.config.cluster.model_copy(update={"root": str(other_path)})
    again = replace(run, config=run.config.model_copy(update={"cluster": cluster}))
    with pytest.raises(UserError) as error:
        prepare(again, Launchers())
    assert str(run.paths.root) in error.value.remedy and str(other_path) in error.value.problem
    assert Run.open(run.paths.directory) == run
    run.paths.config_path.write_text("of another version", encoding="utf-8")
    prepare(run, Launchers())
    assert Run.open(run.paths.directory) == run


def test_an_edited_run_yaml_counts_not_its_copy_in_the_plan(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.freeze()
    assert "learning_rate" in run.paths.plan_path.read_text()
    run.paths.config_path.write_text(
        run.paths.config_path.read_text().replace("learning_rate: 0.0002", "learning_rate: 0.5")
    )
    assert Run.open(run.paths.directory).config.training.learning_rate == 0.5
    run.paths.config_path.chmod(0)
    if os.geteuid() == 0:
        return  # root reads it all the same
    with pytest.raises(UserError, match=r"run\.yaml: Permission denied"):
        Run.open(run.paths.directory)


def test_a_job_may_have_fewer_nodes_than_its_run_wants(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"cluster__nodes": 2, "training__gradient_accumulation_steps": 3}
    wanted, fixed = make_run(**step, cluster__min_nodes=1), make_run(**step, name="fixed")
    wanted.freeze()
    fixed.freeze()
    monkeypatch.setenv("HYPERPOD_FT_NODES", "1")
    found = Run.open(wanted.paths.directory)
    assert (found.plan.degrees.nodes, found.nodes_wanted) == (1, 2)
    assert found.config.training.gradient_accumulation_steps == 6
    assert found.paths.directory == wanted.paths.directory
    assert Run.open(fixed.paths.directory) == fixed
    monkeypatch.delenv("HYPERPOD_FT_NODES")
    assert Run.open(wanted.paths.directory) == wanted
