"""The script of the job that serves a run: equal to the golden ones, accepted by bash and shellcheck."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpod_ft import publish
from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.render import Installation
from hyperpod_ft.launch.slurm.client import Slurm
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving import models, node_job, vllm
from hyperpod_ft.serving.models import BASE, TUNED, Models
from tests import golden

GOLDEN = Path(__file__).with_name("golden")
INSTALLATION = Installation(Path("/fsx/hyperpod-ft/kit/bin/python"), Path("/fsx/hyperpod-ft/code"))
PYTHON = Path("/fsx/vllm/bin/python")


def both(run: Run) -> Models:
    return Models("a run", {TUNED: run.paths.tuned_model, BASE: run.paths.base_model}, {}, run.paths.tuned_model, run)


def own_server() -> str:
    run = Run.of(run_file.load(run_file.find("llama3-8b-dpo-p5")))
    resources = node_job.resources(run, "04:00:00", accelerators=False)
    return node_job.script(run, INSTALLATION, resources, models.options(both(run), ["--port", "0"]), {})


def with_vllm(recipe: str) -> str:
    run = Run.of(run_file.load(run_file.find(recipe)))
    found, more, environment = vllm.vllm_setup(both(run), PYTHON, "--max-model-len 4096", base=True, on_node=True)
    options = models.options(found, ["--port", "0", *more])
    resources = node_job.resources(run, None, accelerators=True)
    return node_job.script(run, INSTALLATION, resources, options, environment)


SCRIPTS = {
    "own-server": own_server,
    "vllm-gpu": lambda: with_vllm("llama3-8b-dpo-p5"),
    "vllm-neuron": lambda: with_vllm("llama3-8b-dolly-lora-trn1"),
}


def test_scripts_equal_the_golden_ones(tmp_path: Path) -> None:
    """HYPERPOD_FT_REFRESH_GOLDEN=1 pytest tests/unit/serving/test_node_job.py rewrites them."""
    # fingerprints change with the run file's keys, which those of tests/unit/launch show
    scripts = {name: re.sub(r"\b[0-9a-f]{12}([0-9a-f]{4})?\b", "FINGERPRINT", made()) for name, made in SCRIPTS.items()}
    base = scripts["vllm-gpu"]
    golden.check(GOLDEN / "vllm-gpu.sbatch", base)
    for name in ("own-server", "vllm-neuron"):
        golden.check(GOLDEN / f"{name}.diff", golden.difference(base, scripts[name]))
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        subprocess.run(["bash", "-n", tmp_path / name], check=True)
        done = subprocess.run(["shellcheck", tmp_path / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_time_limit_is_checked() -> None:
    run = Run.of(run_file.load(run_file.find("quickstart")))
    with pytest.raises(UserError, match=r"--time tomorrow .*08:00:00"):
        node_job.resources(run, "tomorrow\n#SBATCH --wrap=x", accelerators=False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": "a"}', '{"job_id": 7}'])
def test_damaged_files_are_named(make_run: Callable[..., Run], text: str) -> None:
    run = make_run()
    address, record = run.paths.serving / "7.json", run.paths.serving / "job.json"
    for path in (address, record):
        publish.write_text(path, text)
    with pytest.raises(UserError, match=rf"{address}: is damaged; hyperpod-ft serve .* --stop"):
        node_job.wait(run, Slurm(), Job("serve", "7", "slurm", "2026-01-01T00:00:00Z"), print)
    with pytest.raises(UserError, match=rf"{record}: is damaged; .*squeue"):
        node_job.active(run, Slurm())
