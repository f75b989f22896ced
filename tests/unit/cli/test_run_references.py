"""How every command names a run, and what it says of one that has changed, is done or has failed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hyperpod_ft.cli.main import app
from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import status
from hyperpod_ft.runs import references
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from tests.conftest import run_file_values
from tests.quick_stages import interpreter
from tests.unit.stage_runs import finish, finish_all
from tests.waiting import wait_for

Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str, status: int = 0) -> str:
        capsys.readouterr()
        try:
            ended = int(app(list(arguments), standalone_mode=False) or 0)
        except typer.Exit as end:
            ended = end.exit_code
        shown = capsys.readouterr()
        assert ended == status, shown
        return shown.out + shown.err

    return run


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a run file whose stages take no time, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_run_file(name: str, **changes: Any) -> Path:
        values = run_file_values(tmp_path / "root", env__python=str(interpreter(tmp_path)), **changes)
        values["model"], values["dataset"] = {"source": "example:tiny-llama"}, {"source": "example:qa"}
        values["dataset"]["format"] = "dolly"
        values["parallelism"] = {"ranks_per_node": 1, "tensor_parallel": 1}
        path = Path(name)
        path.write_text(yaml.safe_dump(values))
        return path

    return write_run_file


def submit(command: Command, path: Path) -> Run:
    """The run, once none of its jobs is active."""
    command("submit", str(path), "--launcher", "process")
    run = references.find(None)
    end(run)
    return run


def done(command: Command, path: Path) -> Run:
    """A run whose stages are done, though no job has run."""
    command("render", str(path))
    run = Run.of(run_file.load(path))
    finish_all(run)
    references.set_last("run", run.paths.directory)
    return run


def end(run: Run) -> str:
    """The state of the run, once none of its jobs is active."""
    ended = ("done", "failed")
    wait_for(lambda: status(run, Launchers()).state in ended, what=lambda: run, every=0.1)
    # the job of the last stage ends a moment after its stage
    wait_for(lambda: not Launchers().active(run), what=lambda: run)
    return status(run, Launchers()).state


def test_every_command_names_a_run_in_the_same_ways(command: Command, write: Callable[..., Path]) -> None:
    path = write("run.yaml")
    run = submit(command, path)
    for reference in [], ["test"], [run.paths.full_name], [str(run.paths.directory)], [str(path)]:
        assert json.loads(command("status", *reference, "--json"))["directory"] == str(run.paths.directory)
        assert "== env job" in command("logs", *reference, "env")
        assert run.paths.full_name in command("compare", *reference)
        assert run.paths.full_name in command("resume", *reference)
        assert "nothing to cancel" in command("cancel", *reference)
        command("report", *reference)
        assert run.paths.full_name in Path("report.html").read_text(), "`sweep report` has another default"
        Path("report.html").unlink()
        with pytest.raises(UserError, match=f"{run.paths.tuned_model}: no such directory"):
            command("verify", *reference)
    shown = command("list")
    assert str(run.paths.root) in shown
    assert f"{run.paths.full_name}  done   0.0002" in shown, "the loss of its training"
    for wrong, facts in (("tset", ("tset", "did you mean test?", "hyperpod-ft list")), ("no.yaml", ("no.yaml",))):
        with pytest.raises(UserError) as error:
            command("status", wrong)
        assert all(fact in str(error.value) for fact in (*facts, str(run.paths.root)))
        assert "llama" not in str(error.value), "recipes are no runs"
    with pytest.raises(UserError, match="quotes"):
        command("ask", "how", "are", "you")


def test_a_run_that_is_done_or_whose_file_was_edited(command: Command, write: Callable[..., Path]) -> None:
    first = submit(command, write("run.yaml"))
    last = submit(command, write("other.yaml", training__learning_rate=0.5))
    for again in ("resume", first.paths.full_name), ("submit", "run.yaml", "--launcher", "process"):
        assert "Nothing to submit" in command(*again)
        assert references.find(None) == last
    write("run.yaml", training__learning_rate=0.1)
    shown = command("status", "run.yaml")
    assert "run.yaml: as it is now, it has not been submitted" in shown
    assert f"its last run is {first.paths.full_name}" in shown and "generate     done" in shown
    for arguments in ("cancel", "run.yaml"), ("resume", "run.yaml"):
        with pytest.raises(UserError) as error:
            command(*arguments)
        assert str(first.paths.directory) in str(error.value)
    write("new.yaml", training__learning_rate=0.3)
    with pytest.raises(UserError, match=r"hyperpod-ft submit new\.yaml"):
        command("status", "new.yaml")


def test_a_list_is_sorted_by_the_newest_submission_and_of_a_root(command: Command, write: Callable[..., Path]) -> None:
    first, second = (done(command, write("run.yaml", seed=seed)) for seed in (1, 2))
    for run, day in ((first, 3), (second, 2)):
        run.journal.add_job(Job("merge", "p9", "process", f"2100-01-0{day}T00:00:00Z"))
    newest, older = json.loads(command("list", "--json"))
    assert (newest["directory"], newest["submitted"]) == (str(first.paths.directory), "2100-01-03T00:00:00Z")
    assert older["submitted"] == "2100-01-02T00:00:00Z"
    root = str(first.paths.root)
    for wrong, fact in ((root + "s", "no such directory"), ("test", "status"), (f"{root}/runs", f"give {root}")):
        with pytest.raises(UserError, match=fact):
            command("list", wrong)
    with pytest.raises(UserError, match=f"give {root}"):
        command("list", str(first.paths.directory))
    first.paths.root.rename(f"{root}-away")
    with pytest.raises(UserError, match=f"{root}: no such directory"):
        command("list")


def test_trying_again_without_changes_is_advised_where_it_can_help(
    command: Command, write: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "root").mkdir()
    for exit_status, may_pass in ((1, True), (2, False)):
        (tmp_path / "root" / "fail-dataset").write_text(str(exit_status))
        run = submit(command, write("run.yaml"))
        shown = command("status", status=1)
        assert ("without changes" in shown) == may_pass
        assert f"hyperpod-ft submit {tmp_path}/run.yaml --launcher process" in shown
        assert f"hyperpod-ft resume {run.paths.directory.relative_to(tmp_path)}" in shown


def test_a_training_whose_checkpoints_are_gone_is_repeated_when_asked_for_and_then_resumed(
    command: Command, write: Callable[..., Path], tmp_path: Path
) -> None:
    run = submit(command, write("run.yaml"))
    for stage in ("dataset", "train", "consolidate", "merge"):
        output = run.paths.directory / f"output-of-{stage}"
        output.touch()
        finish(run, stage, output)
        output.unlink()
    shown = command("submit", "run.yaml", "--only", "generate", "--launcher", "process")
    assert "stage generate" in shown and "dataset, train, consolidate, merge" in shown and "Model:" not in shown
    again = f"submit {run.paths.config_path} --from dataset --launcher process"
    with pytest.raises(UserError) as refused:
        command("resume")
    for shown in (str(refused.value), command("status"), command("plan", "run.yaml")):
        assert f"hyperpod-ft {again}" in shown and "hyperpod-ft resume" not in shown
    fail = tmp_path / "root" / "fail-train"
    fail.touch()
    command(*again.split())
    assert end(run) == "failed"
    assert "hyperpod-ft resume" in command("status", status=1)
    fail.unlink()
    command("resume")
    assert end(run) == "done"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_what_acts_on_a_run_takes_no_name_for_another_users(command: Command, write: Callable[..., Path]) -> None:
    run = done(command, write("run.yaml"))
    run.paths.origin.write_text("x; evil \x1b[2J")
    os.chown(run.paths.config_path, 4242, -1)
    assert "done" in command("status", "test"), "to look at"
    assert run.journal.submitted_as == "'x;' evil '?[2J'", "no command line, and nothing that controls a terminal"
    for acting in ("cancel", "resume"):
        with pytest.raises(UserError, match=str(run.paths.directory)):
            command(acting, "test")
    assert "nothing to cancel" in command("cancel", run.paths.full_name)


def test_a_misspelt_file_is_named_before_any_run_was_submitted(command: Command) -> None:
    with pytest.raises(UserError, match=r"mistyped\.yaml: no such file"):
        command("status", "mistyped.yaml")
