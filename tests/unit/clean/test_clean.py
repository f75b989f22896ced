"""What `clean` lists, keeps and removes, also beside a submission that starts at the same moment."""

import errno
import fcntl
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer

from hyperpod_ft import publish
from hyperpod_ft.clean import inventory, removal
from hyperpod_ft.clean.inventory import Item, take_inventory
from hyperpod_ft.clean.removal import Removal, remove
from hyperpod_ft.cli.main import app
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import snapshot
from hyperpod_ft.launch import submit as submit_module
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.snapshot import hold
from hyperpod_ft.launch.submit import prepare, submit
from hyperpod_ft.runs import volume_lock
from hyperpod_ft.runs.records import Record, outputs_of, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from hyperpod_ft.serving import models
from hyperpod_ft.serving.models import Models
from tests.conftest import MakeRun
from tests.waiting import wait_for


def existing(run: Run, *, finished: bool) -> Run:
    """The run with all that it grows on the volume."""
    run.freeze()
    for path in (
        run.paths.base_model,
        run.paths.raw_datasets[0],
        run.paths.dataset_path,
        run.paths.checkpoint(1),
        run.paths.logs,
        run.paths.tuned_model,
    ):
        publish.write_text(path / "content", "x" * 5000)
    for stage in run.plan.stages if finished else run.plan.stages[:3]:
        record = Record(stage.name, stage.fingerprint, {}, (), {}, utc_now(), 0.0, "test", "")
        record.write(run.paths.record_path(stage.name))
    return run


def items(root: Path) -> dict[str, Item]:
    return {item.name: item for item in take_inventory(root).items}


def removed(root: Path, *names: str, kinds: tuple[str, ...] = ()) -> list[str]:
    return [item.name for item in remove(root, Removal(names, kinds), Launchers())]  # type: ignore[arg-type]


def name(run: Run, path: Path) -> str:
    return run.paths.relative(path)


def test_a_run_needs_the_files_of_all_its_sources(make_run: MakeRun, tmp_path: Path) -> None:
    here = tmp_path / "rows.jsonl"
    here.write_text("{}\n")
    sources = [{"source": "org/one", "format": "text"}, {"source": str(here), "format": "chat"}]
    held_out = {"source": "org/two", "format": "text"}
    waiting = existing(make_run(dataset={"sources": sources, "validation_source": held_out}), finished=False)
    for directory in waiting.paths.raw_datasets:
        publish.write_text(directory / "content", "x")
    found = items(waiting.paths.root)
    assert len(waiting.paths.raw_datasets) == 3
    assert all(waiting.paths.full_name in found[name(waiting, path)].kept for path in waiting.paths.raw_datasets)


def test_what_needs_it_decides(make_run: MakeRun) -> None:
    done = existing(make_run(), finished=True)
    waiting = existing(make_run(name="other", seed=43), finished=False)
    root = done.paths.root
    assert done.paths.base_model == waiting.paths.base_model and done.paths.dataset_path != waiting.paths.dataset_path
    publish.write_text(root / "models" / "org--unused@main" / "weights", "x")
    publish.write_text(root / "models" / "notes.txt", "not the kit's")
    found = items(root)
    assert found["models/org--unused@main"].kept == found["models/org--unused@main"].only_by_name == ""
    assert waiting.paths.full_name in found[name(done, done.paths.base_model)].kept
    assert done.paths.full_name in found[name(done, done.paths.dataset_path)].only_by_name
    assert (
        found[name(done, done.paths.checkpoints)].kept == ""
        and "consolidated" in found[name(done, waiting.paths.checkpoints)].kept
    )
    assert "models/notes.txt" not in found

    everything = ("runs", "checkpoints", "models", "datasets", "logs", "leftovers")
    assert removed(root, kinds=everything) == [
        name(done, done.paths.checkpoints),
        name(done, done.paths.logs),
        "models/org--unused@main",
    ]
    assert done.paths.base_model.exists() and done.paths.dataset_path.exists() and waiting.paths.logs.exists()
    assert done.journal.is_done("merge"), "the run is still finished"
    for refused in (done.paths.base_model, waiting.paths.checkpoints, root / "nothing"):
        with pytest.raises(UserError, match=refused.name):
            removed(root, name(done, refused))

    # without the run that waits, nothing unfinished needs the model; a run is removed with all it has
    assert sorted(removed(root, name(done, waiting.paths.directory), name(done, waiting.paths.logs))) == [
        name(done, waiting.paths.directory)
    ]
    assert not (root / "runs" / "other").exists()
    assert removed(root, name(done, done.paths.base_model)) == [name(done, done.paths.base_model)]
    assert done.journal.is_done("merge")


