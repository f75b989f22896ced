"""docs/training-jobs.md, typed as it stands: from an account to a model, and until nothing of it is left.

Genuine: every command of the kit and of the AWS CLI; the jobs' containers, and their training. What stands in: AWS
(tests/aws/server.py); the reader's editor, which pastes the output of `sagemaker setup`, chooses small instances, and
takes the quickstart's model and data.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from hyperpod_ft.sagemaker.cli.setup import STACK
from tests.pages.blocks import ROOT, blocks, run_blocks
from tests.pages.reader import BIN, environment
from tests.programs import write_program

if TYPE_CHECKING:
    from tests.aws.conftest import Aws

pytestmark = [pytest.mark.training, pytest.mark.timeout(900)]

PAGE = "docs/training-jobs.md"
EDITOR = f"""
import sys
from pathlib import Path
import yaml

run_file, printed, recipe = Path(sys.argv[1]), Path(sys.argv[2]), Path("{ROOT}/hyperpod_ft/recipes/quickstart.yaml")
values, small = (yaml.safe_load(path.read_text()) for path in (run_file, recipe))
values |= {{name: small[name] for name in ("env", "model", "dataset")}}
values["sagemaker"] = yaml.safe_load(printed.read_text().partition("For the run file:")[2])["sagemaker"]
values["cluster"]["instance_type"] = "c7i.xlarge"
values["parallelism"] = {{"ranks_per_node": 1}}
values["training"] |= {{"max_steps": 2, "save_every_steps": 1, "precision": "fp32"}}
values["generate"] = {{"max_new_tokens": 2, "train_samples": 1, "validation_samples": 1}}
run_file.write_text(yaml.safe_dump(values))
"""


@pytest.fixture
def variables(aws: "Aws", tmp_path: Path) -> dict[str, str]:
    """Of the reader's shell."""
    programs, printed = tmp_path / "bin", tmp_path / "printed"
    # a look at a run is dozens of requests, at a stack only two
    often = "[[ $1 != sagemaker ]] || export HYPERPOD_FT_POLL_SECONDS=0.1"
    write_program(programs / "hyperpod-ft", f'set -o pipefail\n{often}\n{BIN}/hyperpod-ft "$@" | tee -a {printed}')
    write_program(programs / "editor", f"exec {sys.executable} -c '{EDITOR}' \"$1\" {printed}")
    return environment(tmp_path, aws.environment, HYPERPOD_FT_POLL_SECONDS="5", EDITOR="editor")


def test_the_page_from_an_account_to_a_model_and_until_nothing_is_left(
    aws: "Aws", tmp_path: Path, variables: dict[str, str]
) -> None:
    account, submit, copy, remove, mail, delete = blocks(PAGE)
    remove += 'echo "In the store:" $(aws s3 ls $STORE/ || true)\n'
    mail += 'aws sns list-subscriptions --query "Subscriptions[].[Protocol, Endpoint]" --output text\n'
    mail += 'aws events list-rules --query "Rules[].EventPattern" --output text\n'
    typed = [account, submit, copy, remove, mail, delete]
    account, submit, copy, remove, mail, delete = run_blocks(PAGE, typed, tmp_path, variables, 800, answers=[STACK])

    assert "no errors, no warnings" in account
    assert "Skipped, already done: download" in submit
    assert "generate     done" in submit
    sagemaker = aws.client("sagemaker")
    listed = sagemaker.list_training_jobs(SortBy="CreationTime", SortOrder="Ascending")["TrainingJobSummaries"]
    names = [job["TrainingJobName"] for job in listed]
    assert [name.split("-")[-2] for name in names] == ["prepare", "train", "finish"]
    assert "hf_..." not in str([sagemaker.describe_training_job(TrainingJobName=name) for name in names])

    copied = tmp_path / "merged"
    sums = dict(line.split()[::-1] for line in (copied / "XXH128SUMS").read_text().splitlines())
    assert "model.safetensors" in sums
    assert sums == {name: xxhash.xxh3_128_hexdigest((copied / name).read_bytes()) for name in sums}

    assert "/merged/model.safetensors" in remove, remove
    assert remove.endswith("In the store: PRE records/\n"), remove
    (group,) = aws.client("logs").describe_log_groups(logGroupNamePrefix="/aws/sagemaker/")["logGroups"]
    assert group["retentionInDays"] == 30

    assert "email\tme@example.com" in mail, mail
    pattern = json.loads(mail.splitlines()[-1])["detail"]
    described = sagemaker.describe_training_job(TrainingJobName=names[0])
    assert pattern == {"RoleArn": [described["RoleArn"]], "TrainingJobStatus": ["Failed", "Stopped"]}

    assert "nothing to cancel" in delete
    assert aws.client("s3").list_buckets()["Buckets"] == []
    assert aws.client("iam").list_roles()["Roles"] == []
