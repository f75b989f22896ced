"""Downloads from the Hub, against an HTTP server that answers as the Hub does. The stage runs as its own process."""

import json
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hyperpod_ft.runs.run import Run
from tests.unit.hub_server import GOOD_TOKEN, OTHER_TOKEN, Hub, Repository, serve
from tests.unit.stage_runs import finished, make_run, start, tree, weights
from tests.waiting import wait_for

ROWS = b'{"instruction": "a", "context": "", "response": "b"}\n'
SHARDS = {"first": "model-00001-of-00002.safetensors", "second": "model-00002-of-00002.safetensors"}
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": weights(first=b"first" * 1000),
    "model-00002-of-00002.safetensors": weights(second=b"second" * 1000),
    "model.safetensors.index.json": json.dumps({"weight_map": SHARDS}).encode(),
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "LICENSE": b"terms",
    "USE_POLICY.md": b"policy",
    "README.md": b"card",
}
NOT_WANTED = {
    "pytorch_model-00001-of-00001.bin": b"pickle",
    "model.fp16.safetensors": b"variant",
    "consolidated.safetensors": b"again",
    "original/consolidated.00.pth": b"pickle",
    "original/tokenizer.model": b"again",
    "onnx/model.safetensors": b"other",
    "tokenizer/tokenizer.json": b"other",
    "training_args.bin": b"pickle",
    "flax_model.msgpack": b"flax",
    ".gitattributes": b"git",
    "modeling_custom.py": b"code",
}
DATASET = {"train.jsonl": ROWS, "data/train-more.jsonl": ROWS, "README.md": b"card", "dataset_infos.txt": b"x"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    repositories = {
        "org/tiny": Repository(MODEL | NOT_WANTED, revisions=("main", "v1")),
        "org/gated": Repository(dict(MODEL), gated=True),
        "org/pickled": Repository({"config.json": b"{}", "pytorch_model.bin": b"pickle"}),
        "org/rows": Repository(dict(DATASET), kind="dataset", commit="d" * 40),
    }
    with serve(repositories) as started:
        yield started


def hub_run(tmp_path: Path, model: str = "org/tiny", revision: str | None = None, **dataset: Any) -> Run:
    values = {"source": "org/rows", "revision": "d" * 40, "files": ["*.jsonl"], "format": "dolly"}
    return make_run(tmp_path, model, values | dataset, revision)


def environment(hub: Hub, tmp_path: Path, token: str = "") -> dict[str, str]:
    values = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": token}
    values |= {"HF_TOKEN_PATH": str(tmp_path / "no-token"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return values | {"HF_HUB_DOWNLOAD_TIMEOUT": "300", "HF_HUB_ETAG_TIMEOUT": "300"}


def test_only_what_is_needed_whole_and_without_links(tmp_path: Path, hub: Hub) -> None:
    run = hub_run(tmp_path)
    status, output = finished("download", run, **environment(hub, tmp_path, GOOD_TOKEN))
    assert status == 0, output
    commit = hub.repositories["org/tiny"].commit
    found = tree(run.paths.base_model)
    manifest = json.loads(found.pop(".hyperpod-ft.json"))
    assert found == MODEL
    assert manifest == {
        "source": "org/tiny",
        "revision": "main",
        "commit": commit,
        "files": {name: len(content) for name, content in sorted(MODEL.items())},
        "content": "",
        "finished": "",
        "xxh3": {name: xxhash.xxh3_128_hexdigest(content) for name, content in sorted(MODEL.items())},
    }
    assert tree(run.paths.raw_datasets[0]).keys() == {".hyperpod-ft.json", "train.jsonl", "data/train-more.jsonl"}
    assert not any(path.is_symlink() for path in run.paths.root.rglob("*"))
    assert not list(run.paths.root.rglob(".cache"))
    assert not list(run.paths.root.rglob("*.partial"))
    record = run.journal.record("download")
    assert record is not None
    assert record.facts["model"]["commit"] == commit
    assert "warning: model: model.revision 'main' may change; pin it to a commit" in output
    assert "dataset.revision" not in output
    assert "resumes when it is run again" in output
    # the token reached the Hub, and nothing else
    kept = output + "".join(content.decode("utf-8", "replace") for content in tree(run.paths.root).values())
    assert GOOD_TOKEN not in kept
    assert finished("download", run) == (0, "download: already done, nothing to do\n")


def test_a_tag_is_not_main(tmp_path: Path, hub: Hub) -> None:
    run = hub_run(tmp_path, revision="v1")
    assert run.paths.base_model.name == "org--tiny@v1"
    status, output = finished("download", run, **environment(hub, tmp_path))
    assert status == 0, output


@pytest.mark.parametrize(
    ("model", "revision", "token", "message"),
    [
        (
            "org/gated",
            None,
            "",
            r"model\.source: org/gated is gated and there is no Hugging Face token; accept its terms at \S+/org/gated,"
            r" then export HF_TOKEN in the shell that submits",
        ),
        (
            "org/gated",
            None,
            OTHER_TOKEN,
            r"model\.source: org/gated is gated and your token has no access to it; accept",
        ),
        (
            "org/wrong",
            None,
            "",
            r"model\.source: the Hub has no model 'org/wrong' .*; correct the id, or, .* export HF_TOKEN",
        ),
        ("org/wrong", None, GOOD_TOKEN, r"the Hub has no model 'org/wrong' .* or use a token that can read it"),
        ("org/tiny", "nope", "", r"model\.revision: org/tiny has no revision 'nope'; use a commit, tag or branch"),
        ("org/tiny", None, "hf_revokedToken", r"model\.source: the Hub rejected your token for org/tiny \(HTTP 401\)"),
        ("org/pickled", None, "", r"model\.source: org/pickled has no safetensors weights .*; choose a model that has"),
    ],
)
def test_each_cause_has_its_own_line(
    tmp_path: Path, hub: Hub, model: str, revision: str | None, token: str, message: str
) -> None:
    run = hub_run(tmp_path, model, revision)
    status, output = finished("download", run, **environment(hub, tmp_path, token))
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert status == 2
    assert len(errors) == 1
    assert re.search(message, errors[0]), errors[0]
    assert "Traceback" not in output
    assert not token or token not in output
    assert not run.paths.base_model.exists()
    assert run.journal.record("download") is None


def test_no_network(tmp_path: Path, hub: Hub) -> None:
    run = hub_run(tmp_path)
    nowhere = environment(hub, tmp_path) | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    status, output = finished("download", run, **nowhere)
    assert status == 2
    assert re.search(
        r"error: download: model\.source: cannot reach http://127\.0\.0\.1:9 \(Connect\w*Error\); check network", output
    )
    offline = environment(hub, tmp_path) | {"HF_HUB_OFFLINE": "1"}
    status, output = finished("download", run, **offline)
    assert status == 2
    assert "error: download: model.source: HF_HUB_OFFLINE is set; unset it" in output


def test_a_wrong_dataset_and_patterns_that_match_nothing(tmp_path: Path, hub: Hub) -> None:
    wrong = hub_run(tmp_path, source="org/tiny")  # a model, not a dataset
    status, output = finished("download", wrong, **environment(hub, tmp_path))
    assert status == 2
    assert "dataset.source: the Hub has no dataset 'org/tiny'" in output
    nothing = hub_run(tmp_path, files=["*.csv"])
    status, output = finished("download", nothing, **environment(hub, tmp_path))
    assert status == 2
    assert (
        "dataset.source: no file of org/rows matches dataset.files (*.csv); correct it: the source has README.md, data/"
        in output
    )
    assert output.count("model: already there: ") == 1, "the first run's model is used"


def test_free_disk_is_checked_before_weights_are_fetched(tmp_path: Path, hub: Hub) -> None:
    hub.repositories["org/tiny"].claimed["model-00001-of-00002.safetensors"] = 10**18
    status, output = finished("download", hub_run(tmp_path), **environment(hub, tmp_path))
    assert status == 2
    assert re.search(r"model\.source: 1000000000\.0 GB more are needed, [\d.]+ GB are free on the volume", output)
    assert [name for name, _ in hub.fetched()] == ["config.json"]


def test_partial_files_that_cannot_be_resumed_do_not_count_as_fetched(tmp_path: Path, hub: Hub) -> None:
    hub.repositories["org/tiny"].claimed["model-00001-of-00002.safetensors"] = 10**13
    run = hub_run(tmp_path)
    partial = run.paths.base_model.with_name(f".{run.paths.base_model.name}.partial")
    leftover = partial / ".cache" / "huggingface" / "download" / f"hash.{'e' * 64}.0123abcd.incomplete"
    leftover.parent.mkdir(parents=True)
    with leftover.open("wb") as file:
        file.truncate(10**13)  # takes no space
    status, output = finished("download", run, **environment(hub, tmp_path))
    assert status == 2
    assert "model.source: 10000.0 GB more are needed" in output
    assert not leftover.exists()


def test_a_file_of_the_wrong_size_is_never_published(tmp_path: Path, hub: Hub) -> None:
    hub.repositories["org/tiny"].claimed["tokenizer.model"] = 14
    run = hub_run(tmp_path)
    status, output = finished("download", run, **environment(hub, tmp_path))
    assert status == 2
    assert "model.source: tokenizer.model arrived with 13 bytes instead of 14; run the stage again" in output
    assert not run.paths.base_model.exists()


def test_killed_it_goes_on_where_it_stopped(tmp_path: Path, hub: Hub) -> None:
    large = weights(second=os.urandom(1 << 20) * 25)  # huggingface_hub writes 10 MB at a time
    repository = hub.repositories["org/tiny"]
    name = "model-00002-of-00002.safetensors"
    repository.files[name] = large
    repository.stall_after[name] = 22 << 20
    run = hub_run(tmp_path)
    process = start("download", run, **environment(hub, tmp_path))
    partial = run.paths.base_model.with_name(f".{run.paths.base_model.name}.partial")
    wait_for(
        lambda: (
            any(_size(file) >= 20_000_000 for file in partial.rglob("*.incomplete"))
            and _noted(partial, "tokenizer.model")
            and len(hub.fetched()) >= len(MODEL)  # a client that lost patience asks again
        ),
        every=0.01,
        process=process,
    )
    process.kill()
    process.communicate()
    assert not run.paths.base_model.exists()

    repository.stall_after.clear()
    hub.requests.clear()
    status, output = finished("download", run, **environment(hub, tmp_path))
    assert status == 0, output
    assert (run.paths.base_model / name).read_bytes() == large
    again = dict(hub.fetched())
    if version("huggingface_hub").startswith("0."):  # later ones begin the file anew
        assert int(again[name].removeprefix("bytes=").rstrip("-")) >= 20_000_000
    assert "tokenizer.model" not in again, "what was complete is not fetched again"
    assert not list(run.paths.base_model.rglob("*.incomplete"))


def _size(file: Path) -> int:
    """Bytes of a file that may be renamed at any moment, because it is complete."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _noted(partial: Path, name: str) -> bool:
    """Whether huggingface_hub has written down that it has the whole file."""
    file = partial / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    return file.exists() and file.read_text().count("\n") == 3


@pytest.mark.parametrize("torn", ["", "c0ffee", 'c0ffee\n"etag"\n', 'c0ffee\n"etag"\n17'])
def test_a_note_torn_by_a_kill_does_not_stop_the_next_attempt(tmp_path: Path, hub: Hub, torn: str) -> None:
    run = hub_run(tmp_path)
    partial = run.paths.base_model.with_name(f".{run.paths.base_model.name}.partial")
    note = partial / ".cache" / "huggingface" / "download" / "LICENSE.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(torn)
    (partial / "LICENSE").write_text("half")
    status, output = finished("download", run, **environment(hub, tmp_path))
    assert status == 0, output
    assert (run.paths.base_model / "LICENSE").read_bytes() == hub.repositories["org/tiny"].files["LICENSE"]


def test_two_runs_that_want_the_same_model_fetch_it_once(tmp_path: Path, hub: Hub) -> None:
    runs = [hub_run(tmp_path, files=[pattern]) for pattern in ("*.jsonl", "train.jsonl")]
    assert runs[0].plan["download"].fingerprint != runs[1].plan["download"].fingerprint
    assert runs[0].paths.base_model == runs[1].paths.base_model
    processes = [start("download", run, **environment(hub, tmp_path)) for run in runs]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(name for name, _ in hub.fetched() if name in MODEL and name != "README.md") == sorted(
        MODEL.keys() - {"README.md"}
    )
    assert sum("model: already there: " in output for output in outputs) == 1


def test_what_was_damaged_since_is_fetched_again(tmp_path: Path, hub: Hub) -> None:
    run = hub_run(tmp_path)
    assert finished("download", run, **environment(hub, tmp_path))[0] == 0
    (run.paths.base_model / "tokenizer.json").unlink()
    status, output = finished("download", run, **environment(hub, tmp_path))
    assert status == 0
    assert "model: incomplete, fetching it again" in output
    assert "dataset: already there" in output
    assert (run.paths.base_model / "tokenizer.json").exists()
