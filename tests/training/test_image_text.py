"""Image-text models: their language model is tuned on text, and the rest stays, byte for byte."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.download import adapter, fetch
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, merge
from tests.training.conftest import VOCABULARY, Jobs, MakeRun, metrics, train_here
from tests.unit import tiny_image_text
from tests.unit.tiny_families import FILE

pytestmark = pytest.mark.training

SETTINGS = {"training.learning_rate": 1e-3, "training.save_every_steps": 2}
IDS = torch.arange(3, 27).reshape(2, 12)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def changed(run: Run) -> set[str]:
    """The tensors that training changed; none has come or gone."""
    before, after = (load_file(path / FILE) for path in (run.paths.base_model, run.paths.tuned_model))
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in metrics(run)]


def transformers_loads(directory: Path) -> bool:
    """Whether it finds every tensor, and no other."""
    _, info = AutoModelForImageTextToText.from_pretrained(directory, output_loading_info=True)
    return not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def sound_merge(run: Run) -> bool:
    """Whether the tuned model is the base with the adapter, by the names that each of them has in files."""
    return verify(run.paths.tuned_model, base=run.paths.base_model, adapter=run.paths.adapter).findings == ()


@pytest.mark.parametrize("model_type", tiny_image_text.TYPES)
def test_adapters_fit_the_whole_model(make_run: MakeRun, model_type: str) -> None:
    """PEFT puts them into the model that reads images, and nowhere in its tower."""
    config = tiny_image_text.config_of(model_type, vocab_size=VOCABULARY)
    targets = {"lora.target_modules": ["q_proj", "v_proj"]}
    run = make_run(model=config, settings=SETTINGS | targets | {"training.method": "lora"})
    train_here(run)
    consolidate.work(run)
    merge.work(run)
    base, tuned = (pretrained.load(path, "auto") for path in (run.paths.base_model, run.paths.tuned_model))
    before = logits(base)
    adapted = PeftModel.from_pretrained(base, str(run.paths.adapter))
    factors = {name for name, _ in adapted.named_parameters() if ".lora_A." in name}
    assert len(factors) == len(load_file(run.paths.adapter / "adapter_model.safetensors")) / 2
    assert torch.allclose(logits(adapted), logits(tuned), atol=1e-5)
    assert transformers_loads(run.paths.tuned_model)
    assert (before - logits(tuned)).abs().max() > 1e-3
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) and "vision" not in name for name in changed(run))
    assert sound_merge(run)


def test_an_adapter_is_continued_and_trained_with_whole_modules(make_run: MakeRun) -> None:
    config = tiny_image_text.config_of("llava", vocab_size=VOCABULARY)
    targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    first = make_run("first", model=config, settings=SETTINGS | {"lora": targets})
    train_here(first)
    consolidate.work(first)
    second = {"model.adapter": {"source": str(first.paths.adapter)}, "lora": {}}
    run = make_run(model=config, settings=SETTINGS | second)
    fetch.ensure(adapter.wanted(run)[0])
    adapter.check(run)
    train_here(run)
    assert losses(run)[0] < losses(first)[-1]
    consolidate.work(run)
    merge.work(run)
    base, tuned = (pretrained.load(path, "auto") for path in (run.paths.base_model, run.paths.tuned_model))
    assert torch.allclose(logits(PeftModel.from_pretrained(base, str(run.paths.adapter))), logits(tuned), atol=1e-5)
    assert "language_model.lm_head.weight" in changed(run) and sound_merge(run)


@pytest.mark.parametrize("model_type", tiny_image_text.TYPES)
def test_all_parameters_of_the_language_model_are_tuned(make_run: MakeRun, model_type: str) -> None:
    config = tiny_image_text.config_of(model_type, vocab_size=VOCABULARY)
    run = make_run(model=config, settings=SETTINGS | {"training.method": "full"})
    (run.paths.base_model / "preprocessor_config.json").write_text("{}")
    train_here(run)
    consolidate.work(run)
    assert transformers_loads(run.paths.tuned_model)
    assert (run.paths.tuned_model / "preprocessor_config.json").exists()
    names = changed(run)
    left = load_file(run.paths.base_model / FILE).keys() - names
    assert not [name for name in names if "vis" in name or "projector" in name]
    # Gemma 4 has factors of layers as buffers
    assert not [name for name in left if "language_model" in name and not name.endswith("layer_scalar")]


def test_adapters_of_experts(make_run: MakeRun) -> None:
    config = tiny_image_text.config_of("qwen3_5_moe", vocab_size=VOCABULARY)
    targets = {"lora.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    run = make_run(model=config, settings=SETTINGS | targets)
    train_here(run)
    consolidate.work(run)
    merge.work(run)
    base, tuned = (pretrained.load(path, "auto") for path in (run.paths.base_model, run.paths.tuned_model))
    adapted = PeftModel.from_pretrained(base, str(run.paths.adapter))
    assert torch.allclose(logits(adapted), logits(tuned), atol=1e-5)
    assert any(".experts." in name for name in changed(run))
    assert sound_merge(run)


def test_files_say_whether_the_output_layer_is_tied(make_run: MakeRun) -> None:
    """Mistral Small's config.json does not, and its class ties by default."""
    config = tiny_image_text.config_of("mistral3", vocab_size=VOCABULARY)
    run = make_run(model=config, settings=SETTINGS | {"training.method": "full"})
    file = run.paths.base_model / "config.json"
    described = json.loads(file.read_text())
    for values in (described, described["text_config"]):
        values.pop("tie_word_embeddings", None)
    file.write_text(json.dumps(described))
    train_here(run)
    consolidate.work(run)
    assert {"language_model.lm_head.weight", "language_model.model.embed_tokens.weight"} <= changed(run)


