"""Every layout of ranks computes what one process computes with plain transformers, PEFT and torch.optim."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts_worker import filled_value
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from hyperpod_ft.config.sections.training import learning_rate
from hyperpod_ft.engines.batches import DataOrder
from hyperpod_ft.planning.lora import targets
from hyperpod_ft.runs.run import Run
from tests.training.conftest import Jobs, MakeRun, tiny_llama

pytestmark = pytest.mark.training

ROWS_PER_STEP = 8
# data parallel, tensor parallel, micro batch, accumulation: always four ranks and the same rows in a step
LAYOUTS = [(4, 1, 2, 1), (2, 2, 2, 2), (1, 4, 4, 2)]


def settings(layout: tuple[int, int, int, int], **changes: Any) -> dict[str, Any]:
    data_parallel, tensor_parallel, micro_batch_size, accumulation = layout
    assert data_parallel * micro_batch_size * accumulation == ROWS_PER_STEP
    return {
        "parallelism": {"ranks_per_node": 4, "tensor_parallel": tensor_parallel},
        "training.micro_batch_size": micro_batch_size,
        "training.gradient_accumulation_steps": accumulation,
        "training.max_steps": 8,
    } | changes


def engine_name(live: str) -> str:
    """The engine's name of a parameter of a live PEFT model."""
    name = live.removeprefix("base_model.model.").replace(".default", "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


Loss = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def causal_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over the labels of packed rows."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def reference(
    run: Run, steps: int, loss_of: Loss = causal_loss, auto: Any = AutoModelForCausalLM
) -> dict[str, torch.Tensor]:
    """The same in one process, written without the engine: whole batch at once, clip_grad_norm_, AdamW."""
    training, lora = run.config.training, run.config.lora
    model = auto.from_pretrained(run.paths.base_model, attn_implementation="eager", dtype=torch.float32)
    if training.method == "lora":
        adapters = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=list(targets(lora, model.config.model_type)),
            fan_in_fan_out=model.config.model_type == "gpt2",
            use_dora=lora.dora,
            task_type="CAUSAL_LM" if auto is AutoModelForCausalLM else "SEQ_2_SEQ_LM",
        )
        model = get_peft_model(model, adapters)
    model.train()
    trainable = {engine_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trainable.items():
        if training.method == "lora" and (value := filled_value(name, parameter.shape, run.config.seed)) is not None:
            parameter.data = value
    arrays = {
        file.stem: np.load(file).astype(np.int64) for file in sorted((run.paths.dataset_path / "train").glob("*.npy"))
    }
    order = DataOrder(len(arrays["labels"]), run.config.seed, ROWS_PER_STEP, 1, 1)
    decayed = [p for name, p in trainable.items() if p.ndim > 1 and "lora_B" not in name]
    faster = [p for name, p in trainable.items() if "lora_B" in name]
    others = [p for p in trainable.values() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": training.weight_decay, "ratio": 1},
            {"params": faster, "weight_decay": training.weight_decay, "ratio": lora.plus_ratio},
            {"params": others, "weight_decay": 0.0, "ratio": 1},
        ]
    )
    losses = []
    for step in range(1, steps + 2):
        batch = {name: torch.from_numpy(array[order.step(step)]) for name, array in arrays.items()}
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        if step > steps:
            break
        torch.nn.utils.clip_grad_norm_(trainable.values(), training.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step, 8) * group["ratio"]
        optimizer.step()
        optimizer.zero_grad()
    gradients = {f"gradient.{name}": p.grad for name, p in trainable.items() if p.grad is not None}
    parameters = {f"parameter.{name}": p.detach() for name, p in trainable.items()}
    return {"loss": torch.tensor(losses, dtype=torch.float64)} | gradients | parameters


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], kind: str) -> dict[str, float]:
    """Largest difference of each tensor, relative to the largest value in it."""
    assert found.keys() == expected.keys()
    return {
        name: ((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)).item()
        for name, value in expected.items()
        # softmax takes no notice of a key's bias: its gradient is rounding, which AdamW makes as large as others
        if name.startswith(kind) and not name.endswith("k_proj.bias")
    }


