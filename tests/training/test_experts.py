"""Mixtures of experts: the tuned model's files are arranged as the base model's are, and its adapter is PEFT's."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG, PREFIX, WEIGHTS
from hyperpod_ft.checkpoint.verify import forms
from hyperpod_ft.checkpoint.verify.verify import Verification, verify
from hyperpod_ft.download import adapter, fetch
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.engines.torch.lora.adapters import adapt
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, merge
from tests.tasks import task_of
from tests.training.conftest import VOCABULARY, Jobs, MakeRun, curve, train_here
from tests.unit.tiny_families import FILE, MIXTURES, SIZES

pytestmark = pytest.mark.training

CORRECTION = "e_score_correction_bias"  # transformers itself freezes it, or has it as a buffer
# types, and the layer whose copy, under another name, is such a one
PREDICTORS = [
    ("glm4_moe", "model.layers.1.", "model.layers.2."),
    ("qwen3_next", "model.layers.1.", "mtp.layers.0."),
]
ADAPTED: dict[str, Any] = {"training.method": "lora", "lora.plus_ratio": 4}
EXPERTS = {"lora.target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
IDS = torch.arange(40).reshape(2, 20) * 7 % VOCABULARY
SETTINGS = {"training.method": "full", "training.learning_rate": 1e-4, "training.save_every_steps": 2}


def config_of(model_type: str) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **SIZES | MIXTURES[model_type] | {"vocab_size": VOCABULARY})


def with_tensors_that_are_not_trained(model: Path) -> None:
    """Give the routers' corrections values of their own, and the file a tensor that the class does not have."""
    tensors = load_file(model / FILE)
    kept = {name: torch.rand_like(tensor) for name, tensor in tensors.items() if CORRECTION in name}
    save_file(tensors | kept | {"mtp.fc.weight": torch.rand(3, 5)}, model / FILE, {"format": "pt"})


def assert_tuned(run: Run) -> None:
    """Every parameter has changed a little, as training changes it: it is not another one of the same shape."""
    directories = run.paths.base_model, run.paths.tuned_model
    in_base, in_tuned = (load_file(directory / FILE) for directory in directories)
    described = [{name: (value.dtype, value.shape) for name, value in one.items()} for one in (in_base, in_tuned)]
    assert described[0] == described[1]
    left = [name for name in in_base if name.startswith("mtp.") or CORRECTION in name]
    assert all(torch.equal(in_tuned[name], in_base[name]) for name in left)
    models = [AutoModelForCausalLM.from_pretrained(directory) for directory in directories]
    base, tuned = (dict(model.named_parameters()) for model in models)
    for name, tensor in ((name, tuned[name]) for name in tuned if CORRECTION not in name):
        change = (tensor - base[name]).abs().flatten(1 if ".experts." in name and tensor.ndim == 3 else 0)
        # of each expert
        assert change.amax(-1).min() > 0 and change.max() < 1e-3, name


@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_is_trained_and_consolidated(make_run: MakeRun, model_type: str) -> None:
    run = make_run(model=config_of(model_type), settings=SETTINGS)
    with_tensors_that_are_not_trained(run.paths.base_model)
    train_here(run)
    consolidate.work(run)
    assert_tuned(run)


@pytest.mark.parametrize(("model_type", "copied", "copy"), PREDICTORS)
def test_layers_that_predict_several_tokens_stay_as_they_are(
    make_run: MakeRun, model_type: str, copied: str, copy: str
) -> None:
    """transformers' classes do not have them: they have no adapters, though their modules have targets' names."""
    run = make_run(model=config_of(model_type), settings=ADAPTED | EXPERTS)
    tensors = load_file(run.paths.base_model / FILE)
    extra = {name.replace(copied, copy): value.clone() for name, value in tensors.items() if name.startswith(copied)}
    save_file(tensors | extra, run.paths.base_model / FILE, {"format": "pt"})
    train_here(run)
    consolidate.work(run)
    merge.work(run)
    merged = load_file(run.paths.tuned_model / FILE)
    assert merged.keys() == tensors.keys() | extra.keys()
    changed = {name for name, value in merged.items() if not torch.equal(value, (tensors | extra)[name])}
    assert changed and not changed & extra.keys()
    assert compared(run).findings == ()


