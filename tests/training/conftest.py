"""Small real runs: a random Llama, random rows, and the processes that torchrun would start in a job."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, T5Config
from typer.testing import CliRunner

from hyperpod_ft.checkpoint.formats.pretrained import auto_class
from hyperpod_ft.cli.main import app
from hyperpod_ft.config import run_file
from hyperpod_ft.engines import engine
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import stage, train
from tests.conftest import MakeRun
from tests.forking import Forked, ForkServer
from tests.tasks import task_of
from tests.unit import tiny_t5
from tests.unit.tiny_families import ONE_A_ROW
from tests.waiting import wait_for

VOCABULARY = 128
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    # but for deprecated collectives, of which torch 2.13 warns
    "PYTHONWARNINGS": "ignore,error:`torch.distributed.all_gather_into:FutureWarning"
    ",error:`torch.distributed.reduce_scatter_tensor:FutureWarning",
    "PYTHONFAULTHANDLER": "1",
}


def tiny_llama(**changes: Any) -> LlamaConfig:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**values | changes)


def write_rows(directory: Path, rows: int, max_length: int, seed: int = 0) -> None:
    """Packed rows of two or three documents; some labels are masked, the tail is padding."""
    random = np.random.default_rng(seed)
    input_ids = random.integers(3, VOCABULARY, (rows, max_length))
    # learnable: every second token repeats the one before
    input_ids[:, 1::2] = input_ids[:, 0::2]
    labels, position_ids = input_ids.copy(), np.zeros_like(input_ids)
    for row in range(rows):
        cuts = sorted(random.choice(np.arange(4, max_length - 4, 2), size=int(random.integers(1, 3)), replace=False))
        for start, end in zip([0, *cuts], [*cuts, max_length], strict=True):
            position_ids[row, start:end] = np.arange(end - start)
            labels[row, start] = -100  # a document's first token is predicted by nothing of it
            labels[row, start + 1 : start + 1 + int(random.integers(0, 3))] = -100
        padding = int(random.integers(0, 4))
        if padding:
            labels[row, -padding:] = -100
    directory.mkdir(parents=True, exist_ok=True)
    for name, array in (("input_ids", input_ids), ("labels", labels), ("position_ids", position_ids)):
        np.save(directory / f"{name}.npy", array.astype(np.int32))


def write_pairs(directory: Path, rows: int, widths: tuple[int, int], seed: int = 0) -> None:
    """Packed rows of an encoder-decoder, each of two to four pairs and padding; a target repeats its source's start."""
    random = np.random.default_rng(seed)
    arrays = {name: np.zeros((rows, widths[0]), np.int32) for name in ("input_ids", "documents")}
    arrays |= {name: np.zeros((rows, widths[1]), np.int32) for name in ("decoder_input_ids", "decoder_documents")}
    arrays["labels"] = np.full((rows, widths[1]), -100, np.int32)
    for row in range(rows):
        count = int(random.integers(2, 5))
        source_end = target_end = 0
        for number in range(1, count + 1):
            length, target = (int(random.integers(2, width // count + 1)) for width in widths)
            ids = random.integers(3, VOCABULARY, max(length, target))
            of_source, of_target = slice(source_end, source_end + length), slice(target_end, target_end + target)
            source_end, target_end = of_source.stop, of_target.stop
            arrays["input_ids"][row, of_source], arrays["documents"][row, of_source] = ids[:length], number
            arrays["labels"][row, of_target], arrays["decoder_documents"][row, of_target] = ids[:target], number
            arrays["decoder_input_ids"][row, of_target] = [0, *ids[: target - 1]]
    directory.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)


@dataclass
class Launched:
    """One started job and what it printed."""

    process: Forked
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, timeout: float = 300) -> int:
        """The exit status. A job that takes longer fails with its output, and where each process was."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # prints the stacks of all threads: PYTHONFAULTHANDLER
            self.process.wait(300)
            raise AssertionError(f"not done after {timeout} s:\n{self.text()}") from None

    def wait_for(self, condition: Callable[[], bool], timeout: float = 300) -> None:
        """Wait until the condition holds; the job must not end before."""
        wait_for(condition, timeout, self.text, every=0.01, process=self.process)

    def kill(self) -> None:
        """Kill -9 every process of the job at once, as a dying node does."""
        # torchrun starts each worker in a session of its own
        everyone = [self.process.pid, *descendants(self.process.pid)]
        for pid in everyone:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(300)


def kit(*arguments: str) -> str:
    """The output of a command of the kit, in this process."""
    try:
        done = CliRunner().invoke(app, arguments)
    finally:
        sys.modules["torch"] = torch  # commands that do without it forbid it
    assert done.exit_code == 0, done.output
    return done.stdout


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        parents.setdefault(parent, []).append(int(status.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


@dataclass
class Jobs:
    """Starts jobs in a scratch directory, and leaves none behind."""

    directory: Path
    server: ForkServer
    started: list[Launched] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    always_torchrun: bool = False
    held_after: int = 0  # a step, see start_held

    def start(self, ranks: int, module: list[str]) -> Launched:
        """`python -m MODULE...` on that many processes, under torchrun; as a rule, one alone without it."""
        if ranks > 1 or self.always_torchrun:
            alone = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={ranks}")
            module = ["forking_torchrun", *alone, "-m", *module]
        output = self.directory / f"job-{len(self.started)}.out"
        # torchrun leaves a directory in the temporary one
        environment = os.environ | ENVIRONMENT | self.environment | {"TMPDIR": str(self.directory)}
        if self.held_after:
            environment |= {"HELD_AFTER_STEP": str(self.held_after)}
        job = Launched(self.server.start(module, environment, output), output)
        self.started.append(job)
        return job

    def start_train(self, run: Run) -> Launched:
        return self.start(run.plan.degrees.world_size, ["hyperpod_ft.stages.train", str(run.paths.directory)])

    def start_held(self, run: Run, after_step: int) -> Launched:
        """A training of several ranks, when it has done that many steps: it does no more until it gets a signal.

        Without that, on a busy machine, the steps that are left go by before the signal comes.
        """
        self.held_after = after_step
        try:
            job = self.start_train(run)
        finally:
            self.held_after = 0
        path = run.paths.metrics_path
        job.wait_for(lambda: path.exists() and path.read_text().count("\n") >= after_step)
        return job

    def train(self, run: Run, expect: int = 0) -> str:
        """Run stage train to its end; what it printed."""
        job = self.start_train(run)
        status = job.wait()
        assert status == expect, job.text()
        return job.text()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    modules = ["hyperpod_ft.engines.torch.loop", "transformers.models.llama.modeling_llama"]
    with contextlib.closing(job_server(modules, os.environ | ENVIRONMENT)) as server:
        yield server


@pytest.fixture(scope="session")
def trl_server() -> Iterator[ForkServer]:
    modules = ["hyperpod_ft.engines.trl.loop", "transformers.models.llama.modeling_llama"]
    with contextlib.closing(job_server(modules, os.environ | ENVIRONMENT)) as server:
        yield server


def job_server(
    modules: Sequence[str], environment: dict[str, str], *directories: Path, python: str = sys.executable
) -> ForkServer:
    """Forks jobs that have imported an engine's `modules`; `directories`: of further modules that jobs run."""
    path = os.pathsep.join(map(str, [Path(__file__).parent, *directories, Path(__file__).parents[2]]))
    preloaded = ["forking_torchrun", "hyperpod_ft.stages.train", *modules]
    return ForkServer(preloaded, environment | {"PYTHONPATH": path}, python)


@pytest.fixture
def jobs(tmp_path: Path, fork_server: ForkServer) -> Iterator[Jobs]:
    with jobs_in(tmp_path / "jobs", fork_server) as result:
        yield result


@pytest.fixture
def trl_jobs(tmp_path: Path, trl_server: ForkServer) -> Iterator[Jobs]:
    with jobs_in(tmp_path / "jobs", trl_server) as result:
        yield result


@contextlib.contextmanager
def jobs_in(directory: Path, server: ForkServer) -> Iterator[Jobs]:
    """Jobs that end with the block; makes the directory."""
    directory.mkdir()
    result = Jobs(directory, server)
    yield result
    for job in result.started:
        if job.process.poll() is None:
            job.kill()


@pytest.fixture
def train_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "TrainProgram":
    """The program of stage train, in this process, for runs of one rank: its exit status, and what it printed."""

    def program(run: Run) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["train", str(run.paths.directory)])
        status: object = 0
        try:
            with process_group_of_its_own():
                train.main()
        except SystemExit as end:
            status = end.code
        assert isinstance(status, int)
        return status, "".join(capsys.readouterr())

    return program


