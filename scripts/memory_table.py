"""The table of docs/memory.md: memory of a training step per core, by model, method, instances and degrees.

`python scripts/reference.py` writes it between the page's markers.
"""

from collections.abc import Iterator
from typing import Any

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.memory import GIB, available
from hyperpod_ft.planning.model_fit import check_trainable, estimate
from hyperpod_ft.planning.parallelism import degrees_of

BEGIN, END = "<!-- made by `python scripts/reference.py` -->", "<!-- end -->"

# From the models' published config.json.
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_8B = LLAMA_3_8B | {
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
}

TRN1, TRN2, TRN2_SMALL = "trn1.32xlarge", "trn2.48xlarge", "trn2.3xlarge"
# nodes, instance type, tensor and pipeline parallelism
LAYOUTS = {
    "Llama 3 8B": (
        LLAMA_3_8B,
        {
            "lora": [(1, TRN1, 8, 1), (1, TRN2_SMALL, 4, 1), (1, TRN2, 4, 1)],
            "full": [(1, TRN1, 4, 1), (1, TRN1, 8, 1), (4, TRN1, 8, 1), (1, TRN2_SMALL, 4, 1), (1, TRN2, 4, 1)],
        },
    ),
    "Llama 3 70B": (
        LLAMA_3_70B,
        {
            "lora": [(1, TRN1, 8, 1), (1, TRN1, 32, 1), (2, TRN1, 8, 4), (2, TRN1, 32, 1), (1, TRN2, 16, 1)],
            "full": [(2, TRN1, 32, 1), (8, TRN1, 32, 4), (8, TRN1, 32, 8), (4, TRN2, 32, 4)],
        },
    ),
    "Qwen3 8B": (
        QWEN3_8B,
        {
            "lora": [(1, TRN1, 8, 1), (1, TRN2_SMALL, 4, 1), (1, TRN2, 4, 1)],
            "full": [(1, TRN1, 8, 1), (1, TRN2_SMALL, 4, 1), (1, TRN2, 4, 1)],
        },
    ),
}


def document(text: str) -> str:
    """A page with the text between its markers generated again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}", "", *_rows(), "", f"{END}{after}"])


def _rows() -> Iterator[str]:
    names = "model", "method", "nodes", "TP x PP x DP", "weights", "gradients", "optimizer", "activations", "logits"
    yield _row(*names, "GiB per core", "available", "fits")
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for name, (model_config, methods) in LAYOUTS.items():
        for method, layouts in methods.items():
            for layout in layouts:
                yield _estimate(name, model_config, method, *layout)


def _estimate(
    name: str, model_config: dict[str, Any], method: str, nodes: int, instance_type: str, tensor: int, pipeline: int
) -> str:
    config = RunConfig.model_validate(
        {
            "name": "table",
            "engine": "neuron",
            "cluster": {"instance_type": instance_type, "nodes": nodes},
            "model": {"source": "any/model"},
            "dataset": {"source": "any/data", "format": "dolly", "max_length": 2048},
            "training": {"method": method, "activation_checkpointing": "full"},
            "parallelism": {"tensor_parallel": tensor, "pipeline_parallel": pipeline},
        }
    )
    degrees = degrees_of(config)
    shape = check_trainable(config, degrees, model_config)
    assert shape is not None
    memory, limit = estimate(config, degrees, shape), available(config)
    return _row(
        name,
        "LoRA" if method == "lora" else method,
        f"{nodes} x {instance_type}",
        f"{tensor} x {pipeline} x {degrees.data_parallel}",
        *(f"{value / GIB:.1f}" for value in vars(memory).values()),
        f"{memory.total / GIB:.1f}",
        f"{limit / GIB:.1f}",
        "yes" if memory.total <= limit else "no",
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