def test_all_that_forced_stages_left_may_go(make_run: MakeRun) -> None:
    run = existing(make_run(), finished=False)
    places = run.paths.directory, run.paths.directory / "attempts", run.paths.directory / "evaluations"
    left = [place / "x.discarded-2026-01-01T000000Z-1" for place in places]
    for path in left:
        publish.write_text(path, "x")
    assert sorted(removed(run.paths.root, kinds=("discarded",))) == sorted(name(run, path) for path in left)


def test_a_model_that_another_run_begins_with_stays(make_run: MakeRun) -> None:
    first = existing(make_run(), finished=True)
    second = make_run(model__source=str(first.paths.tuned_model), model__revision=None)
    existing(second, finished=False)
    assert second.paths.full_name in items(first.paths.root)[name(first, first.paths.directory)].kept


@pytest.mark.parametrize(
    "file, text, reason",
    [("plan.json", "{", "plan.json is missing or damaged"), ("run.yaml", "name: other\n", "engine: is missing")],
)
def test_a_run_that_cannot_be_opened_keeps_all_that_runs_share(
    make_run: MakeRun, file: str, text: str, reason: str
) -> None:
    done, damaged = existing(make_run(), finished=True), existing(make_run(name="other"), finished=False)
    publish.write_text(done.paths.root / "models" / "org--unused@main" / "weights", "x")
    (damaged.paths.directory / file).write_text(text)
    found = take_inventory(done.paths.root)
    said = found.unreadable[0].removeprefix(f"{damaged.paths.directory}: ")
    assert reason in said.replace(str(damaged.paths.directory), "")
    assert {item.kind for item in found.items if not item.kept} == {"runs", "checkpoints", "logs"}
    assert removed(done.paths.root, kinds=("models", "datasets")) == []


