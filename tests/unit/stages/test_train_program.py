"""Stage train's program: one layout for all ranks, its exit status, and its end with its torchrun."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from hyperpod_ft.engines.interface import TrainingResult, TrainingTask
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.planning.layout import Degrees, Layout, Sharding
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import train
from tests.conftest import MakeRun
from tests.unit.described_checkpoints import describe


def test_every_rank_trains_in_the_layout_that_rank_0_gives(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 plans it. No field has its default here: what JSON lost would show."""
    layout = Layout(Degrees(1, 2, 2, 3, 5), Sharding("zero3", 4, "optimizer"), ((0, 2), (2, 7)), True, True)
    run, store = make_run(), HashStore()
    trained: dict[int, Layout] = {}

    def train_in(task: TrainingTask, ranks: Ranks) -> TrainingResult:
        trained[ranks.rank] = task.layout
        return TrainingResult(describe(task.checkpoint(1), {}), {})

    run.freeze()
    plans = iter([layout])
    monkeypatch.setattr(train, "plan_layout", lambda _: next(plans))
    monkeypatch.setattr(train, "engine", lambda _: SimpleNamespace(train=train_in))
    monkeypatch.setattr(train.stage, "main", lambda _, work: work(run))
    train._run_rank_0(Ranks(0, 2, 0, store))
    train._run_other_rank(run, Ranks(1, 2, 1, store))
    assert trained == {0: layout, 1: layout}
    assert Layout.of_json(run.paths.layout_path.read_bytes()) == layout


@pytest.mark.parametrize(
    ("world_size", "status", "said"), [("7", 2, "error: train: started as 7 process(es)"), ("?", 1, "ValueError")]
)
def test_the_status_does_not_depend_on_the_teardown(
    make_run: Callable[..., Run], tmp_path: Path, world_size: str, status: int, said: str
) -> None:
    run = make_run()
    run.freeze()
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    ended = subprocess.run(
        [sys.executable, "-m", "hyperpod_ft.stages.train", str(run.paths.directory)],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "WORLD_SIZE": world_size},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == status, ended.stderr
    assert said in ended.stdout + ended.stderr


def test_a_rank_ends_with_its_torchrun(make_run: MakeRun) -> None:
    """Otherwise it may join the next attempt, and the new rank of its number waits forever."""
    run = make_run()
    run.freeze()
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(300)
        environment = {
            "RANK": "1",
            "WORLD_SIZE": str(run.plan.degrees.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "none",
        }
        environment |= {"TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_RANK": "1"}
        environment |= {"MASTER_PORT": str(store.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        rank = f"{sys.executable} -m hyperpod_ft.stages.train '{run.paths.directory}'"
        with subprocess.Popen(["bash", "-c", f"{rank} & wait"], env=os.environ | environment) as torchrun:
            connection, _ = store.accept()  # the rank is at work, and waits for the answer
            torchrun.send_signal(signal.SIGKILL)
        with connection:
            connection.settimeout(300)
            while connection.recv(1 << 16):  # the kernel closes it when the rank is gone
                pass
