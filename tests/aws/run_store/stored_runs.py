"""Runs whose store is moto's S3, and their checkpoints."""

from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import trees
from hyperpod_ft.config import run_file
from hyperpod_ft.runs.run import Run
from tests.unit.described_checkpoints import describe

STORE = "s3://bucket/store"


ONE_SOURCE = {"source": "org/data", "revision": "0" * 40, "format": "dolly"}


def make_run(root: Path, dataset: dict[str, Any] = ONE_SOURCE, **training: Any) -> Run:
    """The same run on each machine, at the same path as the others see it."""
    values = {
        "name": "test",
        "engine": "torch",
        "cluster": {"root": str(root), "instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": "org/model", "revision": "0" * 40},
        "dataset": dataset,
        "training": training,
        "sagemaker": {"region": "us-west-2", "role": "arn:aws:iam::111122223333:role/r", "store": STORE},
    }
    run = Run.of(run_file.resolve(run_file.validate(values, "test"), root))
    run.freeze()
    return run


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def make_checkpoint(
    run: Run, step: int, content: dict[str, bytes], here: tuple[str, ...] = (), best: bool = False
) -> Path:
    """A published checkpoint of these files, of which only some are `here`; by default all."""
    final = run.paths.best_checkpoint if best else run.paths.checkpoint(step)
    publish.remove(final)
    for name in here or tuple(content):
        write(final / name, content[name])
    return describe(final, content, step=step, fingerprint=run.plan["train"].fingerprint, ranks=2)


def stored(client: Any, below: str = "") -> set[str]:
    return {entry.name for entry in trees.listing(client, STORE, below)}


def below(run: Run, path: Path) -> str:
    return path.relative_to(run.paths.root).as_posix()


CONTENT = {".metadata": b"m", "__0_0.distcp": b"zero", "__1_0.distcp": b"one"}
