"""Logits of a merged model against the adapter's: a right merge passes, wrong ones do not, and memory stays small."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hyperpod_ft.checkpoint.verify.verify import verify

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE = {"vocab_size": 512, "hidden_size": 64, "initializer_range": 0.05}
SMALL = SHAPE | {
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def base_and_merged(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype = torch.float32, **lora: Any
) -> tuple[Path, Path, Path]:
    """A base, an adapter on it, and PEFT's own merge, which unties what the adapter changes one of."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(directory / "base", max_shard_size="100KB")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM"} | lora
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(directory / "base", dtype=dtype), LoraConfig(**settings)
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(directory / "adapter")
    model = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=dtype)
    PeftModel.from_pretrained(model, directory / "adapter").merge_and_unload().save_pretrained(directory / "merged")
    return directory / "base", directory / "adapter", directory / "merged"


# Every dtype with one architecture, and every architecture with one dtype: what they need is independent.
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (LlamaConfig(**SMALL), torch.float32),
        (LlamaConfig(**SMALL), torch.bfloat16),
        (LlamaConfig(**SMALL), torch.float16),
        (LlamaConfig(**SMALL, tie_word_embeddings=True), torch.bfloat16),
        (Qwen2Config(**SMALL), torch.float32),
        (Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True), torch.float16),
        (GraniteConfig(**SMALL, embedding_multiplier=2.0, logits_scaling=3.0), torch.bfloat16),
    ],
    ids=lambda it: it.model_type if isinstance(it, PretrainedConfig) else str(it),
)
def test_logits_tell_a_right_merge_from_wrong_ones(
    tmp_path: Path, config: PretrainedConfig, dtype: torch.dtype
) -> None:
    base, right, merged = base_and_merged(tmp_path, config, dtype)
    _, other, of_other = base_and_merged(tmp_path / "other", config, dtype, lora_alpha=16)
    found = verify(merged, adapter=right, base=base, logits=True)
    assert found.findings == () and found.logits is not None
    logits = found.logits
    assert logits.rms_difference < logits.tolerance and logits.top1_agreement > 0.9
    assert (logits.rounding == 0) == (dtype == torch.float32)
    # the same, all at once
    with torch.inference_mode():
        tokens = torch.arange(logits.tokens).mul(7919).add(1).remainder(512).unsqueeze(0)
        whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        live = PeftModel.from_pretrained(whole, right).eval()(tokens).logits
        answers = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(tokens).logits
    assert logits.largest_difference == pytest.approx(float((answers - live).abs().max()), rel=0.02, abs=2e-6)

    one_layer = AutoModelForCausalLM.from_pretrained(merged, dtype=dtype)
    untouched = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).model.layers[2].state_dict()
    one_layer.model.layers[2].load_state_dict(untouched)
    one_layer.save_pretrained(tmp_path / "one layer")
    for wrong in (base, of_other, tmp_path / "one layer"):
        found = verify(wrong, adapter=right, base=base, logits=True)
        assert "its logits are not those of the adapter on the base" in found.findings[-1]
        assert len(found.findings) > 1  # and the tensors are not
    assert not verify(merged, adapter=other, base=base, logits=True).ok


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (LlamaConfig(**SMALL), {"use_dora": True}),
        (LlamaConfig(**SMALL), {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
        (LlamaConfig(**SMALL), {"target_modules": ["q_proj", "embed_tokens"]}),
        (LlamaConfig(**SMALL), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
        (Qwen2Config(**SMALL), {"bias": "lora_only"}),
        (
            GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=16),  # fewer than are compared
            {"target_modules": ["c_attn"], "fan_in_fan_out": True},
        ),
        (LlamaConfig(**SMALL), {"target_modules": ["q_proj"], "target_parameters": ["up_proj.weight"]}),
        (GPTNeoXConfig(**SMALL), {"target_modules": ["query_key_value"]}),  # with an output matrix of another name
        # their mixers and experts compute with the weight of a linear layer themselves
        (MambaConfig(**SHAPE, num_hidden_layers=2, state_size=8, time_step_rank=8), {"target_modules": ["in_proj"]}),
        (
            Llama4TextConfig(**SMALL, intermediate_size_mlp=128, num_local_experts=2, head_dim=16, pad_token_id=0),
            {"target_modules": ["q_proj"]},
        ),
        (ApertusConfig(**SMALL), {"target_modules": ["q_proj"]}),  # its activations have tensors without dimensions
    ],
    ids=[
        "dora",
        "patterns",
        "embedding",
        "whole modules",
        "biases",
        "gpt2",
        "parameters",
        "gpt neox",
        "mamba",
        "llama4",
        "apertus",
    ],
)
def test_logits_of_other_kinds_of_adapters_and_models(
    tmp_path: Path, config: PretrainedConfig, lora: dict[str, Any]
) -> None:
    base, live, merged = base_and_merged(tmp_path, config, **lora)
    assert verify(merged, adapter=live, base=base, logits=True).findings == ()
    assert "its logits are not" in verify(base, adapter=live, base=base, logits=True).findings[-1]


