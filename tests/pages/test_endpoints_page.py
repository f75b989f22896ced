"""docs/endpoints.md, typed as it stands: a run's endpoint, from its section of the run file to its deletion.

Genuine: every command, the server that answers with the run's model, and OpenAI's client. What stands in: AWS
(tests/aws/server.py), and the training of the run (tests/aws/endpoint_run.py). The section `deploy` is the page's own.
"""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from hyperpod_ft.config import run_file
from hyperpod_ft.runs.jobs import Job
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.endpoint.deployment import endpoint_name
from tests.aws.account_place import trust
from tests.aws.endpoint_run import make_run
from tests.pages.blocks import ROOT, blocks, run_blocks
from tests.pages.reader import environment

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

PAGE = "docs/endpoints.md"
CLIENT = f"""{sys.executable} - <<'END'
import openai
question = [dict(role="user", content="squeue")]
print(openai.OpenAI().chat.completions.create(model="tuned", messages=question, max_tokens=4).choices[0])
END
"""


@pytest.fixture
def run(aws: "Aws", tmp_path: Path) -> Run:
    """A finished run whose run file has the page's section, in an account with the bucket and the role named there."""
    made = make_run(tmp_path)
    (section,) = blocks(PAGE, "yaml")
    values = yaml.safe_load((made.paths.directory / "run.yaml").read_text()) | yaml.safe_load(section)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    run = Run.of(run_file.load(tmp_path / "run.yaml"))
    run.journal.add_job(Job("generate", "p1", "process", utc_now()))
    bucket, role = values["deploy"]["store"].split("/")[2], values["deploy"]["role"].rpartition("/")[2]
    aws.client("s3").create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": aws.region})
    aws.client("iam").create_role(RoleName=role, AssumeRolePolicyDocument=trust("sagemaker.amazonaws.com"))
    return run


def test_the_page_from_a_run_to_an_endpoint_and_back(aws: "Aws", run: Run, tmp_path: Path) -> None:
    create, url, delete = blocks(PAGE)
    typed = [create, url + CLIENT, delete]
    shell = environment(tmp_path, aws.environment, HYPERPOD_FT_POLL_SECONDS="1")
    create, answered, delete = run_blocks(PAGE, typed, tmp_path, shell, 500, answers=["y"])
    assert "CreateEndpoint {" in create.partition("asking 3 prompts")[0]
    proof = re.search(r"^\d+ of 3 answers equal samples.json.*$", create, re.MULTILINE)
    assert proof and proof[0] in (ROOT / PAGE).read_text(), create
    asked = create[proof.end() :]
    question, answer = (re.escape(text) for text in ("(it costs money until then)\n", "\nLoading tuned"))
    assert re.search(rf"{question}.+{answer}", asked, re.DOTALL), asked
    assert "content=" in answered
    assert re.search(rf"{endpoint_name(run)} +InService", delete)
    assert f"{endpoint_name(run)} no longer costs money" in delete
    assert not aws.client("sagemaker").list_endpoints()["Endpoints"]
    assert not aws.client("s3").list_objects_v2(Bucket="my-bucket").get("Contents")
