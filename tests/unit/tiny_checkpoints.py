"""Tiny models, adapters and sharded checkpoints, made by the libraries whose formats they have."""

import functools
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hyperpod_ft.checkpoint.adapters.lora_config import AdapterConfig
from hyperpod_ft.checkpoint.sharded.description import LoraDescription
from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.digests import file_sha256
from hyperpod_ft.engines import checkpoint_directory
from hyperpod_ft.engines.interface import TrainingProgress
from hyperpod_ft.runs.run import Run
from tests.forking import ForkServer
from tests.tasks import task_without_model
from tests.unit import described_checkpoints, tiny_tokenizer

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = AdapterConfig(r=3, lora_alpha=4, target_modules=TARGETS)
CONFIGURATION = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}


def base_model(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    tied: bool = False,
    max_shard_size: str = "5GB",
    seed: int = 0,
    spread: float = 0.1,
) -> Path:
    """A random Llama with tokenizer, generation config, chat template and licence, as the Hub would hold it."""
    torch.manual_seed(seed)
    configuration = LlamaConfig(
        **CONFIGURATION,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=spread,
        bos_token_id=0,
        eos_token_id=1,
    )
    tiny_tokenizer.save(directory, tiny_tokenizer.make())
    LlamaForCausalLM(configuration).to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    (directory / "LICENSE.txt").write_text("free\n")
    (directory / "README.md").write_text("# the base's own card\n")
    return directory


def peft_model(base: Path, adapter: AdapterConfig = ADAPTER, *, dtype: torch.dtype | None = None) -> PeftModel:
    """The base with a LoRA adapter that is not zero."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=dtype or "auto")
    configuration = LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        use_rslora=adapter.use_rslora,
        target_modules=list(adapter.target_modules),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)
    model = get_peft_model(model, configuration)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What engine torch saves: the trainable parameters, fp32, by the engine's names for those of a PEFT model."""
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.detach().float().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def tensor_parallel_dim(name: str) -> int | None:
    """How engine torch shards LoRA factors: lora_B of column-wise modules, lora_A of row-wise ones."""
    row_wise = "o_proj" in name or "down_proj" in name
    if "lora_B" in name and not row_wise:
        return 0
    return 1 if "lora_A" in name and row_wise else None


@dataclass(frozen=True)
class Sharding:
    """A checkpoint to save: each tensor sharded along its dim (None or absent: replicated)."""

    target: Path
    tensors: Mapping[str, torch.Tensor]
    dims: Mapping[str, int | None]


def save_sharded(work: Path, jobs: Sequence[Sharding], world_size: int = 2) -> None:
    """Save checkpoints with `world_size` real processes over gloo; `work` is a new directory for what they need."""
    work.mkdir()
    for number, job in enumerate(jobs):
        save_file(dict(job.tensors), work / f"{number}.safetensors")
    described = [
        {"whole": str(work / f"{number}.safetensors"), "target": str(job.target), "dims": dict(job.dims)}
        for number, job in enumerate(jobs)
    ]
    (work / "jobs.json").write_text(json.dumps(described))
    outputs = [work / f"rank{rank}.txt" for rank in range(world_size)]
    ranks = [
        _ranks().start(["tests.unit.shard_checkpoint", str(rank), str(world_size), str(work)], os.environ, output)
        for rank, output in enumerate(outputs)
    ]
    try:
        assert [process.wait(300) for process in ranks] == [0] * world_size, [file.read_text() for file in outputs]
    finally:
        for process in ranks:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)


@functools.cache
def _ranks() -> ForkServer:
    """It ends with this process."""
    modules = ["safetensors.torch", "torch.distributed.checkpoint", "torch.distributed.tensor"]
    return ForkServer(modules, os.environ | {"OMP_NUM_THREADS": "1"})


def save_whole(target: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """The same from one process without collectives."""
    dcp.save({"model": dict(tensors)}, storage_writer=dcp.FileSystemWriter(target), no_dist=True)
    return target


def describe(checkpoint: Path, base: Path, adapter: AdapterConfig | None = None) -> None:
    """The checkpoint.json of engine torch."""
    lora = adapter and LoraDescription(
        r=adapter.r,
        alpha=adapter.lora_alpha,
        rslora=adapter.use_rslora,
        dora=adapter.use_dora,
        dropout=0.0,
        target_modules=tuple(adapter.target_modules),
    )
    described_checkpoints.describe(checkpoint, base=str(base), lora=lora)


def run_on(root: Path, base: Path, **changes: Any) -> Run:
    """A run whose base model is downloaded and whose dataset is prepared; `changes` are sections of the run file."""
    data = root / "rows.jsonl"
    root.mkdir(parents=True, exist_ok=True)
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    values: dict[str, Any] = {
        "name": "tiny",
        "engine": "torch",
        "cluster": {"root": str(root / "volume"), "instance_type": "local"},
        "env": {"python": "current"},
        "model": {"source": str(base)},
        "dataset": {"source": str(data), "format": "prompt-completion", "max_length": 16},
        "lora": {"r": ADAPTER.r, "alpha": ADAPTER.lora_alpha, "target_modules": list(TARGETS)},
        "training": {"method": "lora"},
        "parallelism": {"ranks_per_node": 1},
    }
    for section, given in changes.items():
        values[section] = values.get(section, {}) | given
    run = Run.of(run_file.resolve(RunConfig.model_validate(values), root))
    shutil.copytree(base, run.paths.base_model)
    return run


def add_checkpoint(run: Run, tensors: Mapping[str, torch.Tensor], step: int = 7) -> Path:
    """A complete checkpoint of stage train."""
    directory = save_whole(run.paths.checkpoints / f"step-{step:08d}", tensors)
    progress = TrainingProgress(step=step, last_loss=1.25)
    files = {path.name: checkpoint_directory.CheckpointFile.of(path, file_sha256(path)) for path in directory.iterdir()}
    checkpoint_directory.write_description(task_without_model(run), progress, directory, dict(sorted(files.items())))
    return directory
