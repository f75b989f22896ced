"""`push` against an HTTP server that answers as the Hub does. The command runs as its own process."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpod_ft.runs.records import Record, outputs_of, utc_now
from hyperpod_ft.runs.run import Run
from tests.unit.hub_server import GOOD_TOKEN, OTHER_TOKEN, Hub, Repository, serve
from tests.unit.stage_runs import make_run, tree, weights
from tests.unit.tracking.conftest import finish
from tests.waiting import wait_for

NAME = "org/tuned"
SHARDS = {f"model-0000{number}-of-00003.safetensors": weights(weight=os.urandom(4096)) for number in (1, 2, 3)}
SMALL = {
    "README.md": b"---\nlibrary_name: transformers\n---\n\n# test\n",
    "config.json": b"{}",
    "tokenizer.json": b"{}",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve({}) as started:
        yield started


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    """A run with a merged model of three shards and an adapter."""
    dataset = {"source": "org/rows", "revision": "d" * 40, "format": "dolly"}
    run = make_run(tmp_path, "org/base", dataset, "c0ffee" + "0" * 34)
    adapter = {
        "adapter_config.json": json.dumps({"r": 8, "base_model_name_or_path": "/fsx/models/base"}).encode(),
        "adapter_model.safetensors": weights(lora=b"lora"),
    }
    finish(run, final_loss=0.25)
    _write(run, "merge", run.paths.tuned_model, SHARDS | SMALL)
    _write(run, "consolidate", run.paths.adapter, adapter)
    return run


def _write(run: Run, stage: str, directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    facts = {"chat_template": "none"}
    outputs = outputs_of(run.paths.root, [directory], digests=False)
    Record(stage, run.plan[stage].fingerprint, {}, outputs, facts, utc_now(), 0.0, "test", "").write(
        run.paths.record_path(stage)
    )


def start(run: Run, hub: Hub, *options: str, token: str = GOOD_TOKEN) -> "subprocess.Popen[str]":
    home = str(run.paths.root / "hf")
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    if token:
        variables["HF_TOKEN"] = token
    return subprocess.Popen(
        [sys.executable, "-m", "hyperpod_ft", "push", str(run.paths.directory), NAME, *options],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def push(run: Run, hub: Hub, *options: str, token: str = GOOD_TOKEN) -> tuple[int, str]:
    process = start(run, hub, *options, token=token)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def test_a_model_arrives_whole_in_one_commit_and_is_private(trained: Run, hub: Hub) -> None:
    status, output = push(trained, hub)
    assert status == 0, output
    assert output.splitlines()[-1] == f"{hub.url}/{NAME}/commit/{1:040x}"
    repository = hub.repositories[NAME]
    assert repository.files == SHARDS | SMALL
    assert repository.private and len(hub.commits) == 1
    assert GOOD_TOKEN not in output
    assert not [name for name, content in tree(trained.paths.directory).items() if GOOD_TOKEN.encode() in content]
    hub.requests.clear()
    status, output = push(trained, hub)
    assert (status, len(hub.commits)) == (0, 1), output
    assert not [path for method, path, _ in hub.requests if method == "PUT" or path == "/api/repos/create"]


def test_killed_it_uploads_only_what_is_missing(trained: Run, hub: Hub) -> None:
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in SHARDS.items()}
    last = digests.pop("model-00003-of-00003.safetensors")
    hub.stalling.add(last)
    process = start(trained, hub)
    wait_for(
        lambda: set(hub.large) == set(digests.values()) and ("PUT", f"/lfs/{last}", "") in hub.requests,
        every=0.01,
        process=process,
    )
    process.kill()
    process.communicate()
    assert hub.repositories[NAME].files == {} and not hub.commits
    hub.stalling.clear()
    hub.requests.clear()
    status, output = push(trained, hub)
    assert status == 0, output
    assert [path for method, path, _ in hub.requests if method == "PUT"] == [f"/lfs/{last}"]
    assert hub.repositories[NAME].files == SHARDS | SMALL
    assert len(hub.commits) == 1


def test_shards_of_an_earlier_push_are_removed_with_the_same_commit(trained: Run, hub: Hub) -> None:
    old = {"model.safetensors": b"old", "config.json": b"old", "NOTES.md": b"kept", ".gitattributes": b"git"}
    hub.repositories[NAME] = Repository(dict(old), private=True)
    status, output = push(trained, hub)
    assert status == 0, output
    kept = {"NOTES.md": b"kept", ".gitattributes": b"git"}
    assert hub.repositories[NAME].files == SHARDS | SMALL | kept
    assert len(hub.commits) == 1


def test_an_adapter_names_its_base_and_has_a_card(trained: Run, hub: Hub) -> None:
    status, output = push(trained, hub, "--adapter", "--public")
    assert status == 0, output
    repository = hub.repositories[NAME]
    assert not repository.private
    assert set(repository.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(repository.files["adapter_config.json"]) == {"r": 8, "base_model_name_or_path": "org/base"}
    card = repository.files["README.md"].decode()
    assert "base_model: org/base" in card and "library_name: peft" in card and ", merged" not in card
    assert "final training loss | 0.25" in card


def test_a_dry_run_and_what_is_refused(trained: Run, hub: Hub) -> None:
    """Each of these uploads nothing."""
    status, output = push(trained, hub, "--dry-run", token="")
    assert status == 0
    assert "model-00001-of-00003.safetensors  4." in output
    assert re.search(r"6 files, 1\d\.\d kB, for org/tuned \(private", output)
    assert hub.requests == []
    status, output = push(trained, hub, token="")
    assert status == 2 and "error: push: there is no Hugging Face token; export HF_TOKEN" in output
    status, output = push(trained, hub, token=OTHER_TOKEN)
    assert status == 2 and "the Hub refuses to write to org/tuned (HTTP 403); use an HF_TOKEN" in output
    hub.repositories[NAME] = Repository({})
    status, output = push(trained, hub)
    assert status == 2 and "org/tuned exists and is public; add --public" in output
    (trained.paths.tuned_model / "config.json").unlink()
    status, output = push(trained, hub)
    assert status == 2
    assert all(text in output for text in ("stage merge", "nothing to push yet", "hyperpod-ft resume"))
    assert hub.large == {} and hub.commits == [] and "Traceback" not in output
    assert tree(trained.paths.adapter)
