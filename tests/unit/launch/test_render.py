"""Rendered scripts: equal to the golden ones, accepted by bash and shellcheck, and safe from what values hold."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hyperpod_ft.config import run_file, yaml_file
from hyperpod_ft.config.fields import time_limit_seconds
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.runs.job_files import BANNER, PYTHON, banner
from hyperpod_ft.runs.run import Run
from tests import golden
from tests.conftest import MakeRun
from tests.waiting import wait_for

SCRIPTS = Path(__file__).resolve().parents[3] / "slurm"
INSTALLATION = Installation(Path("/fsx/hyperpod-ft/kit/bin/python"), Path("/fsx/hyperpod-ft/code"))


def of_recipe(name: str) -> Run:
    return Run.of(run_file.load(run_file.find(name)))


def flagship() -> dict[str, str]:
    return render(of_recipe("llama3-8b-dolly-lora-trn1"), INSTALLATION)


def local_run() -> Run:
    values = yaml_file.parse(run_file.RUN_FILE, run_file.find("quickstart"))
    values["model"] = {"source": "org/model"}
    values["dataset"] |= {"source": "org/data"}
    values["cluster"]["root"] = "/fsx/hyperpod-ft"
    values["env"]["python"] = "/shared/venv/bin/python"
    return Run.of(run_file.resolve(run_file.validate(values, "quickstart"), Path("/")))


def test_scripts_equal_the_golden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """HYPERPOD_FT_REFRESH_GOLDEN=1 pytest tests/unit/launch/test_render.py rewrites them."""
    monkeypatch.setenv(PYTHON, "/of/a/container")
    scripts = flagship()
    for stage, text in scripts.items():
        golden.check(SCRIPTS / f"{stage}.sbatch", text)
    assert {path.stem for path in SCRIPTS.glob("*.sbatch")} == set(scripts)


def test_memory_that_is_freed_on_a_gpu_serves_other_sizes() -> None:
    script = render(of_recipe("llama3-8b-dpo-p5"), INSTALLATION)["train"]
    default = "${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"  # the older name of the same settings
    assert f'export PYTORCH_ALLOC_CONF="${{PYTORCH_ALLOC_CONF:-{default}}}"\n' in script
    assert "MALLOC" not in script


def test_ranks_of_engine_trl_unpickle_no_checkpoint() -> None:
    script = render(of_recipe("quickstart-trl"), INSTALLATION)["train"]
    assert "export TORCH_FORCE_WEIGHTS_ONLY_LOAD=1\n" in script


def without_names(script: str) -> str:
    """The script without what the run and its id put into every line that names them."""
    _, name, run_id = re.findall(r"^readonly RUN_DIR=(/fsx/hyperpod-ft/runs/(.*)/(.*))$", script, re.MULTILINE)[0]
    return re.sub(rf"{run_id}(@\w+)?", "ID", script).replace(name, "NAME")


OTHERS = {"local": local_run, "native-trainium": lambda: of_recipe("llama3-8b-lora-trn2")}


@pytest.mark.parametrize("case", OTHERS)
def test_scripts_of_other_engines_differ_from_the_flagships_as_recorded(case: str) -> None:
    base = flagship()
    base["certify"] = base["dataset"].replace("dataset", "certify")  # engine neuron has no such stage
    text = "".join(
        f"== {stage}\n{golden.difference(without_names(base[stage]), without_names(script))}"
        for stage, script in render(OTHERS[case](), INSTALLATION).items()
    )
    golden.check(Path(__file__).parent / "golden" / f"{case}.diff", text)


def nasty_values() -> dict[str, object]:
    return {
        "cluster__root": "/tmp/two words/größe",
        "cluster__environment": {"A": "$(touch pwned)", "B": 'it\'s "quoted" `id`', "C": "ünï ¢ödé", "D": "a b"},
        "env__python": "/opt/my env/bin/python",
    }


def test_bash_and_shellcheck_accept_every_script(make_run: MakeRun, tmp_path: Path) -> None:
    runs = {
        "flagship": flagship(),
        "trn2": render(of_recipe("llama3-8b-lora-trn2"), INSTALLATION),
        "nasty": render(make_run(**nasty_values()), INSTALLATION),
    }
    for case, scripts in runs.items():
        paths = []
        for stage, text in scripts.items():
            paths.append(tmp_path / f"{case}-{stage}.sbatch")
            paths[-1].write_text(text)
            subprocess.run(["bash", "-n", paths[-1]], check=True)
        done = subprocess.run(["shellcheck", *paths], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_values_reach_the_job_literally(make_run: MakeRun, tmp_path: Path) -> None:
    script = render(make_run(**nasty_values()), INSTALLATION)["merge"]
    exports = "\n".join(line for line in script.splitlines() if line.startswith("export "))
    done = subprocess.run(
        ["bash", "-c", f'{exports}\nprintf \'%s\\0\' "$A" "$B" "$C" "$D"'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = nasty_values()["cluster__environment"]
    assert isinstance(expected, dict)
    assert done.stdout.split("\0")[:-1] == list(expected.values())
    assert list(tmp_path.iterdir()) == [], "nothing was executed"


def test_a_path_with_a_space_is_quoted_for_slurm(make_run: MakeRun) -> None:
    run = make_run(cluster__root="/fsx/two words")
    script = render(run, INSTALLATION)["train"]
    assert f'#SBATCH --output="{run.paths.logs}/%x_%j.out"' in script
    assert f"readonly RUN_DIR={shlex.quote(str(run.paths.directory))}" in script


def test_headers(make_run: MakeRun) -> None:
    run = make_run(cluster__partition="dev", cluster__account="ml", cluster__qos="high", cluster__nodes=2)
    train = render(run, INSTALLATION)["train"]
    for option in (
        "--job-name=test-train",
        "--open-mode=append",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
        "--partition=dev",
        "--account=ml",
        "--qos=high",
        "--requeue",
    ):
        assert f"#SBATCH {option}\n" in train
    assert "--exclusive" not in train
    assert "#SBATCH --exclusive\n" in flagship()["train"]


def test_a_job_that_may_have_fewer_nodes_goes_by_their_number(make_run: MakeRun) -> None:
    run = make_run(cluster__nodes=2, cluster__min_nodes=1, training__gradient_accumulation_steps=2)
    scripts = render(run, INSTALLATION)
    train = scripts["train"]
    assert "#SBATCH --nodes=1-2\n" in train
    assert "--ntasks-per-node" not in train.partition("set -E")[0], "Slurm would always give the fewest"
    assert 'export HYPERPOD_FT_NODES="${SLURM_NNODES:-2}"\n' in train
    assert '--nodes="$HYPERPOD_FT_NODES" --ntasks="$HYPERPOD_FT_NODES" --ntasks-per-node=1' in train
    assert "#SBATCH --nodes=1\n" in scripts["merge"]


def test_only_the_stages_before_training_see_the_network_and_the_token(make_run: MakeRun) -> None:
    for stage, text in render(make_run(), INSTALLATION).items():
        assert ("HF_HUB_OFFLINE=1" in text) == (stage not in ("env", "download"))
        assert ("unset HF_TOKEN" in text) == (stage not in ("env", "download"))


def test_the_trap_leaves_the_exit_status_and_a_missing_interpreter_is_one_line(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run(env__python=str(tmp_path / "gone"))
    run.paths.directory.mkdir(parents=True)
    script = tmp_path / "merge.sbatch"
    script.write_text(render(run, INSTALLATION)["merge"])
    environment = {"PATH": os.environ["PATH"], "HYPERPOD_FT_JOB_ID": "7"}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: merge: no interpreter at {tmp_path / 'gone'}")
    assert run.paths.exit_marker("merge", "7").read_text() == "2\n"


@pytest.mark.parametrize("program", ["mkdir", "mv"])
def test_an_exit_status_that_cannot_be_written_leaves_no_half_of_it(
    make_run: MakeRun, tmp_path: Path, program: str
) -> None:
    """As on a full volume. Killed meanwhile, it leaves a name that says so (docs/when-something-fails.md)."""
    run = make_run(env__python="/bin/true")
    (run.paths.directory / "exits").mkdir(parents=True)
    (tmp_path / program).write_text('#!/bin/bash\nls -A "$RUN_DIR/exits" >&2; exit 1\n')
    (tmp_path / program).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HYPERPOD_FT_JOB_ID": "7"}
    script = render(run, INSTALLATION)["merge"].replace("readonly RUN_DIR=", "export RUN_DIR=")
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "the stage succeeded"
    assert re.fullmatch(r"\.merge_7\.partial-.+-\d+\n" if program == "mv" else "", done.stderr)
    assert list((run.paths.directory / "exits").iterdir()) == []


def test_precompile_is_the_training_command_under_graph_extraction() -> None:
    """The scripts differ in the name of the stage, the notice of the time limit and an argument."""
    scripts = flagship()
    train = [line for line in scripts["train"].splitlines() if not line.startswith(("#SBATCH --sig", "# Slurm sig"))]
    assert " --precompile)" in scripts["precompile"]
    precompile = scripts["precompile"].replace(" --precompile)", ")")
    assert precompile.replace("precompile", "train").splitlines() == train


def test_a_script_that_is_terminated_says_so_in_its_exit_status(make_run: MakeRun, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\ntouch started\nexec sleep 60\n")
    python.chmod(0o755)
    run = make_run(env__python=str(python))
    run.paths.directory.mkdir(parents=True)
    script = tmp_path / "merge.sbatch"
    script.write_text(render(run, INSTALLATION)["merge"])
    environment = {"PATH": os.environ["PATH"], "HYPERPOD_FT_JOB_ID": "7"}
    with subprocess.Popen(["bash", script], cwd=tmp_path, env=environment, start_new_session=True) as job:
        wait_for((run.paths.directory / "started").exists, process=job)
        os.killpg(job.pid, signal.SIGTERM)  # as Slurm does: everything in the step
    assert job.returncode == 143
    assert run.paths.exit_marker("merge", "7").read_text() == "143\n"


def test_a_script_prints_the_banner_of_its_stage(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(env__python=shutil.which("true"))
    run.paths.directory.mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "HYPERPOD_FT_JOB_ID": "7"}
    merge = render(run, INSTALLATION)["merge"]
    done = subprocess.run(["bash"], input=merge, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{banner('merge', '7')} on {os.uname().nodename}, ")
    begins = BANNER.match(done.stdout)
    assert begins and begins[1] == "merge"


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("30", 1800), ("30:30", 1830), ("2:00:00", 7200), ("1-0", 86400), ("1-02:30", 95400), ("2-00:00:01", 172801)],
)
def test_time_limits(limit: str, seconds: int) -> None:
    assert time_limit_seconds(limit) == seconds
