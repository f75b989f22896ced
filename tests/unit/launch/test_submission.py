"""A submission: which stages it chooses by their records, what it prepares, and the status of its jobs."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import decision
from hyperpod_ft.launch import snapshot as snapshots
from hyperpod_ft.launch.decision import decide
from hyperpod_ft.launch.interface import JobState
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher, slurm_of
from hyperpod_ft.launch.snapshot import snapshot
from hyperpod_ft.launch.status import status
from hyperpod_ft.launch.submit import prepare, submit
from hyperpod_ft.localcluster.runtime import Runtime
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.references import all_runs
from hyperpod_ft.runs.results import usage
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection, choose
from hyperpod_ft.shipped import PACKAGE
from hyperpod_ft.stages import stage
from hyperpod_ft.tracking.content import TrackerState
from tests.conftest import MakeRun
from tests.unit.stage_runs import chosen, finish, finish_all


def test_shared_stages_are_shared_between_runs(make_run: MakeRun) -> None:
    finish_all(make_run())
    other = make_run(training__learning_rate=1.0)
    assert chosen(other) == ["train", "consolidate", "merge", "generate"]


def test_a_run_stays_with_the_slurm_that_it_was_submitted_to(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("HYPERPOD_FT_LOCAL", str(tmp_path / "default"))
    default, other = Runtime(tmp_path / "default"), Runtime(tmp_path / "other")
    run = make_run()
    run.freeze()

    def asked() -> str:
        return slurm_of(run).conf

    def submitted(launcher: str, local_cluster: str = "") -> None:
        run.journal.add_job(Job("env", str(len(run.journal.jobs())), launcher, utc_now(), local_cluster))

    with contextlib.ExitStack() as up:
        for cluster in (default, other):
            cluster.path.mkdir(mode=0o700)
            up.callback(shutil.rmtree, cluster.path)
            cluster.conf.touch()
        submitted("process")
        assert asked() == str(default.conf), "no Slurm has it"
        submitted("slurm", other.name)
        assert asked() == str(other.conf)
        other.conf.unlink()
        assert asked() == str(default.conf), "the other has ended"
        other.conf.touch()
        submitted("slurm")
        assert asked() == "", "the Slurm of the system"


def test_choice(make_run: MakeRun) -> None:
    run = make_run()
    everything = [stage_plan.name for stage_plan in run.plan.stages]
    assert chosen(run) == everything
    assert chosen(run, only="env") == ["env"]
    finish_all(run)
    assert chosen(run) == []
    assert chosen(run, force=True) == everything
    assert chosen(run, start="merge", force=True) == ["merge", "generate"]
    assert chosen(run, only="merge", force=True) == ["merge"]
    run.paths.record_path("consolidate").unlink()
    assert chosen(run) == [], "it is merged"
    assert chosen(run, only="consolidate") == chosen(run, start="consolidate") == ["consolidate"]
    with pytest.raises(UserError, match="stage consolidate is needed and has not run"):
        choose(run, Selection(start="merge", force=True))
    with pytest.raises(UserError, match="no stage 'mrege' in this run"):
        choose(run, Selection(only="mrege"))


def test_a_finished_training_is_repeated_only_when_asked_for(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    outputs = {"train": run.paths.checkpoints / "step-00000001" / "x", "consolidate": run.paths.adapter / "x"}
    outputs["merge"] = run.paths.tuned_model / "x"
    finish_all(run)
    for name, output in outputs.items():
        publish.write_text(output, "x")
        finish(run, name, output)
    for name in ("train", "consolidate"):
        outputs[name].unlink()
        assert submit(run, Launchers(), Selection(), "process") == (), f"{name}: the model is whole"
    run.paths.record_path("generate").unlink()
    assert chosen(run) == ["generate"], "other prompts: the model alone answers them"
    finish(run, "generate")
    outputs["merge"].unlink()
    with pytest.raises(UserError, match=r"consolidate: .*adapter/x .*checkpoints/.* --from train") as refused:
        submit(run, Launchers(), Selection(), "process")
    assert f"submit {run.paths.config_path} --from train" in str(refused.value)
    assert chosen(run, start="train") == ["train", "consolidate", "merge"]
    assert decide(run).refused
    assert decide(run, Selection(start="train")).forgotten == (run.paths.record_path("train"),)

    def ends_then(run: Run, selection: Selection) -> object:
        before = choose(run, selection)
        finish(run, "train")
        finish(run, "consolidate")
        return before

    monkeypatch.setattr(decision, "choose", ends_then)
    decided = decide(run)
    assert [stage_plan.name for stage_plan in decided.stages] == ["train", "consolidate", "merge"]
    assert decided.refused is None and decided.forgotten == (), "they have ended since"


def test_a_new_run_that_is_refused_is_not_there(make_run: MakeRun) -> None:
    refused, good = make_run(tracking__python="/absent"), make_run()
    with pytest.raises(UserError, match=r"tracking\.python"):
        submit(refused, Launchers(), Selection(), "process")
    with pytest.raises(UserError, match=r"tracking\.python"):
        prepare(refused, Launchers())
    with pytest.raises(UserError, match="stage consolidate is needed"):
        submit(good, Launchers(), Selection(only="merge"), "process")
    assert all_runs(good.paths.root) == []


def test_a_prepared_run_directory_stands_alone(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    scripts = prepare(run, Launchers())
    assert Run.open(run.paths.directory) == run
    assert [script.stem for script in scripts] == [stage_plan.name for stage_plan in run.plan.stages]
    assert json.loads(run.paths.plan_path.read_text())["run_id"] == run.plan.run_id
    moved = tmp_path / "moved"
    run.paths.directory.rename(moved)
    with pytest.raises(UserError, match="was edited or moved"):
        Run.open(moved)


def test_the_snapshot_runs_by_itself_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = snapshot(tmp_path)
    hashed: list[Path] = []
    monkeypatch.setattr(snapshots.digests, "file_sha256", hashed.append)
    assert snapshot(tmp_path) == code and not hashed, "three callers for one submission"
    program = (
        "import hyperpod_ft.launch.render, hyperpod_ft.shipped as s; print(s.__file__, s.shipped('templates').is_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(code)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(code / "hyperpod_ft" / "shipped.py"), "True"]
    tracked = subprocess.run(["git", "ls-files", "."], cwd=PACKAGE, capture_output=True, text=True, check=True).stdout
    assert [name for name in tracked.split() if not (code / "hyperpod_ft" / name).is_file()] == []


def test_what_lies_beside_the_kits_code_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hyperpod_ft"
    for name in (
        "__init__.py",
        "pins/torch.txt",
        ".env",
        "key.pem",
        "__pycache__/a.pyc",
        "templates/a",
        "lifecycle/a.py",
    ):
        publish.write_text(package / name, "")
    monkeypatch.setattr(snapshots, "PACKAGE", package)
    monkeypatch.setattr(snapshots, "_sources", snapshots._sources.__wrapped__)
    code = snapshot(tmp_path / "copies") / "hyperpod_ft"
    copied = {file.relative_to(code).as_posix() for file in code.rglob("*") if file.is_file()}
    assert {name for name in copied if not name.startswith("templates/")} == {"__init__.py", "pins/torch.txt"}


def test_what_was_deleted_is_made_again_by_the_stage_that_made_it(make_run: MakeRun) -> None:
    run = make_run()
    model = run.paths.base_model / "config.json"
    publish.write_text(model, "{}")
    finish_all(run)
    finish(run, "download", run.paths.base_model)
    model.unlink()
    assert chosen(run) == [], "nothing left needs the base model"
    other = make_run(merge__dtype="float32")
    assert chosen(other) == ["download", "merge", "generate"]
    with pytest.raises(UserError, match="needs stage download"):
        stage.perform(other, "merge", lambda run: stage.Result())


def test_status_of_a_run_whose_checkpoints_were_deleted_is_done(make_run: MakeRun) -> None:
    run = make_run()
    prepare(run, Launchers())
    finish_all(run, but="train")
    current = status(run, Launchers())
    assert current.state == "done"
    train = next(entry for entry in current.stages if entry.stage == "train")
    assert train.detail == "has not run, and nothing needs it"


def test_a_run_of_another_version_of_the_kit_can_be_seen_but_not_gone_on_with(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    prepare(run, Launchers())
    values = json.loads(run.paths.plan_path.read_text())
    for stage_plan in values["stages"]:
        stage_plan["fingerprint"] = f"0123{stage_plan['fingerprint'][4:]}"
    older = run.paths.directory.with_name(values["stages"][4]["fingerprint"][:12])
    run.paths.directory.rename(older)
    (older / "plan.json").write_text(json.dumps(values))
    opened = Run.open(older)
    assert status(opened, Launchers()).state == "not run"
    with pytest.raises(UserError, match="planned by another version"):
        submit(opened, Launchers(), Selection(), "process")
    broken = older.with_name("broken")
    broken.mkdir()
    (broken / "run.yaml").write_text("name: x\n")
    assert all_runs(run.paths.root) == [opened]
    assert str(broken) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("marker", "log", "state"),
    [("143\n", True, "failed"), ("0\n", True, "not run"), (None, True, "failed"), (None, False, "not run")],
)
def test_a_job_that_slurm_has_forgotten_is_judged_by_its_exit_status(
    make_run: MakeRun, marker: str | None, log: bool, state: str
) -> None:
    class Forgetful(SlurmLauncher):
        def states(self, *_: object, **__: object) -> dict[Job, JobState]:  # type: ignore[override]
            return {}

    run = make_run()
    prepare(run, Launchers())
    run.journal.add_job(Job("env", "7", "slurm", utc_now()))
    if marker is not None:
        publish.write_text(run.paths.exit_marker("env", "7"), marker)
    if log:
        publish.write_text(run.paths.log("env", "7"), "")
    assert status(run, Launchers((Forgetful(),))).stages[0].state == state


def test_a_slurm_that_does_not_answer_leaves_what_the_records_say(make_run: MakeRun) -> None:
    class Silent(SlurmLauncher):
        def states(self, *_: object, **__: object) -> dict[Job, JobState]:  # type: ignore[override]
            raise UserError("squeue: no answer in 60 s")

    run = make_run()
    prepare(run, Launchers())
    finish(run, "download")
    for name in ("env", "download"):
        run.journal.add_job(Job(name, "7", "slurm", utc_now()))
    current = status(run, Launchers((Silent(),)))
    assert {entry.stage: entry.state for entry in current.stages[:3]} == {
        "env": "unknown",
        "download": "done",
        "certify": "not run",
    }
    assert "no answer" in current.note


def test_the_jobs_of_a_cluster_that_is_gone_are_gone(make_run: MakeRun) -> None:
    class Other(SlurmLauncher):
        def states(self, *_: object, **__: object) -> dict[Job, JobState]:  # type: ignore[override]
            raise AssertionError("another cluster is not asked")

    run = make_run()
    prepare(run, Launchers())
    run.journal.add_job(Job("env", "7", "slurm", utc_now(), "0123456789ab"))
    assert status(run, Launchers((Other(),))).stages[0].state == "not run"
    run.paths.cancel_marker("env", "7").parent.mkdir()
    run.paths.cancel_marker("env", "7").touch()
    assert status(run, Launchers((Other(),))).stages[0].state == "cancelled"


def test_a_forced_submission_that_fails_has_forgotten_nothing(make_run: MakeRun) -> None:
    class Refusing(ProcessLauncher):
        def submit(self, run: Run, stages: object, *other: object) -> None:
            raise UserError("sbatch train: no such partition")

    run = make_run()
    finish_all(run)
    publish.write_text(run.paths.checkpoints / "step-00000001" / "x", "")
    publish.write_text(run.paths.metrics_path, "")
    before = sorted(path for path in run.paths.root.rglob("*") if path.suffix != ".lock")
    for selection in (Selection(start="train", force=True), Selection(only="download", force=True)):
        with pytest.raises(UserError, match="no such partition"):
            submit(run, Launchers((Refusing(),)), selection, "process")
        assert choose(run) == ()
        assert set(before) <= set(run.paths.root.rglob("*"))


def test_a_forced_training_begins_a_new_account(make_run: MakeRun) -> None:
    class Accepting(ProcessLauncher):
        def submit(self, run: Run, stages: object, *other: object) -> None: ...

    run = make_run()
    finish_all(run)
    with usage.recording_usage(run):
        pass
    before = TrackerState.read(run, "wandb")
    before.write(run, "wandb")
    submit(run, Launchers((Accepting(),)), Selection(only="merge", force=True), "process")
    assert TrackerState.read(run, "wandb") == before
    assert len(usage.read(run.paths)) == 1
    submit(run, Launchers((Accepting(),)), Selection(only="train", force=True), "process")
    assert len(usage.read(run.paths)) == 0
    assert len(list(run.paths.directory.glob("attempts/usage.discarded-*/*.json"))) == 1
    assert TrackerState.read(run, "wandb").key != before.key, "in trackers it is another run"


def test_a_plan_that_cannot_be_read_is_not_called_damaged(make_run: MakeRun) -> None:
    """After an I/O error a user repairs the volume, and submits nothing anew."""
    run = make_run()
    run.freeze()
    run.paths.plan_path.unlink()
    run.paths.plan_path.mkdir()
    with pytest.raises(UserError, match=r"its plan.json cannot be read: Is a directory; repair the volume"):
        Run.open(run.paths.directory)
    run.paths.plan_path.rmdir()
    with pytest.raises(UserError, match=r"its plan.json is missing or damaged"):
        Run.open(run.paths.directory)


def test_a_damaged_list_of_jobs_is_one_line(make_run: MakeRun) -> None:
    run = make_run()
    prepare(run, Launchers())
    run.paths.jobs_path.write_text('[{"stage": "env", "jo')
    with pytest.raises(UserError, match="is damaged"):
        status(run, Launchers())
