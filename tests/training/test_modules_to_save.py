"""lora.modules_to_save: embedding and output layer trained whole beside the adapters, as PEFT does.

All stages: test_continued_adapters.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hyperpod_ft.download import adapter, fetch
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.model_fit import check_trainable
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.planning.stage_sizes import pipeline_stage_sizes
from hyperpod_ft.planning.torch.step_memory import memory_of
from hyperpod_ft.planning.undivided.mixture import mixture_shape
from hyperpod_ft.stages import certify, consolidate, merge
from tests.tasks import task_of
from tests.training.conftest import Jobs, MakeRun, curve, metrics, tiny_llama, train_here
from tests.unit.tiny_families import MIXTURES, SIZES

pytestmark = pytest.mark.training

ENDS = ["embed_tokens", "lm_head"]
LORA = {"r": 4, "alpha": 8, "modules_to_save": ENDS}
FILES = ("base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 67)[None]).logits
    return found


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("whole", [ENDS, ["lm_head"]], ids=str)
def test_peft_and_the_merged_model_have_what_was_trained(make_run: MakeRun, whole: list[str]) -> None:
    run = make_run(settings={"lora": LORA | {"modules_to_save": whole}})
    facts = train_here(run).facts
    assert facts["trainable_parameters"] == 7424 + len(whole) * 128 * 64
    assert facts["total_parameters"] - 7424 == sum(p.numel() for p in loaded(run.paths.base_model).parameters())
    consolidate.work(run)
    merge.work(run)
    described = json.loads((run.paths.adapter / "adapter_config.json").read_text())
    assert described["modules_to_save"] == sorted(whole)
    stored = load_file(run.paths.adapter / "adapter_model.safetensors")
    assert [name for name in sorted(stored) if ".lora_" not in name] == sorted(FILES)[: len(whole)]
    adapted = PeftModel.from_pretrained(loaded(run.paths.base_model), run.paths.adapter)
    names = dict(adapted.named_parameters())
    assert torch.equal(names["base_model.model.lm_head.modules_to_save.default.weight"], stored[FILES[0]])
    merged = loaded(run.paths.tuned_model)
    assert torch.equal(merged.lm_head.weight, stored[FILES[0]])
    assert not torch.equal(merged.lm_head.weight, loaded(run.paths.base_model).lm_head.weight)
    torch.testing.assert_close(logits(adapted), logits(merged), atol=2e-6, rtol=1e-5)
    assert (logits(merged) - logits(loaded(run.paths.base_model))).abs().max() > 1e-2


@pytest.mark.parametrize("changes", [{}, {"training.precision": "bf16"}], ids=str)
def test_an_interruption_changes_nothing(make_run: MakeRun, changes: dict[str, Any]) -> None:
    run = make_run(settings={"training.save_every_steps": 2, "lora": LORA | {"dropout": 0.1}, **changes})
    train_here(run)
    whole = curve(run)
    run.paths.record_path("train").unlink()
    (run.paths.checkpoints / "step-00000004" / "checkpoint.json").unlink()
    assert train_here(run).facts["resumed_from"] == [2] and curve(run) == whole


def test_ranks_divide_what_one_has(make_run: MakeRun, jobs: Jobs) -> None:
    pairs = []
    for precision, data_parallel, layouts in (
        ("fp32", 2, [{"sharding": "zero1"}, {"sharding": "zero3"}]),
        ("bf16", 2, [{"sharding": "zero1"}, {"sharding": "zero2"}, {"sharding": "zero3"}]),
        ("fp32", 1, [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}]),
    ):
        shared = {"lora": LORA, "training.precision": precision, "training.learning_rate": 1e-3}
        one = make_run(settings=shared | {"training.gradient_accumulation_steps": 2 * data_parallel})
        train_here(one)
        shared["training.gradient_accumulation_steps"] = 2
        for layout in layouts:
            pairs.append((one, make_run(settings=shared | {"parallelism": {"ranks_per_node": 2, **layout}})))
    job = jobs.start(2, ["compiled_worker", *(str(two.paths.directory) for _, two in pairs)])
    assert job.wait() == 0, job.text()
    for one, two in pairs:
        close = 2e-5 if one.config.training.precision == "fp32" else 1e-3
        for key in ("loss", "grad_norm"):
            found, expected = ([row[key] for row in metrics(run)] for run in (two, one))
            assert found == pytest.approx(expected, rel=close * (1 if key == "loss" else 20)), (key, two.config)


def test_an_adapter_with_whole_modules_is_continued(make_run: MakeRun, tmp_path: Path) -> None:
    base = loaded(make_run("base").paths.base_model)
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=ENDS, task_type="CAUSAL_LM")
    saved = get_peft_model(base, settings)
    for parameter in saved.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.02
    saved.save_pretrained(tmp_path / "given")
    values = {"model.adapter": {"source": str(tmp_path / "given")}, "lora": {}, "training.learning_rate": 1e-9}
    run = make_run(settings=values)
    assert run.config.lora.modules_to_save == tuple(ENDS)
    fetch.ensure(adapter.wanted(run)[0])
    adapter.check(run)
    train_here(run)
    consolidate.work(run)
    given, after = (
        load_file(directory / "adapter_model.safetensors") for directory in (tmp_path / "given", run.paths.adapter)
    )
    assert given.keys() == after.keys()
    for name, value in given.items():
        torch.testing.assert_close(after[name], value, atol=1e-7, rtol=0)


def test_a_tied_output_layer_is_refused_before_training(make_run: MakeRun) -> None:
    tied = tiny_llama(tie_word_embeddings=True)
    run = make_run(model=tied, settings={"lora": LORA})
    for ask in (certify.work, train_here):
        with pytest.raises(UserError, match=r"^lora\.modules_to_save: .* one matrix"):
            ask(run)


@pytest.mark.parametrize("name", ["q_proj", "norm", "no_such"])
def test_other_modules_are_refused_before_training(make_run: MakeRun, name: str) -> None:
    run = make_run(settings={"lora": LORA | {"target_modules": ["v_proj"], "modules_to_save": [name]}})
    for ask in (certify.work, train_here):
        with pytest.raises(UserError, match=rf"^lora\.modules_to_save: '{name}' .*: embed_tokens, lm_head"):
            ask(run)


def test_the_plan_counts_them(make_run: MakeRun) -> None:
    run = make_run(settings={"lora": LORA})
    alone = make_run(settings={"lora": LORA | {"modules_to_save": []}})
    assert run.plan.run_id != alone.plan.run_id
    shape = model_shape(tiny_llama().to_dict())
    assert shape is not None
    sizes = [next(pipeline_stage_sizes(each.config, each.plan.degrees, shape, [2], [1.0])) for each in (run, alone)]
    assert sizes[0].trainable - sizes[1].trainable == 2 * 128 * 64
    assert (sizes[0].whole_ends, sizes[1].whole_ends) == (2 * 128 * 64, 0)
    assert sizes[0].trainable == train_here(run).facts["trainable_parameters"]


@pytest.mark.parametrize("whole", [ENDS, ["lm_head"]], ids=str)
def test_the_plan_counts_those_of_a_mixture(make_run: MakeRun, whole: list[str]) -> None:
    model = AutoConfig.for_model("qwen3_moe", **SIZES | MIXTURES["qwen3_moe"] | {"vocab_size": 128})
    run = make_run(model=model, settings={"lora": LORA | {"modules_to_save": whole}})
    shape = mixture_shape(json.loads(model.to_json_string()))
    assert shape is not None
    (stage,) = memory_of(run.config, run.plan.degrees, shape).stages
    assert stage.whole_ends == len(whole) * shape.vocabulary * shape.hidden
    assert stage.trainable == train_here(run).facts["trainable_parameters"]


@pytest.mark.parametrize(
    ("changes", "names", "refusal"),
    [({}, ["no_such"], "'no_such' is neither"), ({"tie_word_embeddings": True}, ENDS, "one matrix")],
    ids=str,
)
def test_the_plan_of_a_mixture_refuses_others(
    make_run: MakeRun, changes: dict[str, Any], names: list[str], refusal: str
) -> None:
    values = json.loads(AutoConfig.for_model("qwen3_moe", **SIZES | MIXTURES["qwen3_moe"] | changes).to_json_string())
    run = make_run(settings={"lora": LORA | {"modules_to_save": names}})
    with pytest.raises(UserError, match=rf"^lora\.modules_to_save: .*{refusal}"):
        check_trainable(run.config, run.plan.degrees, values)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_utilization_counts_the_output_layer_once_and_no_embedding(make_run: MakeRun, family: str) -> None:
    model = tiny_llama() if family == "llama" else AutoConfig.for_model(family, **SIZES | MIXTURES[family])
    vocabulary, hidden = model.vocab_size, model.hidden_size
    alone, ends, head = (
        throughput(task_of(make_run(model=model, settings={"lora": settings})), 2, 32, adapters + more).flops_per_token
        for adapters in [7424]
        for settings, more in (
            (LORA | {"modules_to_save": []}, 0),
            (LORA, 2 * vocabulary * hidden),
            (LORA | {"modules_to_save": ["lm_head"]}, vocabulary * hidden),
        )
    )
    assert alone is not None
    # the gradient of the matrix itself
    assert ends == head == alone + 2 * vocabulary * hidden