def compare(
    jobs: Jobs,
    tmp_path: Path,
    runs: list[Run],
    steps: int,
    limits: dict[str, float],
    expected: list[Run],
    reference_of: Callable[[Run, int], dict[str, torch.Tensor]] = reference,
) -> None:
    job = jobs.start(4, ["layouts_worker", str(steps), str(tmp_path), *(str(run.paths.directory) for run in runs)])
    assert job.wait(300) == 0, job.text()
    cache: dict[str, dict[str, torch.Tensor]] = {}
    for run, like in zip(runs, expected, strict=True):
        if like.config.name not in cache:
            cache[like.config.name] = reference_of(like, steps)
        found = load_file(tmp_path / f"{run.config.name}.safetensors")
        for kind, limit in limits.items():
            worst = differences(found, cache[like.config.name], kind)
            name = max(worst, key=worst.__getitem__)
            print(f"{run.config.name}: {kind}: {len(worst)} tensors, largest relative difference {worst[name]:.1e}")
            # bf16 has 8 bits of mantissa; a wrong sum would be off by a factor
            allowed = 0.1 if run.config.training.precision == "bf16" else limit
            assert worst[name] <= allowed, f"{run.config.name}: {name}"


def in_every_layout(make_run: MakeRun, prefix: str, model: PretrainedConfig, **changes: Any) -> list[Run]:
    return [
        make_run(f"{prefix}-dp{layout[0]}-tp{layout[1]}", settings(layout, **changes), model=model)
        for layout in LAYOUTS
    ]


def test_loss_and_every_gradient_agree(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """TP 1, 2 and 4 with 8 heads over 4 key/value heads, LoRA and full, biased Qwen2 and head-normed Qwen3."""
    full = {"training.method": "full"}
    sizes = {key: getattr(tiny_llama(), key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    runs = [
        *in_every_layout(make_run, "lora", tiny_llama())[:2],
        *in_every_layout(make_run, "dora", tiny_llama(attention_bias=True), **{"lora.dora": True})[1:],
        *in_every_layout(
            make_run, "full", tiny_llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True), **full
        ),
        make_run("qwen2", settings((2, 2, 2, 2), **full), model=Qwen2Config(**sizes)),
        make_run("qwen3", settings((1, 4, 4, 2), **full), model=Qwen3Config(**sizes, head_dim=16)),
        make_run("bf16", settings((2, 2, 2, 2), **{"training.precision": "bf16"})),
    ]
    expected = [runs[0]] * 2 + [runs[2]] * 2 + [runs[4]] * 3 + runs[7:9] + [runs[0]]
    compare(jobs, tmp_path, runs, 0, {"loss": 1e-5, "gradient": 1e-5}, expected)


def test_parameters_agree_after_steps(make_run: MakeRun, jobs: Jobs, tmp_path: Path) -> None:
    """Several AdamW steps with accumulation and clipping that bites."""
    changes: dict[str, Any] = {"training.max_grad_norm": 0.2, "training.learning_rate": 1e-3}
    runs = [
        *in_every_layout(make_run, "steps", tiny_llama(), **changes)[::2],
        *in_every_layout(make_run, "plus", tiny_llama(), **changes, **{"lora.dora": True, "lora.plus_ratio": 4})[1:],
    ]
    runs.append(
        make_run(
            "checkpointed",
            settings(
                (2, 2, 2, 2), **changes, **{"training.activation_checkpointing": "full", "training.method": "full"}
            ),
            # a bias that every tensor-parallel rank has counts once in the gradient norm
            model=tiny_llama(attention_bias=True, mlp_bias=True),
        )
    )
    # AdamW divides a gradient by its own size, so elements whose gradient is mostly rounding move by rounding
    expected = [runs[0]] * 2 + [runs[2]] * 2 + [runs[4]]
    compare(jobs, tmp_path, runs, 3, {"loss": 1e-6, "parameter": 1e-4}, expected)
