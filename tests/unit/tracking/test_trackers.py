"""Each tracker with its real package: what is published is read back with the tracker's own means."""

import contextlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.localcluster.ports import reserve_ports
from hyperpod_ft.tracking.content import description, points
from hyperpod_ft.tracking.publisher_process import Publisher
from hyperpod_ft.tracking.trackers.interface import TrackerRun
from tests.unit.tracking.conftest import MakeRun, row
from tests.waiting import wait_for

FINAL = {"final/final_loss": 0.4, "final/exact_train/tuned": 7.0}
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def given(tracked: MakeRun, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    run = tracked()
    run.paths.tracking.mkdir()
    return description(run, "0123456789ab-f00d")


def publish(module: Any, given: dict[str, Any]) -> TrackerRun:
    """Publish five rows and the final figures in two processes' turns, of which the first is killed."""
    killed = module.open_run(given)
    assert killed.step() == 0
    killed.publish([points(row(step)) for step in (1, 2, 3)])
    run: TrackerRun = module.open_run(given)
    assert run.step() == 3
    run.publish([points(row(step)) for step in (4, 5)])
    run.publish_final(FINAL, 5)
    run.end(True)
    again: TrackerRun = module.open_run(given)  # the follower was killed before it knew that it was done
    again.publish_final(FINAL, 5)
    again.end(True)
    return again


def expected(name: str) -> list[tuple[int, float]]:
    return [(step, pytest.approx(value)) for step in range(1, 6) if (value := row(step)[name]) is not None]


def test_tensorboard(given: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from hyperpod_ft.tracking.trackers import event_files

    run = publish(event_files, given)
    found = EventAccumulator(run.where).Reload()
    for name in ("loss", "validation_loss"):
        assert [(event.step, event.value) for event in found.Scalars(name)] == expected(name)
    assert [(event.step, event.value) for event in found.Scalars("final/final_loss")] == [(5, pytest.approx(0.4))]
    [text] = found.Tensors("run file/text_summary")
    assert b"name: test" in text.tensor_proto.string_val[0]
    assert "mfu" not in found.Tags()["scalars"]


def test_tensorboard_after_a_kill_within_an_event(given: dict[str, Any]) -> None:
    from hyperpod_ft.tracking.trackers import event_files

    first = event_files.open_run(given)
    first.publish([points(row(step)) for step in (1, 2)])
    [file] = Path(first.where).iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert event_files.open_run(given).step() == 1


def test_mlflow_in_files(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    from mlflow.tracking import MlflowClient

    from hyperpod_ft.tracking.trackers import mlflow_runs

    run = publish(mlflow_runs, given)
    client = MlflowClient(run.where)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    for name in ("loss", "validation_loss"):
        assert [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, name)] == expected(
            name
        )
    assert [point.value for point in client.get_metric_history(found.info.run_id, "final/final_loss")] == [0.4]
    assert found.info.status == "FINISHED"
    assert found.data.params["dataset.format"] == "dolly"
    assert found.data.tags["hyperpod_ft.run"] == given["name"]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.mlflow
def test_mlflow_server(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server with a database, on this machine."""
    from mlflow.tracking import MlflowClient

    from hyperpod_ft.tracking.trackers import mlflow_runs

    program = os.environ.get("HYPERPOD_FT_MLFLOW") or pytest.skip("needs HYPERPOD_FT_MLFLOW, the program")
    reserved = reserve_ports(1)
    port = reserved.first
    command = [program, "server", "--port", str(port), "--backend-store-uri", "sqlite:///server.db", "--workers", "1"]
    server = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        wait_for(lambda: _answers(port), every=0.2, process=server)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        run = publish(mlflow_runs, given)
        assert run.where.startswith(f"http://127.0.0.1:{port}/#/experiments/")
        client = MlflowClient(f"http://127.0.0.1:{port}")
        history = client.get_metric_history(run.where.rpartition("/")[2], "loss")
        assert [(point.step, point.value) for point in history] == expected("loss")
        assert client.get_run(run.where.rpartition("/")[2]).info.status == "FINISHED"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        reserved.lock.close()


def test_mlflow_completes_a_row_that_was_cut_off(given: dict[str, Any]) -> None:
    from mlflow.tracking import MlflowClient

    from hyperpod_ft.tracking.trackers import mlflow_runs

    first = mlflow_runs.open_run(given)
    first.publish([points(row(1)), {"step": 2, "loss": 1.0}])
    second = mlflow_runs.open_run(given)
    assert second.step() == 1
    second.publish([points(row(2))])
    client = MlflowClient(second.where)
    found = client.get_run(second._id)
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    assert {name: [point.step for point in history] for name, history in histories.items()} == {
        "loss": [1, 2],
        "learning_rate": [1, 2],
    }


def test_trackio(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(Path(given["root"]) / "trackio"))
    # it reads that when it is imported, which TRL's trainers do too
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio" or name.endswith(".trackio_runs")]:
        monkeypatch.delitem(sys.modules, name)
    from hyperpod_ft.tracking.trackers import trackio_runs

    run = publish(trackio_runs, given)
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("tests", given["key"])
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == expected("loss")
    assert [row["final/final_loss"] for row in rows if "final/final_loss" in row] == [0.4]
    assert Path(run.where) == Path(given["root"]) / "trackio"


def test_wandb_offline(tracked: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of its own: each that publishes offline leaves a directory, also if it is killed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = tracked("wandb")
    run.paths.tracking.mkdir()
    run.paths.logs.mkdir()
    for steps in ((1, 2, 3), (4, 5)):
        publisher = Publisher(run, "wandb", lambda: math.inf)
        assert publisher.ask(open=description(run, "0123456789ab-f00d"))["step"] is None
        publisher.ask(rows=[points(row(step)) for step in steps])
        if steps == (1, 2, 3):
            publisher.kill()
    publisher.ask(final=FINAL, step=5)
    publisher.ask(end=True)
    publisher.close()
    directory = run.paths.tracking / "wandb"
    files = sorted(directory.glob("offline-run-*/run-*.wandb"))
    history, summary, config = read(files)
    assert [(row["_step"], row["loss"]) for row in history] == expected("loss")
    assert summary["final/final_loss"] == 0.4
    assert config["dataset.format"] == "dolly"
    assert not [file for file in run.paths.directory.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]


def read(files: list[Path]) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Rows, summary and config in W&B's own files, from which `wandb sync` uploads."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, summary, config = [], {}, {}
    for file in files:
        for content in records(file.read_bytes()):
            record = Record.FromString(content)
            items = {("/".join(item.nested_key) or item.key): item.value_json for item in record.history.item}
            if items:
                rows.append({name: json.loads(value) for name, value in items.items()})
            changes = (*record.summary.update, *record.run.summary.update)
            summary |= {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in changes}
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return rows, summary, config


def records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after W&B's header of seven bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    block, header = 32768, 7
    position, record = header, b""
    while position + header <= len(content):
        left = block - position % block
        if left < header:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
