"""Checkpoints of engine neuron: upstream's files for export, plus everything a restart needs.

Upstream's own checkpoints hold no optimizer state for LoRA, and its trainer cannot resume from them. Random numbers and
the position in the data are functions of the step. A checkpoint is

    step-00000400/
        checkpoint.json                   see engines/checkpoint_directory.py
        adapter_default/ or shards/       neuronx-distributed's layout; checkpoint/sharded/nxd/ reads it
        resume/rank-00000.safetensors     what this rank needs to resume, bit for bit, at the same degrees:

    model.<name>                          its shard of the trainable parameters; only in files of data-parallel rank 0
    optimizer.<name>.exp_avg, .exp_avg_sq AdamW's moments: the rank's shard with ZeRO-1; without it, as `model`
    optimizer.<name>.master               with ZeRO-1: the weights that the optimizer updates, in its own dtype
"""

import atexit
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import neuronx_distributed.trainer.checkpoint as upstream
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file

from hyperpod_ft import heartbeat, publish
from hyperpod_ft.engines import newest_checkpoint
from hyperpod_ft.engines.checkpoint_directory import publish_written, reporting_full_volumes
from hyperpod_ft.engines.interface import TrainingProgress, TrainingTask
from hyperpod_ft.engines.neuron.gradients import shard_held
from hyperpod_ft.engines.neuron.trainer import Trainer
from hyperpod_ft.engines.ranks import Ranks, Volume


