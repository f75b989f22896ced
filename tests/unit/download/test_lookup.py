"""The Hub is asked for a run's sources before any job, against a server that answers as it does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import call
from tests.unit.hub_server import Hub, Repository, serve

RUN_FILE = """
name: birds
engine: torch
cluster: {root: root, instance_type: p4d.24xlarge}
model: {source: org/tiny}
dataset: {source: org/rows, format: dolly}
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    repositories = {
        "org/tiny": Repository({"config.json": b"{}"}),
        "org/gated": Repository({"config.json": b"{}"}, gated=True),
        "org/empty": Repository({"README.md": b""}),
        "org/rows": Repository({"train.jsonl": b"{}"}, kind="dataset"),
    }
    with serve(repositories) as started:
        yield started


def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    values = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN_PATH": str(tmp_path / "no-token")}
    return values | {"HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}


def test_a_plan_asks_for_each_source_once(tmp_path: Path, hub: Hub) -> None:
    planned = call("plan", "run.yaml", cwd=tmp_path, **environment(hub, tmp_path))
    assert (planned.returncode, planned.stderr) == (0, "")
    assert sorted((method, path) for method, path, _ in hub.requests if "/org/" in path) == [
        ("GET", "/api/datasets/org/rows/revision/main"),
        ("HEAD", "/org/tiny/resolve/main/config.json"),
    ]


SWEEP = """
name: birds
run: run.yaml
grid: {model.source: [org/tinny], dataset.source: [org/tiny], seed: [1, 2]}
"""
WRONG = ("run.yaml", "--set=model.source=org/tinny", "--set=dataset.source=org/tiny")


@pytest.mark.parametrize(
    "command", [("plan", *WRONG), ("submit", *WRONG), ("sweep", "plan", "sweep.yaml"), ("sweep", "sweep.yaml")]
)
def test_what_the_hub_does_not_have_is_found_before_any_job(tmp_path: Path, hub: Hub, command: tuple[str, ...]) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    done = call(*command, cwd=tmp_path, **environment(hub, tmp_path))
    model, dataset = done.stderr.splitlines()
    assert done.returncode == 2 and not (tmp_path / "root").exists()
    assert "model.source" in model and "'org/tinny'" in model and "correct the id" in model
    assert "dataset.source" in dataset and "no dataset 'org/tiny'" in dataset


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.source=org/gated", "gated"),
        ("model.source=org/empty", "no config.json"),
        ("model.revision=v9", "no revision 'v9'"),
        ("model.adapter={source: org/tiny}", "no adapter_config.json"),
    ],
)
def test_each_refusal_is_a_line(tmp_path: Path, hub: Hub, setting: str, said: str) -> None:
    done = call("plan", "run.yaml", f"--set={setting}", cwd=tmp_path, **environment(hub, tmp_path))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and said in line and line.startswith("error: model.")


@pytest.mark.parametrize("value", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_without_the_hub_the_plan_goes_on_and_says_so(tmp_path: Path, hub: Hub, value: dict[str, str]) -> None:
    done = call("plan", "run.yaml", cwd=tmp_path, **environment(hub, tmp_path) | value)
    assert done.returncode == 0 and not hub.requests
    assert done.stderr.count("not looked up: ") == len(done.stderr.splitlines()) > 0
    here = call("plan", "quickstart", cwd=tmp_path)
    assert (here.returncode, here.stderr) == (0, ""), "nothing to look up"
