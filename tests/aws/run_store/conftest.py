"""Two machines of one run, and the client of its store."""

from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.aws.session import Session
from hyperpod_ft.runs.run import Run
from tests.aws.conftest import Aws
from tests.aws.run_store.stored_runs import make_run


@pytest.fixture
def client(aws: Aws) -> Any:
    found = Session().client("s3", connections=8)
    found.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": aws.region})
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "one")


@pytest.fixture
def other(tmp_path: Path) -> Run:
    return make_run(tmp_path / "two")
