"""The table of docs/parallelism.md: memory of a training step per rank, by model, method, instances and degrees.

`python scripts/reference.py` writes it between the page's markers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
G5, P4D, P5 = "g5.12xlarge", "p4d.24xlarge", "p5.48xlarge"


@dataclass(frozen=True)
class Layout:
    """Instances and degrees; data-parallel ranks are the others."""

    nodes: int
    instance_type: str
    tensor: int = 1
    pipeline: int = 1

    def __str__(self) -> str:
        nodes = f"{self.nodes} x {self.instance_type}" if self.nodes > 1 else self.instance_type
        degrees = (("TP", self.tensor), ("PP", self.pipeline))
        return ", ".join([nodes, *(f"{name} {degree}" for name, degree in degrees if degree > 1)])


# the layouts of engine neuron, and those of engine torch
LAYOUTS: dict[str, tuple[dict[str, Any], str, tuple[tuple[Layout, ...], tuple[Layout, ...]]]] = {
    "Llama 3 8B, LoRA": (
        LLAMA_3_8B,
        "lora",
        (
            (Layout(1, TRN1, 8), Layout(1, TRN2_SMALL, 4)),
            (Layout(1, TRN2_SMALL, 4), Layout(1, G5)),
        ),
    ),
    "Llama 3 8B, full": (
        LLAMA_3_8B,
        "full",
        (
            (Layout(1, TRN1, 8), Layout(1, TRN2, 4)),
            (Layout(1, TRN2, 4), Layout(1, G5), Layout(1, P4D)),
        ),
    ),
    "Llama 3 70B, LoRA": (
        LLAMA_3_70B,
        "lora",
        (
            (Layout(1, TRN1, 32), Layout(1, TRN2, 16)),
            (Layout(1, TRN2, 4), Layout(1, G5), Layout(1, P4D)),
        ),
    ),
    "Llama 3 70B, full": (
        LLAMA_3_70B,
        "full",
        (
            (Layout(8, TRN1, 32, 4), Layout(4, TRN2, 32, 4)),
            (Layout(2, TRN2, 4), Layout(1, P5), Layout(4, P5)),
        ),
    ),
}


def document(text: str) -> str:
    """A page with the text between its markers generated again."""
    return generated(text, [*_rows(), ""])


def generated(text: str, lines: Iterable[str]) -> str:
    """A page with these lines between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}", "", *lines, f"{END}{after}"])


def _rows() -> Iterator[str]:
    yield "| | engine `neuron` | engine `torch` |"
    yield "|---|---|---|"
    for name, (model_config, method, layouts) in LAYOUTS.items():
        cells = (
            "; ".join(_estimate(engine, model_config, method, layout) for layout in of_engine)
            for engine, of_engine in zip(("neuron", "torch"), layouts, strict=True)
        )
        yield f"| {name} | {' | '.join(cells)} |"


def _estimate(engine: str, model_config: dict[str, Any], method: str, layout: Layout) -> str:
    config = RunConfig.model_validate(
        {
            "name": "table",
            "engine": engine,
            "cluster": {"instance_type": layout.instance_type, "nodes": layout.nodes},
            "model": {"source": "any/model"},
            "dataset": {"source": "any/data", "format": "dolly", "max_length": 2048},
            "training": {"method": method, "activation_checkpointing": "full"},
            "parallelism": {"tensor_parallel": layout.tensor, "pipeline_parallel": layout.pipeline},
        }
    )
    degrees = degrees_of(config)
    shape = check_trainable(config, degrees, model_config)
    assert shape is not None
    needed = estimate(config, degrees, shape).total
    fits = "" if needed <= available(config) else " (too much)"
    return f"{layout}: {needed / GIB:.1f}{fits}"
