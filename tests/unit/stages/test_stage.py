"""What every stage shares: skip, needs, lock and record."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import stage
from tests.conftest import MakeRun
from tests.unit.report.recorded_run import recorded_run
from tests.unit.stage_runs import chosen, finish, finish_all


def test_work_leaves_a_record_and_is_not_repeated(make_run: MakeRun) -> None:
    run = make_run()
    calls = []

    def work(run: Run) -> stage.Result:
        calls.append(1)
        output = run.paths.root / "models" / "x"
        publish.write_text(output, "weights")
        return stage.Result([output], {"rows": 3})

    stage.perform(run, "download", work)
    stage.perform(run, "download", work)
    record = run.journal.record("download")
    assert len(calls) == 1
    assert record is not None
    assert record.facts == {"rows": 3}
    assert [(output.path, output.size) for output in record.outputs] == [("models/x", 7)]
    assert record.versions["python"]


def test_the_last_stage_of_a_run_writes_its_report(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    for name in ("merge", "generate"):
        run.paths.record_path(name).unlink()
    stage.perform(run, "merge", lambda _: stage.Result())
    assert not run.paths.report_path.exists(), "generate has not run"
    stage.perform(run, "generate", lambda _: stage.Result())
    assert run.paths.full_name in run.paths.report_path.read_text()


def test_a_report_that_cannot_be_written_fails_no_stage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path)
    run.paths.record_path("generate").unlink()
    run.paths.report_path.mkdir()
    stage.perform(run, "generate", lambda _: stage.Result())
    assert run.journal.is_done("generate")
    assert f"hyperpod-ft report {run.paths.directory}" in capfd.readouterr().out


def test_an_output_that_is_gone_or_cut_short_makes_the_stage_run_again(make_run: MakeRun) -> None:
    run = make_run()
    output = run.paths.root / "x"
    publish.write_text(output, "abc")
    finish(run, "download", output)
    assert run.journal.is_done("download")
    output.write_text("ab")
    assert run.journal.why_not_done("download") == "x has 2 bytes, was 3"
    output.unlink()
    assert "x no longer exists" in run.journal.why_not_done("download")


def test_a_record_of_another_configuration_does_not_count(make_run: MakeRun) -> None:
    finish_all(make_run())
    other = make_run(merge__dtype="float32")
    assert other.journal.why_not_done("merge") == "its configuration changed"
    assert chosen(other) == ["merge", "generate"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"stage": 1}', '{"outputs": [{"path": 3}]}'])
def test_a_damaged_record_is_no_record(make_run: MakeRun, text: str) -> None:
    run = make_run()
    publish.write_text(run.paths.record_path("env"), text)
    assert run.journal.why_not_done("env") == "has not run"


def test_missing_needs_are_named(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(UserError, match="needs stage env: has not run; run it: hyperpod-ft resume"):
        stage.perform(run, "dataset", lambda run: stage.Result())


def test_two_attempts_at_once_do_the_work_once(make_run: MakeRun) -> None:
    run = make_run()
    calls: list[int] = []
    entered = threading.Event()

    def work(run: Run) -> stage.Result:
        calls.append(1)
        entered.wait(0.3)
        return stage.Result()

    threads = [threading.Thread(target=stage.perform, args=(run, "env", work)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_the_program_ends_with_2_and_one_line_for_a_users_error(make_run: MakeRun, tmp_path: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hyperpod_ft.stages.env", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert call().stderr.startswith("error: env: usage:")
    done = call(str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no run.yaml in it" in done.stderr


@pytest.mark.parametrize(("code", "status"), [(errno.EIO, 1), (errno.ENOSPC, 2), (errno.ESTALE, 2)])
def test_a_failing_volume_is_one_line(
    make_run: MakeRun, code: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of read() or write() names no file. After an I/O error, ranks are started again."""
    run = make_run()
    run.freeze()

    def work(run: Run) -> stage.Result:
        raise OSError(code, os.strerror(code))

    with pytest.raises(SystemExit) as ended:
        stage.main("env", work, [str(run.paths.directory)])
    assert ended.value.code == status
    assert capsys.readouterr().err == (
        f"error: env: the volume: {os.strerror(code)}; free or repair the volume, then resume\n"
    )


def test_a_second_training_job_does_not_sit_on_its_nodes(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    finish_all(run, but="train")
    monkeypatch.setattr(stage, "_TRAINING_PATIENCE_SECONDS", 0.2)
    with publish.lock(run.paths.lock_path("train")), pytest.raises(UserError, match="still locked by another process"):
        stage.perform(run, "train", lambda run: stage.Result())


def test_a_run_waits_while_another_compiles_the_graphs_that_it_needs_too(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(engine="neuron", cluster__instance_type="trn1.32xlarge", parallelism={"tensor_parallel": 8})
    finish_all(run, but="precompile")
    monkeypatch.setattr(stage, "_TRAINING_PATIENCE_SECONDS", 0.2)
    held, work = threading.Event(), []

    def compile_elsewhere() -> None:
        with publish.lock(run.paths.lock_path("precompile")):
            held.set()
            time.sleep(1)
            work.append("elsewhere")
            finish(run, "precompile")

    other = threading.Thread(target=compile_elsewhere)
    other.start()
    held.wait()
    stage.perform(run, "precompile", lambda run: work.append("here") or stage.Result())
    other.join()
    assert work == ["elsewhere"], "and finds it done"
