"""`serve --on-node` on a real Slurm: a job, its address, an answer, and its end."""

import json
import re
import stat
import subprocess
from functools import partial

import openai
import pytest

from hyperpod_ft.runs.run import Run
from tests.slurm.head import Head
from tests.unit.serving import tuned

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tuned.make(tmp_path_factory.mktemp("tuned"))


def test_a_job_serves_a_run_until_it_is_stopped(head: Head, run: Run) -> None:
    serve = partial(head, "serve", str(run.paths.directory))
    started = serve("--on-node", "--time", "00:30:00")
    assert re.search(r"^job \d+: running", started, re.MULTILINE)
    url = re.search(r"^URL: +(\S+)$", started, re.MULTILINE)
    assert url is not None
    setting = re.search(r"^Key: +(source .*)$", started, re.MULTILINE)
    assert setting is not None
    command = ["bash", "-c", f'{setting[1]}\necho "$HYPERPOD_FT_API_KEY"']
    key = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert len(key) > 20 and key not in started + run.paths.script("serve").read_text()
    assert stat.S_IMODE(run.paths.secrets("serve").stat().st_mode) == 0o600
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url[1], api_key="none", max_retries=0).models.list()
    asking = openai.OpenAI(base_url=url[1], api_key=key, max_retries=0)
    (sample, *_) = json.loads(run.paths.samples_path.read_text())["prompts"]
    for name in ("tuned", "base"):
        answer = asking.completions.create(model=name, prompt=sample["prompt"], max_tokens=tuned.TOKENS)
        assert answer.choices[0].text == sample[name]

    again = serve("--on-node", status=2)
    assert "already serves it" in again and "--stop" in again

    (run.paths.serving / "job.json").unlink()  # as if killed between sbatch and the record
    assert "already serves it" in serve("--on-node", status=2)
    assert re.fullmatch(r"cancelled job \d+\n", serve("--stop"))
    assert not run.paths.secrets("serve").exists()
    assert "nothing to stop" in serve("--stop")


def test_a_job_that_fails_says_why(head: Head, run: Run) -> None:
    failed = head("serve", str(run.paths.directory), "--on-node", "--device", "cuda", status=2)
    assert re.search(r"job \d+ ended \(FAILED\): error: .*cuda", failed)
    assert not run.paths.secrets("serve").exists()
