"""`serve --on-node` on a real Slurm: a job, its address, an answer, and its end."""

import json
import re
import stat
import subprocess
from pathlib import Path

import openai
import pytest

from hyperpod_ft.localcluster import LocalCluster
from hyperpod_ft.runs.run import Run
from tests.programs import call
from tests.unit.serving import tuned

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tuned.make(tmp_path_factory.mktemp("tuned"))


def serve(cluster: LocalCluster, run: Run, *options: str) -> "subprocess.CompletedProcess[str]":
    return call("serve", run.paths.directory, *options, **cluster.environment())


def test_a_job_serves_a_run_until_it_is_stopped(cluster: LocalCluster, run: Run) -> None:
    started = serve(cluster, run, "--on-node", "--time", "00:30:00")
    assert started.returncode == 0, started.stderr
    assert re.search(r"^job \d+: running", started.stdout, re.MULTILINE)
    url = re.search(r"^URL: +(\S+)$", started.stdout, re.MULTILINE)
    assert url is not None
    setting = re.search(r"^Key: +(source .*)$", started.stdout, re.MULTILINE)
    assert setting is not None
    command = ["bash", "-c", f'{setting[1]}\necho "$HYPERPOD_FT_API_KEY"']
    key = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert len(key) > 20 and key not in started.stdout + started.stderr + run.paths.script("serve").read_text()
    assert stat.S_IMODE(run.paths.secrets("serve").stat().st_mode) == 0o600
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url[1], api_key="none", max_retries=0).models.list()
    asking = openai.OpenAI(base_url=url[1], api_key=key, max_retries=0)
    (sample, *_) = json.loads(run.paths.samples_path.read_text())["prompts"]
    for name in ("tuned", "base"):
        answer = asking.completions.create(model=name, prompt=sample["prompt"], max_tokens=tuned.TOKENS)
        assert answer.choices[0].text == sample[name]

    again = serve(cluster, run, "--on-node")
    assert again.returncode == 2 and "already serves it" in again.stderr and "--stop" in again.stderr

    (run.paths.serving / "job.json").unlink()  # as if killed between sbatch and the record
    again = serve(cluster, run, "--on-node")
    assert again.returncode == 2 and "already serves it" in again.stderr
    stopped = serve(cluster, run, "--stop")
    assert re.fullmatch(r"cancelled job \d+\n", stopped.stdout), stopped.stderr
    assert not run.paths.secrets("serve").exists()
    assert "nothing to stop" in serve(cluster, run, "--stop").stdout


def test_a_job_that_fails_says_why(cluster: LocalCluster, run: Run, tmp_path: Path) -> None:
    failed = serve(cluster, run, "--on-node", "--device", "cuda")
    assert failed.returncode == 2
    assert re.search(r"job \d+ ended \(FAILED\): error: .*cuda", failed.stderr)
    assert not run.paths.secrets("serve").exists()
