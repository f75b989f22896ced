"""What engine torch trains becomes a genuine PEFT adapter: PEFT loads it, and merges it to what the kit merges."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from hyperpod_ft import digests
from hyperpod_ft.checkpoint.consolidate import consolidate_checkpoint
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
from hyperpod_ft.checkpoint.verify import logits
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.torch.lora.adapters import adapt
from hyperpod_ft.planning.lora import targets
from tests.unit.rounding import bounds

IDS = torch.arange(24).reshape(2, 12).remainder(40)
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
GPT2 = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.1)
VARIANTS: dict[str, tuple[Lora, dict[str, Any]]] = {
    "lora": (Lora(r=3, alpha=6, dropout=0.1), {}),
    "rslora": (Lora(r=3, rslora=True), {}),
    "dora": (Lora(r=3, dora=True), {"attention_bias": True}),
    "embedding": (Lora(r=2, target_modules=("embed_tokens", "q_proj", "lm_head")), {}),
    "dora of an embedding": (Lora(r=2, dora=True, target_modules=("embed_tokens", "q_proj", "lm_head")), {}),
    "tied": (Lora(r=2, target_modules=("lm_head", "v_proj")), {"tie_word_embeddings": True}),
    "nf4": (Lora(r=3, alpha=3, quantization="nf4"), {}),
    "transposed": (Lora(r=3, alpha=6), {"gpt2": True}),
    "dora of transposed": (Lora(r=3, dora=True), {"gpt2": True}),
    "nf4 of transposed": (Lora(r=3, quantization="nf4"), {"gpt2": True}),
    "nf4 with dora": (Lora(r=3, alpha=3, dora=True, quantization="nf4"), {}),
}


def save_checkpoint(directory: Path, model: PreTrainedModel, lora: Lora) -> None:
    """As engine torch writes it."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    torch_dcp.save({"model": trained}, storage_writer=torch_dcp.FileSystemWriter(directory), no_dist=True)
    index = directory / ".metadata"
    description = {
        "format": 4,
        "engine": "torch",
        "step": 1,
        "fingerprint": "0",
        "method": "lora",
        "lora": lora.model_dump()
        | {
            "target_modules": targets(lora, model.config.model_type),
            "fan_in_fan_out": model.config.model_type == "gpt2",
        },
        "base_model": {"source": "org/model", "revision": None},
        "degrees": {"world_size": 1, "data_parallel": 1, "pipeline_parallel": 1, "tensor_parallel": 1},
        "progress": {},
        "files": {index.name: index.stat().st_size},
        "sha256": {index.name: digests.file_sha256(index)},
    }
    (directory / "checkpoint.json").write_text(json.dumps(description))


@pytest.mark.parametrize(("lora", "options"), VARIANTS.values(), ids=VARIANTS)
def test_peft_loads_and_merges_what_the_engine_trained(tmp_path: Path, lora: Lora, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    transposed = bool(options.get("gpt2"))
    config = GPT2 if transposed else LlamaConfig(**SIZES, **HEADS, **options)
    base = AutoModelForCausalLM.from_config(config).eval()
    base.save_pretrained(tmp_path / "base")
    live = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    adapt(live, lora, seed=0)
    for name, parameter in live.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
        elif parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    save_checkpoint(tmp_path / "checkpoint", live, lora)
    consolidate_checkpoint(tmp_path / "checkpoint", tmp_path / "adapter", base=tmp_path / "base")

    found_config = LoraConfig.from_pretrained(str(tmp_path / "adapter"))
    assert (found_config.use_dora, found_config.fan_in_fan_out) == (lora.dora, transposed)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    trained = {name for name, p in live.named_parameters() if p.requires_grad}
    assert set(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == {
        f"base_model.model.{n}" for n in trained
    }
    with torch.inference_mode():
        found, expected = live(IDS).logits, loaded.eval()(IDS).logits
    if lora.quantization == "none":
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert 1e-3 < (found - expected).std() / expected.std() < 0.5, "the base was rounded"

    # a merge takes the base's own weights, not those in 4 bits
    merge(tmp_path / "base", [WeightedAdapter(tmp_path / "adapter")], tmp_path / "merged")
    assert logits.compare(tmp_path / "merged", tmp_path / "adapter", tmp_path / "base").findings(tmp_path) == ()
    allowed = bounds(loaded, torch.float32)
    expected_weights = loaded.merge_and_unload().state_dict()
    for name, value in load_file(tmp_path / "merged" / "model.safetensors").items():
        if options.get("tie_word_embeddings") and name == "model.embed_tokens.weight":
            continue  # PEFT merges into the embedding too
        bound = allowed.get(name)
        assert bound.same(value, expected_weights[name]) if bound else torch.equal(value, expected_weights[name]), name