def test_things_of_another_user_stay(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    done = existing(make_run(), finished=True)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert all(item.kept.startswith("belongs to") for item in items(done.paths.root).values())


def test_nothing_of_a_run_at_work_is_removed(make_run: MakeRun) -> None:
    """A finished run, of which a stage runs again: its jobs are asked for, not only its records."""
    run = make_run()
    prepare(run, Launchers())
    existing(run, finished=True)
    publish.write_text(run.paths.secrets("env"), "", mode=0o600)
    run.paths.script("env").write_text("#!/bin/bash\nsleep 300\n")
    ProcessLauncher().submit(run, run.plan.stages[:1], {})
    try:
        chosen = removal.select(take_inventory(run.paths.root), Removal(kinds=("checkpoints",)), Launchers())
        assert chosen.items == () and "env p1" in chosen.at_work[0][1]
        for asked in (run.paths.checkpoints, run.paths.dataset_path, run.paths.directory, run.paths.secrets_directory):
            with pytest.raises(UserError, match="at work: env p1"):
                removed(run.paths.root, name(run, asked))
    finally:
        ProcessLauncher().cancel(run, run.journal.jobs())
    left = [name(run, path) for path in (run.paths.checkpoints, run.paths.secrets_directory)]
    assert removed(run.paths.root, kinds=("checkpoints", "secrets")) == left


def test_code_that_a_server_imports_from_stays(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    done = existing(make_run(env={"python": None}), finished=True)
    copy = done.paths.code_copies / "hyperpod-ft-0.1.0-0123456789abcdef0123456789abcdef"
    publish.write_text(copy / "hyperpod_ft" / "__init__.py", "")
    held: list[int] = []
    monkeypatch.setattr(snapshot, "snapshot", lambda copies: copy)  # the real copy has hundreds of files
    monkeypatch.setattr(snapshot, "hold", lambda copy: held.append(hold(copy)))
    variables = models.environment(Models("title", {}, {}, done.paths.tuned_model, done))
    assert variables["PYTHONPATH"] == str(copy)
    became = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    try:
        os.close(held[0])
        with pytest.raises(UserError, match="a server imports from it"):
            removed(done.paths.root, name(done, copy))
        assert removed(done.paths.root, kinds=("code",)) == []
    finally:
        became.communicate()
    assert removed(done.paths.root, kinds=("code",)) == [name(done, copy)]


def test_code_of_which_nothing_is_known_stays(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    done = existing(make_run(env={"python": None}), finished=True)
    copy = done.paths.code_copies / "hyperpod-ft-0.1.0-0123456789abcdef0123456789abcdef"
    publish.write_text(copy / "hyperpod_ft" / "__init__.py", "")

    def unknown(_: Path) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(inventory, "is_held", unknown)
    with pytest.raises(UserError, match="cannot tell whether a server imports from it: No locks available"):
        removed(done.paths.root, name(done, copy))


class Noting(ProcessLauncher):
    """Notes the stages it is given."""

    def submit(self, run: Run, stages: object, *_: object) -> None:
        (run.paths.root / "submitted").write_text(" ".join(stage.name for stage in stages))  # type: ignore[attr-defined]


def test_a_submission_that_begins_first_keeps_what_it_needs(make_run: MakeRun) -> None:
    done = existing(make_run(), finished=True)
    root, model = done.paths.root, name(done, done.paths.base_model)
    new = make_run(name="new", training__learning_rate=0.5)
    with ThreadPoolExecutor() as pool:
        with volume_lock.submitting(root):
            removal_of_model = pool.submit(removed, root, model)
            new.freeze()
        with pytest.raises(UserError, match=f"needed by {new.paths.full_name}"):
            removal_of_model.result(timeout=300)
    assert done.paths.base_model.exists()


def test_the_program_that_a_killed_submission_leaves_holds_off_a_removal(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []

    class Killed(ProcessLauncher):
        def submit(self, *_: object) -> None:  # type: ignore[override]
            left.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False))  # as sbatch is started
            raise KeyboardInterrupt

    monkeypatch.setattr(submit_module, "snapshot", lambda copies: copies)  # the real copy has hundreds of files
    run = make_run()
    with pytest.raises(KeyboardInterrupt):
        submit(run, Launchers((Killed(),)), Selection(), "process")
    with (run.paths.root / "records" / "clean.lock").open("a") as removal_lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(removal_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        left[0].communicate()
        fcntl.flock(removal_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_submission_that_begins_later_sees_what_is_gone(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    done = existing(make_run(), finished=True)
    record = done.journal.record("download")
    assert record is not None
    publish.write_json(
        done.paths.record_path("download"),
        {**record.__dict__, "outputs": [one.__dict__ for one in outputs_of(done.paths.root, [done.paths.base_model])]},
    )
    new = make_run(name="new", training__learning_rate=0.5)
    new.freeze()
    with ThreadPoolExecutor() as pool:
        with volume_lock.removing(done.paths.root):
            submission = pool.submit(submit, new, Launchers((Noting(),)), Selection(), "process")
            wait_for(lambda: "waiting for hyperpod-ft clean" in capfd.readouterr().out)
            publish.discard(done.paths.base_model)
        submission.result(timeout=300)
    assert (done.paths.root / "submitted").read_text().split()[0] == "download"


def test_a_submission_that_waited_for_the_removal_of_its_run_makes_it_again(
    make_run: MakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    with ThreadPoolExecutor() as pool:
        with volume_lock.removing(run.paths.root):
            submission = pool.submit(prepare, run, Launchers())
            wait_for(lambda: "waiting for hyperpod-ft clean" in capfd.readouterr().out)
            publish.discard(run.paths.directory)
        submission.result(timeout=300)
    assert Run.open(run.paths.directory).paths.logs.is_dir(), "Slurm fails a job whose log it cannot open"
    assert (run.paths.directory / "submit.lock").exists()


def test_a_link_in_runs_leads_to_nothing_that_is_removed(make_run: MakeRun, tmp_path: Path) -> None:
    done = existing(make_run(), finished=True)
    other = existing(make_run(cluster__root=str(tmp_path / "other"), name="other"), finished=True)
    (done.paths.root / "runs" / "other").symlink_to(other.paths.directory.parent)
    own = tmp_path / "project" / ".cache.partial"
    publish.write_text(own / "file", "x")
    for path in (own / "file", own):
        os.utime(path, (1e9, 1e9))
    (done.paths.root / "runs" / "project").symlink_to(own.parent)
    assert "is a run of" in take_inventory(done.paths.root).unreadable[0]
    assert removed(done.paths.root, kinds=("checkpoints", "leftovers")) == [name(done, done.paths.checkpoints)]
    assert other.paths.checkpoints.exists() and own.exists()


def test_an_environment_that_is_named_through_a_link_stays(make_run: MakeRun, tmp_path: Path) -> None:
    root = make_run().paths.root
    environment = root / "envs" / "0123456789abcdef"
    publish.write_text(environment / "bin" / "python", "")
    (tmp_path / "link").symlink_to(root)
    waiting = make_run(env__python=str(tmp_path / "link" / "envs" / environment.name / "bin" / "python"))
    existing(waiting, finished=False)
    assert waiting.paths.full_name in items(root)[f"envs/{environment.name}"].kept


def test_a_removal_that_is_killed_leaves_a_leftover_and_no_half_of_anything(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = existing(make_run(), finished=True)

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(publish, "remove", killed)
        removed(done.paths.root, name(done, done.paths.base_model), name(done, done.paths.directory))
    assert not done.paths.base_model.exists() and not done.paths.directory.exists()
    left = [item.name for item in items(done.paths.root).values() if item.kind == "leftovers"]
    assert len(left) == 2 and all(one.endswith(".replaced") for one in left), left
    assert sorted(removed(done.paths.root, kinds=("leftovers",))) == sorted(left)
    assert not list(done.paths.root.glob("models/.*replaced")) and not list(done.paths.root.glob("runs/*/.*"))


def test_a_download_in_progress_is_no_leftover(make_run: MakeRun) -> None:
    run = make_run()
    run.freeze()
    publish.write_text(publish.partial_of(run.paths.base_model) / "weights", "x")
    gone = run.paths.root / "models" / ".org--gone@main.partial"
    publish.write_text(gone / "weights", "x")
    assert removed(run.paths.root, kinds=("leftovers",)) == [], "it may be being written by something that is no run"
    for path in (run.paths.root / "models").rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert removed(run.paths.root, kinds=("leftovers",)) == ["models/.org--gone@main.partial"]


def test_names_on_the_volume_cannot_control_the_terminal(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    run.freeze()
    publish.write_text(run.paths.root / "models" / "org--\x1b[2J@main" / "weights", "x")
    for arguments in ([], ["--what", "models", "--yes"]):
        app(["clean", str(run.paths.root), *arguments], standalone_mode=False)
        printed = capsys.readouterr().out
        assert "org--?[2J@main" in printed and "\x1b" not in printed


def test_the_command_removes_nothing_unless_it_is_told_to(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def clean(*arguments: str) -> str:
        app(["clean", str(done.paths.root), *arguments], standalone_mode=False)
        return capsys.readouterr().out

    done = existing(make_run(), finished=True)
    checkpoints = name(done, done.paths.checkpoints)
    assert checkpoints in clean() and done.paths.checkpoints.exists()
    assert '"only_by_name": "a finished run"' in clean("--json", "--what", "checkpoints")
    for refused, fact in (
        (["--what", "checkpoint"], "checkpoints?"),
        (["--older-than", "3"], "--what"),
        (["--what", "checkpoints"], "--yes"),
    ):
        with pytest.raises((UserError, typer.Exit), match=fact):
            clean(*refused)
    assert "nothing to remove" in clean("--what", "checkpoints", "--older-than", "1", "--yes")
    assert done.paths.checkpoints.exists()
    assert "removed 1 of 1" in clean("--remove", f"{checkpoints}/", "--yes")
    assert not done.paths.checkpoints.exists()
    with pytest.raises(UserError, match="runs"):
        app(["clean", str(tmp_path)], standalone_mode=False)