@contextlib.contextmanager
def process_group_of_its_own() -> Iterator[None]:
    """Training leaves its process group after an error: its process ends. A test's does not."""
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def train_here(run: Run) -> Record:
    """Stage train in this process, for runs of one rank; its record."""

    def work(run: Run) -> stage.Result:
        with process_group_of_its_own():
            trained = engine(run.config.engine).train(task_of(run), Ranks(0, 1, 0, torch.distributed.HashStore()))
        return stage.Result((trained.checkpoint, run.paths.metrics_path), trained.facts)

    stage.perform(run, "train", work)
    record = run.journal.record("train")
    assert record is not None
    return record


TrainProgram = Callable[[Run], tuple[int, str]]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run directory whose stages before `train` are done: `make_run("name", {"training.max_steps": 4})`."""

    def make(
        name: str = "run",
        settings: dict[str, Any] | None = None,
        model: PretrainedConfig | None = None,
        rows: int = 24,
        max_length: int = 32,
    ) -> Run:
        source = tmp_path / f"source-{name}"
        source.mkdir(exist_ok=True)  # the same run with other settings
        # a source is known by its content: every distinct model gets its own directory
        (source / "config.json").write_text(json.dumps((model or tiny_llama()).to_dict(), default=str, sort_keys=True))
        (source / "rows.jsonl").write_text(f'{{"rows": {rows}, "max_length": {max_length}}}\n')
        values: dict[str, Any] = {
            "name": name,
            "engine": "torch",
            "cluster": {"root": str(tmp_path / "root"), "instance_type": "local"},
            "model": {"source": str(source)},
            "dataset": {"source": str(source / "rows.jsonl"), "format": "text", "max_length": max_length},
            "lora": {"r": 4, "alpha": 8},
            "training": {
                "precision": "fp32",
                "max_steps": 4,
                "micro_batch_size": 2,
                "learning_rate": 1e-2,
                "warmup_share": 0.1,
                "weight_decay": 0.01,
            },
            "parallelism": {"ranks_per_node": 1},
        }
        for key, value in (settings or {}).items():
            section, _, last = key.rpartition(".")
            (values.setdefault(section, {}) if section else values)[last] = value
        run = Run.of(run_file.resolve(run_file.validate(values, name), tmp_path))
        run.paths.directory.mkdir(parents=True, exist_ok=True)
        run.freeze()
        if not run.paths.base_model.exists():
            torch.manual_seed(7)
            if isinstance(model, T5Config):
                tiny_t5.save_model(run.paths.base_model, model)
            else:
                described = model or tiny_llama()
                auto_class(described.to_dict()).from_config(described).save_pretrained(run.paths.base_model)
        if not (run.paths.dataset_path / "train").exists():
            target = run.config.dataset.max_target_length
            if target:
                write_pairs(run.paths.dataset_path / "train", rows, (max_length, target))
            else:
                write_rows(run.paths.dataset_path / "train", rows, max_length)
        (run.paths.dataset_path / "report.json").write_text("{}")
        apart = getattr(model, "model_type", "llama") in ONE_A_ROW
        facts = {
            "certify": asdict(Certificate("its tokens mix otherwise" if apart else "")),
            "dataset": {"train_examples": 3 * rows, "train_rows": rows},
        }
        for need in run.plan["train"].needs:
            Record(need, run.plan[need].fingerprint, {}, (), facts.get(need, {}), utc_now(), 0.0, "test", "").write(
                run.paths.record_path(need)
            )
        return run

    return make


def metrics(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.paths.metrics_path.read_text().splitlines()]


def curve(run: Run) -> list[tuple[int, float, float, float]]:
    """What must not depend on when a run was interrupted."""
    return [(row["step"], row["loss"], row["learning_rate"], row["grad_norm"]) for row in metrics(run)]
