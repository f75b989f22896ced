"""Training in one process: checkpoints kept and refused, precision, what stops a run, packed rows."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoConfig

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.engines import checkpoint_directory
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.records import outputs_of
from hyperpod_ft.runs.results import usage
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import consolidate
from tests.tasks import task_of
from tests.training.conftest import MakeRun, TrainProgram, curve, metrics, tiny_llama, train_here
from tests.unit.tiny_families import SIZES, as_published

pytestmark = pytest.mark.training


def steps_on_disk(run: Run) -> list[str]:
    return sorted(path.name for path in run.paths.checkpoints.iterdir())


def test_record_metrics_and_retention(make_run: MakeRun) -> None:
    settings = {"training.max_steps": 7, "training.save_every_steps": 2, "training.log_every_steps": 3}
    run = make_run(settings=settings)
    record = train_here(run)
    assert steps_on_disk(run) == ["step-00000006", "step-00000007"]
    assert [row["step"] for row in metrics(run)] == [1, 3, 6, 7]
    facts = record.facts
    assert facts["steps"] == 7 and facts["tokens"] == 7 * 2 * 32 and facts["resumed_from"] == []
    assert facts["epochs"] == pytest.approx(14 / 24, abs=1e-4)
    assert facts["first_loss"] == metrics(run)[0]["loss"] and facts["final_loss"] == metrics(run)[-1]["loss"]
    assert {facts["world_size"], facts["data_parallel"], facts["tensor_parallel"]} == {1}
    assert facts["rows"] == 7 * 2 and facts["mfu"] is None, "the peak of these CPUs is unknown"
    for row in metrics(run):
        assert row["rows_per_second"] == pytest.approx(2 / row["seconds_per_step"], rel=0.02)
        assert row["tokens_per_second"] == pytest.approx(row["rows_per_second"] * 32, rel=1e-3)
        assert row["documents_per_second"] == pytest.approx(row["rows_per_second"] * 3, rel=1e-3)
        assert row["mfu"] is None
    assert facts["rows_per_second"] == pytest.approx(14 / facts["seconds"], rel=0.01)
    assert facts["documents_per_second"] == pytest.approx(3 * facts["rows_per_second"], rel=1e-3)
    assert facts["seconds_per_step"] == sorted(row["seconds_per_step"] for row in metrics(run)[1:])[1]
    assert 0 <= facts["warm_up_seconds"] <= facts["seconds"]
    # r 4: q, o 64+64; k, v 64+32; gate, up, down 64+96; two layers
    assert facts["trainable_parameters"] == 2 * 4 * (2 * 128 + 2 * 96 + 3 * 160)
    written = {Path(output.path).name for output in record.outputs}
    assert written == {"checkpoint.json", ".metadata", "__0_0.distcp", "metrics.jsonl"}
    final = json.loads((run.paths.checkpoints / "step-00000007" / "checkpoint.json").read_text())
    assert final["lora"]["r"] == 4 and final["method"] == "lora" and final["degrees"]["tensor_parallel"] == 1


def elements(directory: Path) -> int:
    return sum(tensor.elements for tensor in read_model(directory))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_utilization_counts_the_parameters_that_train(make_run: MakeRun, method: str, tied: bool) -> None:
    settings = {"training.max_steps": 1, "training.method": method}
    run = make_run(settings=settings, model=tiny_llama(tie_word_embeddings=tied))
    facts = train_here(run).facts
    assert elements(run.paths.base_model) == facts["total_parameters"] - (method == "lora") * 7424
    # a layer: q, o 64 x 64; k, v 64 x 32; gate, up, down 64 x 96; two norms. Last norm, output matrix 128 x 64.
    multiplied = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64 + 128 * 64
    adapters = 6 * 7424 if method == "lora" else 0
    attention = 12 * 2 * 8 * 8 * 32
    operations = throughput(task_of(run), 2, 32, facts["trainable_parameters"]).flops_per_token
    assert operations == (4 if method == "lora" else 6) * multiplied + adapters + attention


def test_damaged_and_foreign_checkpoints_are_passed_over(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"training.max_steps": 10, "training.save_every_steps": 2, "training.keep_checkpoints": 5}
    settings |= {"lora": {"r": 4, "alpha": 8, "dropout": 0.1}}
    run = make_run(settings=settings)
    train_here(run)
    whole = curve(run)
    run.paths.record_path("train").unlink()
    flipped = run.paths.checkpoints / "step-00000010" / "__0_0.distcp"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    cut = run.paths.checkpoints / "step-00000008" / "__0_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-100])
    (run.paths.checkpoints / "step-00000006" / "checkpoint.json").unlink()
    foreign = run.paths.checkpoints / "step-00000004" / "checkpoint.json"
    publish.write_json(foreign, json.loads(foreign.read_text()) | {"fingerprint": "other"})
    (run.paths.checkpoints / ".step-00000008.partial").mkdir()
    with run.paths.metrics_path.open("a") as stream:
        stream.write('{"step": 11, "loss": }\n[{}]\n{"step": null}\n{"loss": 1}\n{"step": 11, "los')
    capsys.readouterr()

    record = train_here(run)

    said = capsys.readouterr().out
    assert "step-00000010: __0_0.distcp is damaged" in said
    assert "ignoring checkpoint step-00000008: __0_0.distcp has" in said
    assert "ignoring checkpoint step-00000006: checkpoint.json is missing" in said
    assert "ignoring checkpoint step-00000004: another configuration wrote it" in said
    assert "from step 2\n" in said
    assert record.facts["resumed_from"] == [2]
    assert curve(run) == whole
    assert steps_on_disk(run) == [f"step-{step:08d}" for step in (2, 4, 6, 8, 10)]


@pytest.mark.parametrize(
    "variant", [{"dora": True, "dropout": 0.1}, {"plus_ratio": 4}, {"quantization": "nf4"}], ids=str
)
def test_an_interruption_changes_no_step(make_run: MakeRun, variant: dict[str, object]) -> None:
    run = make_run(settings={"training.save_every_steps": 2, "lora": {"r": 4, "alpha": 8} | variant})
    facts = train_here(run).facts
    whole = curve(run)
    assert facts["total_parameters"] - facts["trainable_parameters"] == elements(run.paths.base_model)
    assert facts["final_loss"] < facts["first_loss"]
    run.paths.record_path("train").unlink()
    (run.paths.checkpoints / "step-00000004" / "checkpoint.json").unlink()
    assert train_here(run).facts["resumed_from"] == [2] and curve(run) == whole


def test_killed_between_last_save_and_record(make_run: MakeRun) -> None:
    run = make_run()
    first = train_here(run)
    before = run.paths.metrics_path.read_bytes()
    run.paths.record_path("train").unlink()
    again = train_here(run)
    assert again.facts == first.facts and again.outputs == first.outputs
    assert run.paths.metrics_path.read_bytes() == before


@pytest.mark.parametrize("damage", ["", "{", '{"format": 1}', "[]", '{"format": 9}'])
def test_a_damaged_description_is_no_crash(tmp_path: Path, damage: str) -> None:
    (tmp_path / "checkpoint.json").write_text(damage)
    assert checkpoint_directory.why_unusable(tmp_path, "any")


def test_rows_that_stage_dataset_did_not_write_are_refused(make_run: MakeRun, train_program: TrainProgram) -> None:
    run = make_run(settings={"training.max_steps": 1})
    recorded = run.journal.record("dataset")
    assert recorded is not None
    replace(recorded, outputs=outputs_of(run.paths.root, [run.paths.dataset_path])).write(
        run.paths.record_path("dataset")
    )
    labels = run.paths.dataset_path / "train" / "labels.npy"
    content = labels.read_bytes()
    labels.write_bytes(content[:-1] + b"\x01")
    status, said = train_program(run)
    assert status == 2
    assert f"error: train: {labels}: " in said and "hyperpod-ft submit RUN_FILE --only dataset" in said
    labels.write_bytes(content)
    assert train_program(run)[0] == 0 and run.journal.is_done("train")


def test_not_a_number_stops_and_saves_nothing(make_run: MakeRun) -> None:
    run = make_run(settings={"training.save_every_steps": 1})
    file = run.paths.base_model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"step 1: .*nan"):
        train_here(run)
    assert not list(run.paths.checkpoints.iterdir()) and run.journal.record("train") is None


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_learning_rate_that_ruins_the_model_stops_the_run(
    make_run: MakeRun, train_program: TrainProgram, method: str
) -> None:
    settings = {"training.method": method, "training.learning_rate": 1.0, "training.sanity_steps": 6}
    # a random model answers about as badly whatever its layers do: only the output matrix makes it worse
    settings |= {"lora": {"target_modules": ["q_proj", "lm_head"]}}
    settings |= {"training.max_steps": 30, "training.save_every_steps": 6, "training.warmup_share": 0.0}
    run = make_run(settings=settings)
    status, said = train_program(run)
    assert status == 2
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: train: step 6: "), said
    assert "training.sanity_margin 2" in errors[0] and "lower training.learning_rate" in errors[0]
    assert not list(run.paths.checkpoints.iterdir()) and run.journal.record("train") is None
    # the curve that led there is, and so is the bill
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert len(usage.read(run.paths)) == 1


def test_the_base_models_loss_survives_a_restart(make_run: MakeRun) -> None:
    """What the loss is compared with is that of step 1 of the first attempt, not of the step resumed from."""
    run = make_run(settings={"training.max_steps": 6, "training.save_every_steps": 2})
    train_here(run)
    run.paths.record_path("train").unlink()
    (run.paths.checkpoints / "step-00000006" / "checkpoint.json").unlink()
    checkpoint = run.paths.checkpoints / "step-00000004" / "checkpoint.json"
    values = json.loads(checkpoint.read_text())
    assert values["progress"]["first_loss"] == metrics(run)[0]["loss"]
    values["progress"] |= {"first_loss": 1.0, "smoothed_loss": 4.0}
    publish.write_json(checkpoint, values)
    with pytest.raises(UserError, match=r"step 6: .* 1\.0000"):
        train_here(run)


def test_a_broken_base_model_stops_the_run_at_step_1(make_run: MakeRun) -> None:
    run = make_run()
    file = run.paths.base_model / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 1000
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"step 1: .* 4\.8520"):
        train_here(run)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_bf16_learns_with_fp32_masters(make_run: MakeRun, method: str) -> None:
    settings = {"training.precision": "bf16", "training.method": method, "training.max_steps": 40}
    settings |= {"training.learning_rate": 2e-2 if method == "lora" else 5e-3, "training.micro_batch_size": 4}
    run = make_run(settings=settings, rows=8)
    facts = train_here(run).facts
    # rank-4 factors on a random frozen model cannot learn as much
    assert facts["final_loss"] < (0.92 if method == "lora" else 0.75) * facts["first_loss"]
    metadata = torch.distributed.checkpoint.FileSystemReader(run.paths.checkpoints / "step-00000040").read_metadata()
    dtypes = {v.properties.dtype for name, v in metadata.state_dict_metadata.items() if not name.startswith("random")}
    assert dtypes == {torch.float32}


def test_a_model_of_another_family_trains_with_one_document_a_row(make_run: MakeRun) -> None:
    sizes = {"vocab_size": 128, "max_position_embeddings": 64, "hidden_size": 32, "num_heads": 2}
    model = GPTNeoConfig(**sizes, num_layers=2, attention_types=[[["global", "local"], 1]])
    facts = train_here(make_run(model=model, settings={"training.method": "full", "dataset.packing": "none"})).facts
    assert facts["steps"] == 4


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2"])
def test_tensors_that_transformers_renames_keep_their_names_in_files(make_run: MakeRun, model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **SIZES | {"vocab_size": 128})
    settings = {"training.method": "full", "training.learning_rate": 1e-4, "training.save_every_steps": 2}
    run = make_run(model=config, settings=settings)
    if model_type == "gpt2":
        as_published(run.paths.base_model)
    train_here(run)
    whole = curve(run)
    run.paths.record_path("train").unlink()
    (run.paths.checkpoints / "step-00000004" / "checkpoint.json").unlink()
    assert train_here(run).facts["resumed_from"] == [2] and curve(run) == whole
    consolidate.work(run)
    models = (
        AutoModelForCausalLM.from_pretrained(directory) for directory in (run.paths.base_model, run.paths.tuned_model)
    )
    base, tuned = (model.state_dict() for model in models)
    for name, tensor in tuned.items():
        # a little changed by training: not another tensor of the same shape
        assert 0 < (tensor - base[name]).abs().max() < 1e-3, name
