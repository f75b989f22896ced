"""Ranks that divide a small model, its layers, rows and experts train as one rank does: two along each divided axis.

python -m hyperpod_ft.engines.torch.certificate.division BASE DIRECTORY DEGREES PACKED [LORA]

What the ranks run, all but the paths as JSON. They are forks of this program, so that packages, which take seconds, are
imported once; it has computed nothing, and so has no threads.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.certificate.alone import TOLERANCE
from hyperpod_ft.engines.certificate.task import ONE_RANK, small_task
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch.loop import training_loop
from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.planning.layout import Degrees

_MICRO_BATCHES = 2  # as many as pipeline stages
_MEASURED = ("loss", "grad_norm")
_VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def check_division(base: Path, lora: Lora | None, directory: Path, degrees: Degrees, *, packed: bool) -> None:
    """Raise UserError when ranks that divide the small model in `base` as a run does have other losses than one rank.

    `degrees`: the run's; `packed`: documents share rows.
    """
    tensor, pipeline, context, experts = (
        min(degree, 2)
        for degree in (
            degrees.tensor_parallel,
            degrees.pipeline_parallel,
            degrees.context_parallel,
            degrees.expert_parallel,
        )
    )
    divided = Degrees(1, tensor * pipeline * max(context, experts), tensor, pipeline, context, experts)
    if divided.world_size == 1:
        return
    alone = directory / "alone"
    _train(base, lora, alone, ONE_RANK, Ranks(0, 1, 0, dist.HashStore()), packed=packed)
    together = directory / "together"
    settings = [json.dumps(asdict(divided)), json.dumps(packed), *([lora.model_dump_json()] if lora else [])]
    command = [sys.executable, "-m", __name__, str(base), str(together), *settings]
    done = subprocess.run(command, env=os.environ | _VARIABLES, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"parallelism: {divided} does not divide a small model of this type: {last_line(done.stdout)}",
            "set the degrees to 1",
        )
    for one, other in zip(_measured(alone), _measured(together), strict=True):
        if any(abs(one[key] - other[key]) > TOLERANCE * abs(one[key]) for key in _MEASURED):
            raise UserError(
                f"parallelism: with {divided}, a small model of this type has loss {other['loss']:.6f} and gradients of"
                f" norm {other['grad_norm']:.6f}; one rank has {one['loss']:.6f} and {one['grad_norm']:.6f}",
                "set the degrees to 1",
            )


def _train(base: Path, lora: Lora | None, directory: Path, degrees: Degrees, ranks: Ranks, *, packed: bool) -> None:
    task = small_task(base, lora, directory, packed=packed, degrees=degrees, micro_batches=_MICRO_BATCHES)
    with training_loop(task, ranks) as loop:
        loop.run_to_end()


def _measured(directory: Path) -> list[dict[str, float]]:
    """Of each step."""
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _rank(rank: int, base: Path, lora: Lora | None, directory: Path, degrees: Degrees, packed: bool) -> None:
    try:
        store = dist.FileStore(str(directory / "store"), degrees.world_size)
        _train(base, lora, directory, degrees, Ranks(rank, degrees.world_size, rank, store), packed=packed)
    except Exception as error:  # the last line says why
        print(" ".join(str(error).split()), flush=True)
        sys.exit(1)


def main() -> None:
    """Run the ranks."""
    base, directory, degrees, packed, *lora = sys.argv[1:]
    adapters = Lora.model_validate_json(lora[0]) if lora else None
    divided, place = Degrees(**json.loads(degrees)), Path(directory)
    place.mkdir()
    arguments = (Path(base), adapters, place, divided, json.loads(packed))
    start_processes(_rank, arguments, divided.world_size, start_method="fork")


if __name__ == "__main__":
    main()