def _edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_copy_of_a_tied_matrix_is_ignored_as_transformers_does(tmp_path: Path) -> None:
    """Some files hold the output matrix too, here in another dtype."""
    base, adapter, merged = base_and_merged(tmp_path, Qwen2Config(**SMALL, tie_word_embeddings=True), torch.bfloat16)
    shard = next(path for path in base.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(path))
    tensors = load_file(shard)
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].float()}
    save_file(tensors | copy, shard, metadata={"format": "pt"})
    index = base / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    index.write_text(json.dumps(values | {"weight_map": values["weight_map"] | {"lm_head.weight": shard.name}}))
    found = verify(merged, adapter=adapter, base=base, logits=True)
    assert found.findings == () and found.logits


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    base, live, merged = base_and_merged(tmp_path, LlamaConfig(**SMALL))
    kept = load_file(live / "adapter_model.safetensors")
    name = next(iter(kept))

    def finding() -> str:
        lines = verify(merged, adapter=live, base=base, logits=True).findings
        assert not any("\n" in line for line in lines)
        return lines[-1]

    save_file(kept | {name.replace("layers.0", "layers.9"): kept[name].clone()}, live / "adapter_model.safetensors")
    assert "base_model.model.model.layers.9" in finding()
    save_file({key: value for key, value in kept.items() if key != name}, live / "adapter_model.safetensors")
    assert "is missing" in finding()
    save_file(kept, live / "adapter_model.safetensors")
    _edit(base / "config.json", model_type="unheard-of")
    assert "transformers cannot build the model" in finding()
    for model in (base, merged):
        _edit(model / "config.json", model_type="llama", quantization_config={"quant_method": "fp8"})
    assert "quantized" in finding()


# VmHWM, since ru_maxrss begins with what the parent had
PEAK = """
import gc, sys
gc.disable()  # a sixth of the time of the imports
from pathlib import Path
from hyperpod_ft.checkpoint.verify.verify import verify

def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

with_logits = sys.argv[1] == "logits"
if with_logits:
    import hyperpod_ft.checkpoint.verify.logits
gc.freeze()
gc.enable()
before = peak()
directory = Path(sys.argv[2])
others = {} if with_logits else {"against": directory}
found = verify(directory, adapter=directory / "adapter", base=directory, logits=with_logits, **others)
assert found.base.compared == found.tensors
assert found.logits.rms_difference <= found.logits.tolerance if with_logits else found.comparison.equal == found.tensors
print(before, peak(), "torch" in sys.modules)
"""


def peak_mb(directory: Path, what: str) -> tuple[float, float, bool]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, what, str(directory)], capture_output=True, text=True, check=True, env=environment
    )
    before, after, torch_is_there = done.stdout.split()
    return float(before), float(after), torch_is_there == "True"


def synthetic(directory: Path, layers: int) -> Path:
    """A bf16 Llama with 44 MB a layer, and an adapter that changes nothing."""
    width, inner, vocabulary = 1024, 6144, 4000
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, vocab_size=vocabulary, dtype="bfloat16",
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()}
    torch.manual_seed(0)
    directory.mkdir()
    values = {shape: torch.randn(shape).mul_(0.02).bfloat16() for shape in set(shapes.values())}
    save_file({name: values[shape].clone() for name, shape in shapes.items()}, directory / "model.safetensors")
    config.save_pretrained(directory)
    (directory / "adapter").mkdir()
    module = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    factors = {module.format(layer, side): torch.zeros(4, width) for layer in range(layers) for side in "A"}
    factors |= {module.format(layer, "B"): torch.zeros(width, 4) for layer in range(layers)}
    save_file(factors, directory / "adapter" / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / "adapter" / "adapter_config.json").write_text(json.dumps(values))
    return directory


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    few, many = synthetic(tmp_path / "few", 1), synthetic(tmp_path / "many", 6)
    assert (many / "model.safetensors").stat().st_size > 250e6
    before, after, torch_is_there = peak_mb(many, "against")
    assert after < 200 and not torch_is_there, (before, after)
    small = peak_mb(few, "logits")
    large = peak_mb(many, "logits")
    assert large[1] - small[1] < 40, (small, large)
    assert large[1] - large[0] < 300, large