@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_experts_divided_over_ranks_are_consolidated(make_run: MakeRun, jobs: Jobs, sharding: str) -> None:
    divided: dict[str, Any] = {"parallelism": {"ranks_per_node": 2, "sharding": sharding}}
    run = make_run(model=config_of("qwen3_moe"), settings=SETTINGS | divided)
    jobs.train(run)
    consolidate.work(run)
    assert_tuned(run)
    held = run.paths.checkpoint(4) / "held.json"
    held.write_text(held.read_text().replace("experts.0.", "experts.9.").replace("experts.1.", "experts.0."))
    with pytest.raises(UserError, match=r"held\.json: is damaged"):
        consolidate.work(run)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_an_adapter_of_experts_is_continued(make_run: MakeRun, model_type: str) -> None:
    """Linear layers beside experts, which it names by their weights, too."""
    config = config_of(model_type)
    first = make_run("first", model=config, settings=ADAPTED | EXPERTS | {"training.learning_rate": 1e-3})
    train_here(first)
    consolidate.work(first)
    given = {"model.adapter": {"source": str(first.paths.adapter)}, "lora": {}, "training.learning_rate": 1e-9}
    run = make_run(model=config, settings={"training.method": "lora"} | given)
    fetch.ensure(adapter.wanted(run)[0])
    adapter.check(run)
    train_here(run)
    consolidate.work(run)
    before, after = (json.loads((each.paths.adapter / CONFIG).read_text()) for each in (first, run))
    assert after == before | {"base_model_name_or_path": after["base_model_name_or_path"]} | {
        "revision": after["revision"]
    }
    start, end = (load_file(each.paths.adapter / WEIGHTS) for each in (first, run))
    assert start.keys() == end.keys()
    assert all(torch.allclose(end[name], value, atol=1e-7) for name, value in start.items())


def loaded(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IDS).logits
        return result


