"""model.adapter: training starts from what PEFT loads, and then behaves like any other training."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from hyperpod_ft.config import run_file
from hyperpod_ft.download import adapter, fetch
from hyperpod_ft.engines.batches import DataOrder
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.torch.loop import training_loop
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate, download, stage
from tests.tasks import task_of
from tests.training.conftest import Jobs, MakeRun, curve, kit, metrics, process_group_of_its_own, train_here
from tests.training.every_stage import perform
from tests.training.test_layouts import causal_loss, engine_name

pytestmark = pytest.mark.training

PROJECTIONS = ["q_proj", "v_proj", "up_proj"]
ENDS = ["o_proj", "embed_tokens", "lm_head"]


def saved_by_peft(base: Path, directory: Path, **changes: Any) -> Path:
    """An adapter with random factors."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**settings | changes))
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data = torch.randn_like(parameter) * 0.05
    adapted.save_pretrained(directory)
    return directory


def continuing(
    make_run: MakeRun,
    tmp_path: Path,
    lora: Mapping[str, Any] = {},
    settings: Mapping[str, Any] = {},
    model: PretrainedConfig | None = None,
    **changes: Any,
) -> Run:
    base = make_run("base", model=model).paths.base_model
    given = saved_by_peft(base, tmp_path / "given", **changes)
    values = {"model.adapter": {"source": str(given)}, "lora": dict(lora), **settings}
    run = make_run(settings=values, model=model)
    fetch.ensure(adapter.wanted(run)[0])
    adapter.check(run)
    return run


def loss_in_peft(run: Run, directory: Path) -> float:
    """Of the rows of step 1."""
    base = AutoModelForCausalLM.from_pretrained(run.paths.base_model, attn_implementation="eager", dtype=torch.float32)
    arrays = {file.stem: np.load(file).astype(np.int64) for file in (run.paths.dataset_path / "train").glob("*.npy")}
    rows = DataOrder(len(arrays["labels"]), run.config.seed, 2, 1, 1).step(1)
    batch = {name: torch.from_numpy(array[rows]) for name, array in arrays.items()}
    with torch.no_grad():
        return float(causal_loss(PeftModel.from_pretrained(base, directory), batch))