class Checkpoints:
    """The checkpoints of one attempt. `save`, `finish` and `restore` are collective, synchronized through the store."""

    def __init__(self, task: TrainingTask, trainer: Trainer, ranks: Ranks) -> None:
        self._task, self._trainer, self._ranks = task, trainer, ranks
        self._unfinished: TrainingProgress | None = None

    @heartbeat.during("save")
    def save(self, progress: TrainingProgress) -> None:
        """Write the checkpoint of `progress.step`; with `training.async_save` it is published by the next `finish`.

        Raises RuntimeError when ranks differ in a parameter that should be equal on them.
        """
        self.finish()
        xm.mark_step()
        self._check_replicas(progress.step)
        partial = self._partial(progress)
        if self._ranks.is_rank_0:
            publish.remove(partial)
            (partial / "resume").mkdir(parents=True)
        self._barrier(progress, "made")
        with reporting_full_volumes(partial.parent):
            self._trainer.model.save_pretrained(str(partial))
            # at exit, a rank that fails later would wait for the others, which have not failed
            atexit.unregister(upstream.CheckpointIOState.wait_all)
            self._write_state(_state_file(partial, self._ranks.rank))
        self._unfinished = progress
        if not self._task.config.training.async_save:
            self.finish()

    @heartbeat.during("save")
    def finish(self) -> None:
        """Publish the last checkpoint once every rank has written it; delete those beyond the configured number."""
        progress, self._unfinished = self._unfinished, None
        if progress is None:
            return
        _wait_for_upstream()
        final = self._task.checkpoint(progress.step)
        publish_written(self._task, self._ranks, progress, self._partial(progress), final)

    def restore(self) -> TrainingProgress:
        """Load the newest complete, undamaged checkpoint; without one, start at step 0."""
        if self._ranks.is_rank_0:
            publish.remove_leftovers(self._task.checkpoints)
        volume = Volume(self._ranks.is_rank_0, shared=True)
        progress = newest_checkpoint.find(self._task, self._ranks, volume)
        if progress is None:
            return TrainingProgress()
        directory, rank = self._task.checkpoint(progress.step), self._ranks.rank
        first = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())[0]
        with torch.no_grad(), _States(directory, (rank, first)) as states:
            for name, parameter in self._trainer.parameters().items():
                parameter.data.copy_(states[f"model.{name}"])
            for name, shard, state in self.moments():
                if self._divided:
                    shard.data.copy_(states[f"optimizer.{name}.master"])
                state["step"] = torch.tensor(float(progress.step))
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = states[f"optimizer.{name}.{moment}"].to(shard.device)
        xm.mark_step()
        return progress

    def _partial(self, progress: TrainingProgress) -> Path:
        return publish.partial_of(self._task.checkpoint(progress.step))

    def _barrier(self, progress: TrainingProgress, what: str) -> None:
        self._ranks.gather(f"checkpoint/{progress.step}/{what}", None)

    def _write_state(self, file: Path) -> None:
        first = parallel_state.get_data_parallel_rank() == 0
        tensors: dict[str, torch.Tensor] = {}
        if first:
            tensors |= {f"model.{name}": parameter for name, parameter in self._trainer.parameters().items()}
        if first or self._divided:
            for name, shard, state in self.moments():
                if self._divided:
                    tensors[f"optimizer.{name}.master"] = shard
                for moment in ("exp_avg", "exp_avg_sq"):
                    tensors[f"optimizer.{name}.{moment}"] = state[moment]
        # copied: without data parallelism, optimizer and model share tensors, which safetensors refuses
        held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        # safetensors sets the file's mode to 0600, which other users of a shared volume could not read
        file.touch()
        mode = file.stat().st_mode
        save_file(held, file)
        file.chmod(mode)

    @property
    def _divided(self) -> bool:
        return isinstance(self._trainer.optimizer.optimizer, NeuronZero1Optimizer)

    def moments(self) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Each trainable parameter's name, the tensor that the optimizer updates, and the optimizer's state."""
        outer = self._trainer.optimizer.optimizer
        inner = outer.base_optimizer if self._divided else outer
        names = {id(parameter): name for name, parameter in self._trainer.parameters().items()}
        return [
            (names[id(parameter)], shard, inner.state[shard])
            for wholes, shards in zip(outer.param_groups, inner.param_groups, strict=True)
            for parameter, shard in zip(wholes["params"], shards["params"], strict=True)
        ]

    def _check_replicas(self, step: int) -> None:
        """Raise RuntimeError when a parameter that should be equal on several ranks differs between them.

        Such a difference means wrong gradients, and the exported checkpoint has only one rank's copy. In each pipeline
        stage, this compares replicated parameters and the copies of repeated key and value heads.
        """
        trainer = self._trainer
        parameters = trainer.parameters()
        indices = {name: shard_held(name, p, trainer.kv_size_multiplier) for name, p in parameters.items()}
        held: Mapping[str, torch.Tensor] = parameters
        place = [parallel_state.get_pipeline_model_parallel_rank(), 0]
        if self._divided:
            # compare master weights: each rank may have rounded the weights at random; it holds its dp rank's shard
            held = {name: shard for name, shard, _ in self.moments()}
            place[1] = parallel_state.get_data_parallel_rank()
        own = [[name, [*place, index], _digest(held[name])] for name, index in indices.items() if index is not None]
        firsts: dict[tuple[str, tuple[int, ...]], str] = {}
        differing = set()
        for rank in self._ranks.gather(f"replicas/{step}", own):
            for name, at, digest in rank:
                if firsts.setdefault((name, tuple(at)), digest) != digest:
                    differing.add(name)
        if differing:
            raise RuntimeError(
                f"step {step}: {len(differing)} parameters differ between ranks where they should be equal:"
                f" {sorted(differing)[:3]}"
            )


def _wait_for_upstream() -> None:
    """Wait for upstream's background writes (`training.async_save`), and clear its state, or it finishes them again."""
    writing = upstream.g_iostate
    if writing is not None and writing._async_save:
        writing.wait_save(async_remove=False)
        upstream._executor.shutdown()
        upstream.g_iostate = None


class _States:
    """The tensors of several state files, each from the first file that has it."""

    def __init__(self, directory: Path, ranks: tuple[int, ...]) -> None:
        self._files = [_state_file(directory, rank) for rank in dict.fromkeys(ranks)]

    def __enter__(self) -> "_States":
        self._open = [safe_open(file, "pt") for file in self._files]
        self._where = {name: file for file in reversed(self._open) for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor


def _state_file(directory: Path, rank: int) -> Path:
    return directory / "resume" / f"rank-{rank:05d}.safetensors"


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()[:16]