def with_peft(run: Run) -> torch.nn.Module:
    """The base with its adapter, as PEFT loads it without complaint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected)")
        return PeftModel.from_pretrained(loaded(run.paths.base_model), run.paths.adapter)


def as_trained(run: Run) -> torch.nn.Module:
    """The base with its adapter, as the engine computes it."""
    model = loaded(run.paths.base_model)
    adapt(model, run.config.lora, seed=1)
    factors = load_file(run.paths.adapter / "adapter_model.safetensors")
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert {PREFIX + name for name in trained} == factors.keys()
    for name, value in trained.items():
        value.data.copy_(factors[PREFIX + name])
    return model


def compared(run: Run) -> Verification:
    paths = run.paths
    return verify(paths.tuned_model, adapter=paths.adapter, base=paths.base_model, logits=True)


def assert_wrong_experts_are_found(run: Run, of_experts: list[str]) -> None:
    """Of the tuned model: one that was not merged, and two that were exchanged."""
    base, right = (load_file(directory / FILE) for directory in (run.paths.base_model, run.paths.tuned_model))
    name = of_experts[-1]
    exchanged = {name: right[name].roll(1, 0)}
    if right[name].ndim == 2:
        other = next(other for other in of_experts if other != name and right[other].shape == right[name].shape)
        exchanged = {name: right[other].clone(), other: right[name].clone()}
    for wrong in ({name: base[name]}, exchanged):
        save_file(right | wrong, run.paths.tuned_model / FILE, {"format": "pt"})
        found = " ".join(compared(run).findings)
        assert all(forms.key(each).removesuffix(".weight") in found for each in wrong), found


@pytest.mark.parametrize(
    ("model_type", "experts"),
    [*((model_type, True) for model_type in MIXTURES), ("qwen2_moe", False), ("deepseek_v3", False)],
)
def test_an_adapter_of_a_mixture_is_peft_s_and_is_merged(make_run: MakeRun, model_type: str, experts: bool) -> None:
    run = make_run(model=config_of(model_type), settings=ADAPTED | (EXPERTS if experts else {}))
    with_tensors_that_are_not_trained(run.paths.base_model)
    record = train_here(run)
    consolidate.work(run)
    merged = merge.work(run)
    in_base, in_tuned = (load_file(directory / FILE) for directory in (run.paths.base_model, run.paths.tuned_model))
    assert in_base.keys() == in_tuned.keys()
    changed = {name for name, value in in_tuned.items() if not torch.equal(value, in_base[name])}
    assert {name for name in changed if "o_proj" in name}, "attention"
    shared = {name for name in in_base if "shared_expert" in name and "_proj" in name}
    assert shared <= changed
    kinds = ".experts.", "_linear.weight"
    of_experts = {name for name in in_base if any(kind in name for kind in kinds) and "bias" not in name}
    assert of_experts
    # corrections of routers may leave some experts without tokens
    assert len(changed & of_experts) >= len(of_experts) / 2 if experts else not changed & of_experts
    assert merged.facts["merged"] == len(changed) and merged.facts["lost_in_rounding"] == 0
    assert not {name for name in changed if ".gate.weight" in name or "router" in name or "norm" in name}
    trained = logits(as_trained(run))
    assert (trained - logits(loaded(run.paths.base_model))).abs().max() > 1e-3
    for other in (with_peft(run), loaded(run.paths.tuned_model)):
        torch.testing.assert_close(logits(other), trained, atol=3e-6, rtol=0)
    factors = load_file(run.paths.adapter / "adapter_model.safetensors")
    assert record.facts["trainable_parameters"] == sum(value.numel() for value in factors.values())
    assert verify(run.paths.adapter).findings == ()
    assert compared(run).findings == ()
    if experts:
        assert_wrong_experts_are_found(run, sorted(changed & of_experts))


@pytest.mark.parametrize(("kind", "precision"), [("qwen3_moe", "bf16"), ("gpt_oss", "fp32")])
def test_what_layers_keep_changes_no_step_of_experts(make_run: MakeRun, kind: str, precision: str) -> None:
    common = ADAPTED | EXPERTS | {"training.max_steps": 2, "training.precision": precision}
    modes: dict[str, dict[str, Any]] = {
        "plain": {},
        "recomputed": {"training.activation_checkpointing": "full", "training.activation_checkpointing_every": 2},
        "selective": {"training.activation_checkpointing": "selective"},
        "offloaded": {"training.activation_offload": True},
    }
    curves = []
    for name, mode in modes.items():
        run = make_run(name, model=config_of(kind), settings=common | mode)
        train_here(run)
        curves.append(torch.tensor(curve(run)))
    assert all(torch.equal(other, curves[0]) for other in curves)


@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_adapters_of_experts_divided_over_ranks(make_run: MakeRun, jobs: Jobs, sharding: str) -> None:
    common = ADAPTED | EXPERTS | {"training.save_every_steps": 2}
    alone = make_run("alone", model=config_of("gpt_oss"), settings=common)
    train_here(alone)
    divided = {"parallelism": {"ranks_per_node": 2, "sharding": sharding}, "training.micro_batch_size": 1}
    run = make_run("divided", model=config_of("gpt_oss"), settings=common | divided)
    jobs.train(run)
    expected = curve(run)
    torch.testing.assert_close(torch.tensor(expected), torch.tensor(curve(alone)), rtol=1e-4, atol=0)
    run.paths.record_path("train").unlink()
    (run.paths.checkpoints / "step-00000004" / "checkpoint.json").unlink()
    jobs.train(run)
    assert curve(run) == expected, "resumed"
    for each in (run, alone):
        consolidate.work(each)
    one, other = (load_file(each.paths.adapter / "adapter_model.safetensors") for each in (run, alone))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-3, msg=name)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_utilization_counts_the_experts_that_a_token_passes_through(make_run: MakeRun, method: str) -> None:
    settings = EXPERTS | {"lora.target_modules": [], "lora.r": 2} if method == "lora" else {}
    run = make_run(model=config_of("qwen3_moe"), settings={"training.method": method} | settings)
    model = AutoModelForCausalLM.from_pretrained(run.paths.base_model)
    used = {
        name: parameter.numel() // (2 if ".experts." in name else 1) for name, parameter in model.named_parameters()
    }
    multiplied = sum(used.values()) - used["model.embed_tokens.weight"]
    # two layers of four experts, of which two are used: 32 to 2 x 16, and 16 to 32
    adapters = 2 * 4 * 2 * (32 + 32 + 16 + 32)
    attention = 12 * 2 * 4 * 8 * 32
    found = throughput(task_of(run), 2, 32, adapters if method == "lora" else sum(used.values())).flops_per_token
    assert found == (6 * multiplied if method == "full" else 4 * multiplied + 6 * adapters // 2) + attention