@pytest.mark.parametrize(
    ("changes", "lora"),
    [
        ({}, {}),
        ({"use_dora": True, "use_rslora": True}, {"r": 4, "alpha": 12, "dora": True}),
        ({"target_modules": ENDS}, {"target_modules": [*reversed(ENDS)]}),
        ({}, {"quantization": "nf4", "plus_ratio": 4}),
    ],
    ids=["plain", "variants", "embeddings", "nf4"],
)
def test_training_begins_with_the_adapter(
    make_run: MakeRun, tmp_path: Path, changes: dict[str, Any], lora: dict[str, Any]
) -> None:
    run = continuing(make_run, tmp_path, lora, **changes)
    stored = load_file(tmp_path / "given" / "adapter_model.safetensors")
    wanted = {engine_name(name): value for name, value in stored.items() if ".base_layer." not in name}
    with (
        process_group_of_its_own(),
        training_loop(task_of(run), Ranks(0, 1, 0, torch.distributed.HashStore())) as loop,
    ):
        found = {name: p.detach().clone() for name, p in loop.model.module.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    facts = train_here(run).facts
    if "quantization" not in lora:
        assert facts["first_loss"] == pytest.approx(loss_in_peft(run, tmp_path / "given"), abs=2e-5)
    consolidate.work(run)
    described = json.loads((run.paths.adapter / "adapter_config.json").read_text())
    given = json.loads((tmp_path / "given" / "adapter_config.json").read_text())
    same = ("r", "lora_alpha", "use_dora", "use_rslora")
    assert [described[key] for key in same] == [given[key] for key in same]
    assert described["target_modules"] == sorted(given["target_modules"])


def test_an_interruption_changes_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    run = continuing(make_run, tmp_path, {"dropout": 0.1}, {"training.save_every_steps": 2})
    train_here(run)
    whole = curve(run)
    run.paths.record_path("train").unlink()
    (run.paths.checkpoints / "step-00000004" / "checkpoint.json").unlink()
    assert train_here(run).facts["resumed_from"] == [2] and curve(run) == whole


def test_ranks_divide_what_one_has(make_run: MakeRun, tmp_path: Path, jobs: Jobs) -> None:
    pairs = []
    for data_parallel, layouts in (
        (2, [{"sharding": "zero3"}, {"sharding": "zero2"}]),
        (1, [{"tensor_parallel": 2}, {"pipeline_parallel": 2}]),
    ):
        accumulation = {"training.gradient_accumulation_steps": 2 * data_parallel}
        one = continuing(make_run, tmp_path, {}, accumulation, use_dora=True)
        train_here(one)
        shared = {"model.adapter": {"source": str(tmp_path / "given")}, "lora": {}}
        shared["training.gradient_accumulation_steps"] = 2
        for layout in layouts:
            pairs.append((one, make_run(settings=shared | {"parallelism": {"ranks_per_node": 2, **layout}})))
    job = jobs.start(2, ["compiled_worker", *(str(two.paths.directory) for _, two in pairs)])
    assert job.wait() == 0, job.text()
    for pair in pairs:
        one, two = ([row["loss"] for row in metrics(run)] for run in pair)
        assert two == pytest.approx(one, rel=2e-5), pair[1].config


def test_every_stage(tmp_path: Path) -> None:
    """A second run continues the adapter of a first one, to its merged model; PEFT agrees with it.

    The output layer is trained whole.
    """
    changes = [f"cluster.root={tmp_path / 'root'}", "cluster.nodes=1", "parallelism.tensor_parallel=1"]
    changes += ["parallelism.ranks_per_node=1", "training.max_steps=3", "generate.train_samples=1"]
    changes += ["generate.validation_samples=1", "generate.max_new_tokens=4"]
    recipe = run_file.find("quickstart")
    first = perform(Run.of(run_file.load(recipe, [*changes, "lora.modules_to_save=[lm_head]"])))
    kit("verify", str(first.paths.directory))
    second = [*changes, f"model.adapter.source={first.paths.adapter}", "training.learning_rate=2.0e-3"]
    planned = kit("plan", "quickstart", *(part for change in second for part in ("--set", change)))
    lora = first.config.lora
    assert re.search(
        rf"^adapter +continues .*/adapter, r {lora.r}, alpha {lora.alpha:g}: .*q_proj", planned, re.MULTILINE
    )
    run = perform(Run.of(run_file.load(recipe, second)))
    assert run.config.lora.r == first.config.lora.r and run.config.lora.target_modules
    facts = [each.journal.record("train").facts for each in (first, run)]  # type: ignore[union-attr]
    assert facts[1]["first_loss"] < facts[0]["first_loss"], "it begins where the first one has ended"
    base = AutoModelForCausalLM.from_pretrained(run.paths.base_model, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(run.paths.tuned_model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(run.paths.base_model)("The sky is", return_tensors="pt").input_ids
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, run.paths.adapter)(ids).logits
        # merged weights are rounded to bf16
        assert (adapted - merged(ids).logits).abs().max() < 0.05 * (adapted - before).abs().max()
    card = (run.paths.tuned_model / "README.md").read_text(encoding="utf-8")
    assert f"| adapter continued | {first.paths.adapter} @ local-" in card
    assert "lm_head trained whole" in card
    assert Run.open(run.paths.directory) == run
    kit("verify", str(run.paths.directory))


def test_preferences_are_learned_from_the_adapter(tmp_path: Path) -> None:
    """The reference is what training begins with: at first, no answer is preferred more than by it."""
    root = [f"cluster.root={tmp_path / 'root'}", "cluster.nodes=1", "parallelism.tensor_parallel=1"]
    root += ["parallelism.ranks_per_node=1", "training.max_steps=2"]
    run = Run.of(run_file.load(run_file.find("quickstart-dpo"), root))
    stage.perform(run, "download", download.work)
    given = saved_by_peft(run.paths.base_model, tmp_path / "given")
    run = Run.of(run_file.load(run_file.find("quickstart-dpo"), [*root, f"model.adapter.source={given}"]))
    perform(run)
    facts = run.journal.record("train").facts  # type: ignore[union-attr]
    assert facts["final_loss"] < facts["first_loss"] == pytest.approx(0.6931, abs=1e-4)
