"""Which jobs of a real Slurm are a run's, when a submission was cut short or a site has its own ways."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.render import slurm_job_comment, slurm_job_name
from hyperpod_ft.launch.slurm.launcher import SlurmLauncher, slurm_of, states_of_runs
from hyperpod_ft.launch.status import status
from hyperpod_ft.launch.submit import cancel, prepare, submit
from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from tests.conftest import MakeRun
from tests.programs import write_program
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture
def slurm(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLauncher]:
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    yield SlurmLauncher()
    subprocess.run(["scancel", "--user", str(os.getuid())], check=True, timeout=300)
    wait_for(lambda: not queue(), what=queue, every=0.1)


def queue() -> list[str]:
    done = subprocess.run(["squeue", "-h", "-o", "%i %j"], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.splitlines()


def waiting(make_run: MakeRun, **overrides: object) -> Run:
    return make_run(env__python="/bin/false", **overrides)


def names_and_comments() -> set[tuple[str, str]]:
    done = subprocess.run(["squeue", "-h", "-o", "%j|%k"], capture_output=True, text=True, check=True, timeout=300)
    return {(name, comment) for name, comment in (line.split("|") for line in done.stdout.splitlines())}


def sbatch_wrapper(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put an sbatch on PATH; REAL in its text is the real one."""
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    write_program(directory / "sbatch", text.replace("REAL", real))
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_jobs_that_a_killed_submission_left_are_found_and_cancelled(
    slurm: SlurmLauncher, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waiting(make_run)
    # held, so that they stay; and the second does not answer before the kill
    sbatch_wrapper(
        tmp_path,
        monkeypatch,
        f'id=$(REAL --hold "$@"); if [[ -e {tmp_path}/first ]]; then while kill -0 $PPID; do sleep 0.1; done; fi'
        f'\ntouch {tmp_path}/first; echo "$id"',
    )
    run.freeze()
    program = (
        "import pathlib, sys; from hyperpod_ft.runs.run import Run\n"
        "from hyperpod_ft.launch.launchers import Launchers\n"
        "from hyperpod_ft.launch.submit import submit; from hyperpod_ft.runs.selection import Selection\n"
        "submit(Run.open(pathlib.Path(sys.argv[1])), Launchers(), Selection())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, run.paths.directory]) as submission:
        wait_for(lambda: len(queue()) >= 2, what=queue, every=0.05, process=submission)
        submission.send_signal(signal.SIGKILL)
    assert len(run.journal.jobs()) == 1, "the second was made, and nobody wrote it down"
    with pytest.raises(UserError, match=r"still at work: (env .*download|download .*env)"):
        submit(run, Launchers(), Selection())
    assert len(run.journal.jobs()) == 2
    slurm.cancel(run, list(Launchers().active(run)))
    wait_for(lambda: not queue(), what=queue, every=0.1)
    assert not Launchers().active(run)


def test_a_script_that_was_submitted_by_hand_can_be_cancelled(slurm: SlurmLauncher, make_run: MakeRun) -> None:
    run = waiting(make_run)
    prepare(run, Launchers())
    by_hand = ["sbatch", "--parsable", "--hold", str(run.paths.script("env"))]
    done = subprocess.run(by_hand, capture_output=True, text=True, check=True, timeout=300)
    (job,) = cancel(run, Launchers())
    assert (job.stage, job.job_id) == ("env", done.stdout.strip())
    assert status(run, Launchers()).stages[0].state == "cancelled"


def test_an_interrupted_submission_cancels_what_it_made(
    slurm: SlurmLauncher, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waiting(make_run)
    sbatch_wrapper(
        tmp_path,
        monkeypatch,
        'id=$(REAL --hold "$@"); [[ "$*" == *dataset* ]] && { echo oops >&2; exit 1; }; echo "$id"',
    )
    with pytest.raises(UserError, match="sbatch dataset: oops"):
        submit(run, Launchers(), Selection())
    wait_for(lambda: not queue(), what=queue, every=0.1)


def test_site_customizations_of_slurm(
    slurm: SlurmLauncher, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = waiting(make_run)
    sbatch_wrapper(tmp_path, monkeypatch, 'echo "Welcome to ExampleCluster, 3 nodes are idle"; exec REAL --hold "$@"')
    monkeypatch.setenv("SBATCH_JOB_NAME", "foo")
    monkeypatch.setenv("SBATCH_COMMENT", "site")
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    jobs = submit(run, Launchers(), Selection())
    assert all(job.job_id.isdigit() for job in jobs)
    subprocess.run(["scontrol", "update", f"jobid={jobs[0].job_id}", "comment=billing-tag"], check=True, timeout=300)
    subprocess.run(["scontrol", "update", f"jobid={jobs[1].job_id}", "jobname=renamed"], check=True, timeout=300)
    assert {entry.state for entry in status(run, Launchers()).stages} == {"pending"}
    assert len(Launchers().active(run)) == len(jobs)


def test_a_job_that_jobs_json_makes_up_is_not_cancelled(
    slurm: SlurmLauncher, make_run: MakeRun, tmp_path: Path
) -> None:
    """Of the same user, with the name that a job of the run would have."""
    run = waiting(make_run)
    prepare(run, Launchers())
    submitted = ["sbatch", "--parsable", "--hold", f"--job-name={slurm_job_name(run.config, 'env')}", "--wrap=true"]
    done = subprocess.run(submitted, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    run.journal.add_job(Job("env", done.stdout.strip(), "slurm", utc_now()))
    assert cancel(run, Launchers()) == ()
    assert len(queue()) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root submits as another user")
def test_the_jobs_of_another_user_are_left_alone(
    slurm: SlurmLauncher, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of one's own jobs, comment included, that somebody else submitted: neither counted nor cancelled."""
    mine = waiting(make_run)
    sbatch_wrapper(tmp_path, monkeypatch, 'exec REAL --hold "$@"')
    other = submit_as(65534, mine)
    try:
        (listed,) = queue()
        assert listed.split()[0] == other
        jobs = submit(mine, Launchers(), Selection())
        assert names_and_comments() >= {
            (slurm_job_name(mine.config, job.stage), slurm_job_comment(mine.paths)) for job in jobs
        }
        assert {job.job_id for job in cancel(mine, Launchers())} == {job.job_id for job in jobs}
        wait_for(lambda: len(queue()) <= 1, what=queue, every=0.1)
        assert queue()[0].split()[0] == other
    finally:
        subprocess.run(["scancel", other], check=True, timeout=300)


def submit_as(user: int, run: Run) -> str:
    """The id of a held job of that user which looks like the first of the run."""
    name = slurm_job_name(run.config, run.plan.stages[0].name)
    done = subprocess.run(
        [
            *("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"),
            # into the directories of this test, which are root's alone
            *("--inh-caps=+dac_override", "--ambient-caps=+dac_override"),
            *("sbatch", "--parsable", "--hold", f"--job-name={name}", f"--comment={slurm_job_comment(run.paths)}"),
            *("--output=/dev/null", "--chdir=/", "--wrap=true"),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.strip()


def test_two_runs_of_one_recipe_below_two_roots_are_two(
    slurm: SlurmLauncher, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = waiting(make_run)
    second = waiting(make_run, cluster__root=str(tmp_path / "other root"), cluster__instance_type="local")
    assert first.plan == second.plan and first.paths.directory != second.paths.directory
    sbatch_wrapper(tmp_path, monkeypatch, 'exec REAL --hold "$@"')
    of_first = submit(first, Launchers(), Selection())
    of_second = submit(second, Launchers(), Selection())
    assert len(of_first) == len(of_second) == len(first.plan.stages)
    assert set(Launchers().active(first)) == set(of_first)
    # the first run's ids under the second's names, as after a cluster was set up again
    both = states_of_runs(slurm_of(first), [(first, of_first), (second, [*of_second, *of_first])])
    assert [set(states) for states in both] == [set(of_first), set(of_second)]
    found = slurm.states(second, of_first)
    assert {job.job_id for job in found} == {job.job_id for job in of_second}, "only those that are not recorded"
    assert cancel(second, Launchers()) == of_second
    wait_for(lambda: len(queue()) <= len(of_first), what=queue, every=0.1)
    assert {entry.state for entry in status(first, Launchers()).stages} == {"pending"}
    assert {entry.state for entry in status(second, Launchers()).stages} == {"cancelled"}


def test_slurm_keeps_no_secret(
    slurm: SlurmLauncher, cluster: LocalCluster, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld saves the environment of each job, and backups have it; the stages that need a token read a file."""
    secrets = {
        "HF_TOKEN": "hf_aaaabbbbccccdddd",
        "WANDB_API_KEY": "it's eeee-ffff",
        "PIP_INDEX_URL": "https://a:gggg@b/",
    }
    # the second one may not replace what the script itself exports
    for name, value in {**secrets, "HARMLESS": "hhhh-iiii", "PYTHONPATH": "hf_finetunemodels2024"}.items():
        monkeypatch.setenv(name, value)
    sbatch_wrapper(tmp_path, monkeypatch, 'REAL --hold "$@"')
    run = waiting(make_run, tracking={"trackers": ["wandb"]})
    submit(run, Launchers(), Selection())
    saved = b""
    for path in (cluster.conf.parent / "state").rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):  # slurmctld renames them meanwhile
            saved += path.read_bytes()
    assert b"hhhh-iiii" in saved, "this is where Slurm keeps it"
    assert not [value for value in secrets.values() if value.encode() in saved]

    directory = run.paths.secrets_directory
    files = sorted(directory.iterdir())
    assert [file.name for file in files] == ["download", "env", "generate", "train"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory, *files)} == {0o700, 0o600}

    python = tmp_path / "python"
    monkeypatch.setenv("HYPERPOD_FT_PYTHON", str(python))
    (run.paths.directory / "json.py").write_text("raise SystemExit('not of the run directory')")
    for name in secrets:
        monkeypatch.delenv(name)

    def shown(stage: str, status: int) -> str:
        python.write_text(
            f"#!/bin/sh\n{sys.executable} -c 'import json' || exit 9\n"
            f'echo "$PYTHONPATH"\necho "$HF_TOKEN|$WANDB_API_KEY|$PIP_INDEX_URL"\nexit {status}\n'
        )
        python.chmod(0o755)
        done = subprocess.run(["bash", run.paths.script(stage)], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        (*_, code, values) = done.stdout.splitlines()
        assert Path(code).parent == run.paths.code_copies
        return values

    assert shown("download", 0) == "|".join(secrets.values())
    assert not run.paths.secrets("download").exists() and run.paths.secrets("env").exists()
    assert shown("generate", 143) == f"|{secrets['WANDB_API_KEY']}|{secrets['PIP_INDEX_URL']}", "no token of the Hub"
    assert run.paths.secrets("generate").exists(), "Slurm may start it again"
    assert shown("dataset", 0) == "||"
    assert shown("env", 1) == "|".join(secrets.values())
    assert not list(directory.iterdir()), "the jobs that wait for it never start"


def test_cancelling_removes_secrets(
    slurm: SlurmLauncher, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_aaaabbbbccccdddd")
    sbatch_wrapper(tmp_path, monkeypatch, 'REAL --hold "$@"')
    run = waiting(make_run)
    submit(run, Launchers(), Selection())
    assert list(run.paths.secrets_directory.iterdir())
    cancel(run, Launchers())
    assert not list(run.paths.secrets_directory.iterdir())
    publish.write_text(run.paths.secrets("env"), "", mode=0o600)  # its job reached its time limit
    publish.write_text(run.paths.secrets("serve"), "", mode=0o600)
    assert cancel(run, Launchers()) == ()
    assert list(run.paths.secrets_directory.iterdir()) == [run.paths.secrets("serve")], (
        "that of a server, which has its own end"
    )
