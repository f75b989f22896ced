"""A gpt-oss as it is published, in MXFP4: fetched, decoded, tuned and merged; it answers as transformers' own."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from hyperpod_ft.config import run_file
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import certify, consolidate, download, merge, stage
from hyperpod_ft.stages.model_card import model_card
from tests.training.conftest import VOCABULARY, train_here, write_rows
from tests.unit.stage_runs import finish
from tests.unit.tiny_families import FILE, MIXTURES, SIZES

pytestmark = pytest.mark.training

_EXPERTS = ("gate_up_proj", "down_proj")


def publish_quantized(directory: Path) -> None:
    """A random gpt-oss whose experts are codes."""
    sizes = SIZES | MIXTURES["gpt_oss"] | {"vocab_size": VOCABULARY, "intermediate_size": 32, "head_dim": 32}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes)).save_pretrained(directory)
    tensors = load_file(directory / FILE)
    for name in [name for name in tensors if name.endswith(_EXPERTS)]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 123, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, directory / FILE, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))


def test_a_base_in_four_bits_is_decoded_once_and_tuned(tmp_path: Path) -> None:
    source, rows = tmp_path / "gpt-oss", tmp_path / "rows.jsonl"
    publish_quantized(source)
    rows.write_text('{"text": "x"}\n')
    values = {
        "name": "quantized",
        "engine": "torch",
        "cluster": {"root": str(tmp_path / "root"), "instance_type": "local"},
        "env": {"python": "current"},
        "model": {"source": str(source)},
        "dataset": {"source": str(rows), "format": "text", "max_length": 32},
        "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "training": {"precision": "fp32", "max_steps": 4, "learning_rate": 1e-2},
        "parallelism": {"ranks_per_node": 1},
    }
    run = Run.of(run_file.resolve(run_file.validate(values, "quantized"), tmp_path))
    run.freeze()
    finish(run, "env")
    stage.perform(run, "download", download.work)
    stage.perform(run, "download", download.work)  # it is there
    stage.perform(run, "certify", certify.work)
    write_rows(run.paths.dataset_path / "train", 24, 32)
    (run.paths.dataset_path / "report.json").write_text("{}")
    finish(run, "dataset", run.paths.dataset_path)
    train_here(run)
    consolidate.work(run)
    merge.work(run)
    assert "decoded from mxfp4" in model_card(run, "")
    published = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True))
    adapted = PeftModel.from_pretrained(published.float(), str(run.paths.adapter))
    merged = AutoModelForCausalLM.from_pretrained(run.paths.tuned_model)
    ids = torch.arange(3, 19)[None]
    with torch.inference_mode():
        own, theirs = (model.eval()(input_ids=ids).logits for model in (merged.float(), adapted))
        with adapted.disable_adapter():
            change = (adapted(input_ids=ids).logits - theirs).abs().max()
    # merged weights are rounded to bfloat16
    assert (own - theirs).abs().max() < change / 10
