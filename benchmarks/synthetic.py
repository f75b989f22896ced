"""Models with the geometry of Llama 3 8B and random weights: a base model, a LoRA adapter, a sharded checkpoint.

python -m benchmarks.synthetic base DIRECTORY --layers 8          # and: adapter, checkpoint

Everything but the adapter is bfloat16. The bytes depend only on the geometry: the same call writes the same bytes.
Tensors are written in blocks, so that 24 layers need no more memory than one.
"""

import argparse
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]  # bfloat16 numbers as bits

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 16, 32
_BLOCK = 1 << 24  # elements generated at a time
_POOL = (1 << 24) - 3  # coprime to every row length, so that no tensor has equal rows


@dataclass(frozen=True)
class Geometry:
    """A Llama's sizes; the defaults are those of Llama 3 8B with fewer layers."""

    layers: int = 8
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the model's order."""
        kv = self.hidden // self.heads * self.kv_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes |= {
                f"model.layers.{layer}.{name}.weight": shape
                for name, shape in {
                    "self_attn.q_proj": (self.hidden, self.hidden),
                    "self_attn.k_proj": (kv, self.hidden),
                    "self_attn.v_proj": (kv, self.hidden),
                    "self_attn.o_proj": (self.hidden, self.hidden),
                    "mlp.gate_proj": (self.intermediate, self.hidden),
                    "mlp.up_proj": (self.intermediate, self.hidden),
                    "mlp.down_proj": (self.hidden, self.intermediate),
                    "input_layernorm": (self.hidden,),
                    "post_attention_layernorm": (self.hidden,),
                }.items()
            }
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocabulary, self.hidden)}

    def config(self) -> dict[str, Any]:
        """`config.json` of the model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
        }

    @property
    def nbytes(self) -> int:
        """The weights' size in bytes."""
        return sum(2 * int(np.prod(shape)) for shape in self.tensors().values())


def bfloat16(values: NDArray[np.float32]) -> Bits:
    """float32 rounded to the nearest bfloat16, ties to even; there must be no NaN."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Weights:
    """The weights of a geometry: standard deviation 0.02, as Llama is initialised; norms are 1.

    Every tensor is a window of one pool of random numbers, which costs only a copy and is as good as fresh numbers for
    programs that only move or add to them.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.shapes = geometry.tensors()
        pool = np.random.default_rng(0).standard_normal(_POOL, np.float32)
        self._pool = bfloat16(pool * np.float32(0.02))

    def flat(self, name: str, first: int, count: int) -> Bits:
        """Elements `first` to `first + count` of a tensor, in row-major order."""
        if len(self.shapes[name]) == 1:
            return np.full(count, 0x3F80, np.uint16)
        begin = (zlib.crc32(name.encode()) + first) % _POOL
        laps = -(-(begin + count) // _POOL)
        return (self._pool if laps == 1 else np.tile(self._pool, laps))[begin : begin + count]

    def rows(self, name: str, first: int, stop: int) -> Bits:
        """Some rows of a matrix, or elements of a vector."""
        shape = self.shapes[name]
        width = int(np.prod(shape[1:]))
        return self.flat(name, first * width, (stop - first) * width).reshape(stop - first, *shape[1:])

    def blocks(self, name: str) -> Iterator[Bits]:
        """A whole tensor, block by block."""
        size = int(np.prod(self.shapes[name]))
        for first in range(0, size, _BLOCK):
            yield self.flat(name, first, min(_BLOCK, size - first))


def write_base(directory: Path, geometry: Geometry, max_shard_bytes: int = 5_000_000_000) -> None:
    """A Hugging Face model directory: shards of at most `max_shard_bytes`, like Llama 3 8B."""
    directory.mkdir(parents=True)
    weights = Weights(geometry)
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in weights.shapes.items():
        nbytes = 2 * int(np.prod(shape))
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    placed: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with file.open("wb") as stream:
            stream.write(_header({name: ("BF16", 2, weights.shapes[name]) for name in names}))
            for name in names:
                for block in weights.blocks(name):
                    stream.write(block.data)
        placed |= dict.fromkeys(names, file.name)
    index = {"metadata": {"total_size": geometry.nbytes}, "weight_map": placed}
    _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", geometry.config())


def write_adapter(directory: Path, geometry: Geometry) -> None:
    """A PEFT adapter on all linears, in fp32 as PEFT and NeuronTrainer save it, large enough to change most weights."""
    directory.mkdir(parents=True)
    generator = np.random.default_rng(1)
    factors: dict[str, NDArray[np.float32]] = {}
    for name, shape in geometry.tensors().items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in ADAPTED:
            rows, columns = shape
            bound = columns**-0.5  # PEFT's bound for initializing A
            prefix = f"base_model.model.{module}"
            factors[f"{prefix}.lora_A.weight"] = generator.uniform(-bound, bound, (RANK, columns)).astype(np.float32)
            factors[f"{prefix}.lora_B.weight"] = generator.normal(0, 0.005, (rows, RANK)).astype(np.float32)
    with (directory / "adapter_model.safetensors").open("wb") as stream:
        stream.write(_header({name: ("F32", 4, values.shape) for name, values in factors.items()}))
        for values in factors.values():
            stream.write(values.data)
    _write_json(
        directory / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "synthetic",
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "r": RANK,
            "target_modules": list(ADAPTED),
            "use_dora": False,
            "use_rslora": False,
        },
    )


def _header(tensors: dict[str, tuple[str, int, tuple[int, ...]]]) -> bytes:
    """The head of a safetensors file: dtype, bytes an element, and shape by name."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, width, shape) in tensors.items():
        end = begin + width * int(np.prod(shape))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic model.")
    parser.add_argument("what", choices=("base", "adapter", "checkpoint"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    geometry = Geometry(options.layers)
    if options.what == "base":
        write_base(options.directory, geometry)
    elif options.what == "adapter":
        write_adapter(options.directory, geometry)
    else:
        from benchmarks.neuron_checkpoint import write_checkpoint  # noqa: PLC0415 - torch, which the others do without

        write_checkpoint(options.directory, geometry)


if __name__ == "__main__":
    main()