def test_a_tied_output_layer_with_an_adapter_is_untied(make_run: MakeRun) -> None:
    config = tiny_image_text.config_of("gemma3", vocab_size=VOCABULARY)
    run = make_run(model=config, settings=SETTINGS | {"lora.target_modules": ["q_proj", "lm_head"]})
    train_here(run)
    consolidate.work(run)
    merge.work(run)
    base, tuned = (pretrained.load(path, "auto") for path in (run.paths.base_model, run.paths.tuned_model))
    adapted = PeftModel.from_pretrained(base, str(run.paths.adapter))
    assert torch.allclose(logits(adapted), logits(tuned), atol=1e-5)
    assert tuned.config.text_config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("model_type", "parallelism"),
    [
        ("mistral3", {"ranks_per_node": 2, "tensor_parallel": 2}),
        ("qwen3_5_moe", {"ranks_per_node": 2, "sharding": "zero3"}),
    ],
)
def test_ranks_that_divide_it(
    make_run: MakeRun, jobs: Jobs, model_type: str, parallelism: dict[str, int | str]
) -> None:
    """Losses, and what is written, are those of one rank."""
    config = tiny_image_text.config_of(model_type, vocab_size=VOCABULARY)
    settings = SETTINGS | {"training.method": "full", "training.micro_batch_size": 1}
    alone = make_run("alone", settings=settings | {"training.gradient_accumulation_steps": 2}, model=config)
    rows = 2 if "tensor_parallel" in parallelism else 1
    settings |= {"training.gradient_accumulation_steps": rows, "parallelism": parallelism}
    divided = make_run("divided", settings=settings, model=config)
    train_here(alone)
    jobs.train(divided)
    for run in (alone, divided):
        consolidate.work(run)
    one, other = (load_file(run.paths.tuned_model / FILE) for run in (alone, divided))
    assert losses(divided) == pytest.approx(losses(alone), rel=1e-5)
    assert one.keys() == other.keys()
    # Adam's first steps make a rounding of a gradient near zero a whole step
    assert all((tensor - other[name]).abs().mean() < 1e-5 for name, tensor in one.items())
