"""Rows with images through all stages with engine trl: they are learned, and shown alike wherever a model gets them."""

import base64
import json
import os
import pickle
import runpy
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.config import run_file
from hyperpod_ft.data.images import files
from hyperpod_ft.data.images.reader import ImageReader
from hyperpod_ft.data.images.stored import ImageRows
from hyperpod_ft.engines.batches import PackedSplit
from hyperpod_ft.engines.trl import trainer
from hyperpod_ft.engines.trl.callback import StepsFollower
from hyperpod_ft.engines.trl.images import ImageBatches, ImageCollator
from hyperpod_ft.evaluation.answers import as_text
from hyperpod_ft.planning.families import IMAGE_TOWERS
from hyperpod_ft.report.facts import dataset_facts
from hyperpod_ft.report.gather import gather
from hyperpod_ft.report.page import report_page
from hyperpod_ft.runs.job_files import STOP_SIGNALS
from hyperpod_ft.runs.results.samples import Samples
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving import __main__ as serving
from hyperpod_ft.serving.answers.answering import Answering
from hyperpod_ft.serving.http.openai_api import HttpError, Request
from hyperpod_ft.shipped import shipped
from hyperpod_ft.stages import consolidate, dataset, merge
from hyperpod_ft.stages.stage import perform
from tests.training import every_stage
from tests.training.conftest import curve, metrics, train_here
from tests.unit import tiny_images
from tests.unit.stage_runs import finish, make_run

pytestmark = pytest.mark.training
EXAMPLES = shipped("examples") / "pictures"
PICTURES: dict[str, Any] = runpy.run_path(str(EXAMPLES / "make_pictures.py"))
DATASET = {"files": ["*.jsonl", "images/*"], "format": "chat", "images": True, "max_length": 96}
TRAINING = {"precision": "fp32", "micro_batch_size": 8, "learning_rate": 5e-3, "save_every_steps": 8, "sanity_steps": 0}


class KilledError(BaseException):
    """In place of the end of the process."""


def prepared(
    base: Path,
    model_type: str,
    pictures: int,
    lora: Mapping[str, Any] = {},
    questions: Sequence[str] = ("color",),
    trl: Mapping[str, Any] = {},
    **training: Any,
) -> Run:
    """A run of pictures with these questions, whose rows are prepared."""
    tiny_images.save(base / "model", model_type, hidden=64)
    PICTURES["write"](base / "data", pictures, questions=questions)
    more = {
        "engine": "trl",
        "lora": {"r": 32, "alpha": 64, **lora},
        "training": TRAINING | training,
        "trl": trl,
        "generate": {"train_samples": 0, "validation_samples": 20, "max_new_tokens": 8},
    }
    run = make_run(
        base, str(base / "model"), {"source": str(base / "data"), "validation_share": 0.2} | DATASET, more=more
    )
    shutil.copytree(base / "model", run.paths.base_model)
    shutil.copytree(base / "data", run.paths.raw_datasets[0])
    finish(run, "download")
    perform(run, "dataset", dataset.work)
    return run


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The recipe, whose training was killed after its 18th step, and went on from the 16th."""
    place = tmp_path_factory.mktemp("tuned")
    mine = shutil.copy(EXAMPLES / "colors" / "images" / "000.png", place / "mine.png")
    asked = [{"images": ["mine.png"], "messages": PICTURES["QUESTIONS"]["color"]}, "Hello"]
    changes = [f"cluster.root={place / 'root'}", "training.save_every_steps=8", f"generate.prompts={json.dumps(asked)}"]

    def train(run: Run) -> None:
        mine.unlink()
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KilledError):
            patched.setattr(StepsFollower, "on_step_begin", killed_after(18, StepsFollower.on_step_begin))
            train_here(run)
        train_here(run)

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)  # where a recipe's files are
        run = Run.of(run_file.load(run_file.find("quickstart-images"), changes))
    return every_stage.perform(run, train)


def killed_after(step: int, begin: Callable[..., None]) -> Callable[..., None]:
    def on_step_begin(self: StepsFollower, args: Any, state: Any, control: Any, **passed: Any) -> None:
        if state.global_step == step:
            raise KilledError
        begin(self, args, state, control, **passed)

    return on_step_begin


def test_held_out_pictures_are_answered_after_a_training_that_was_killed(tuned: Run) -> None:
    record = tuned.journal.record("train")
    assert record is not None and record.facts["resumed_from"] == [16]
    assert [row["step"] for row in metrics(tuned)] == list(range(1, 81))
    assert "Images" in dict(dataset_facts(gather(tuned)))
    train = tuned.paths.dataset_path / "train"
    rows = range(len(PackedSplit(train)))
    in_epoch = ImageBatches(train, ImageReader.load(tuned.paths.base_model)).of(rows)["attention_mask"].sum()
    assert record.facts["tokens"] == in_epoch * record.facts["epochs"] and record.facts["epochs"] == 8
    found = Samples.read(tuned.paths.samples_path)
    assert found is not None
    exact = found.exact_match["validation"]
    assert exact.base == 0 and exact.rows == 20 and exact.tuned >= 16
    assert found.validation_loss is not None
    # as TRL's trainer has computed it before the merge
    assert found.validation_loss.tuned.mean == pytest.approx(metrics(tuned)[-1]["validation_loss"], rel=1e-3)
    assert found.validation_loss.base.mean == pytest.approx(record.facts["base_validation_loss"], rel=1e-3)


def test_the_report_shows_small_copies_of_held_out_pictures(tuned: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """And of a prompt's."""
    found = Samples.read(tuned.paths.samples_path)
    rows = [row for row in found.samples if row.split == "validation"]
    drawn = {path.name: path.read_bytes() for path in (tuned.paths.raw_datasets[0] / "images").iterdir()}
    drawn["mine.png"] = drawn["000.png"]
    page = report_page([gather(tuned)])
    for row in (found.prompts[0], *rows):
        (image,) = row.images
        copy = base64.b64decode(image.jpeg)
        expected, shown = (np.asarray(files.opened([file])[0], int) for file in (drawn[Path(image.name).name], copy))
        assert abs(expected - shown).mean() < 12 and f'src="data:image/jpeg;base64,{image.jpeg}"' in page
    assert len({image.name for row in rows for image in row.images}) == 20
    show_runs.results(tuned)
    shown, text = capsys.readouterr().out, as_text(found)
    for row in (found.prompts[0], rows[0]):
        assert f"{row.images[0].name} <|im_start|>user" in shown and f"  images: {row.images[0].name}\n" in text


def test_the_tuned_model_is_the_whole_one(tuned: Run) -> None:
    """Adapters are in the language model, and nothing of the tower has changed."""
    assert verify(tuned.paths.tuned_model, base=tuned.paths.base_model, adapter=tuned.paths.adapter).findings == ()
    before, after = (
        load_file(path / "model.safetensors") for path in (tuned.paths.base_model, tuned.paths.tuned_model)
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed
    assert all(name.startswith("model.language_model.layers.") for name in changed)
    assert (tuned.paths.tuned_model / "preprocessor_config.json").exists()
    batch = ImageBatches(tuned.paths.dataset_path / "validation", ImageReader.load(tuned.paths.tuned_model)).of([0, 1])
    labels = batch.pop("labels")
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(pretrained.load(tuned.paths.base_model, "auto"), str(tuned.paths.adapter))
        merged = pretrained.load(tuned.paths.tuned_model, "auto")
        one, other = (model.eval()(**batch).logits[labels != -100] for model in (adapted, merged))
    assert torch.allclose(one, other, atol=1e-4)


def test_a_server_shows_the_model_what_training_did(tuned: Run) -> None:
    """Also while it answers a question without an image."""
    rows = ImageRows(tuned.paths.dataset_path / "validation")
    server = Answering.load({"tuned": tuned.paths.tuned_model}, {}, tuned.paths.tuned_model, torch.device("cpu"))

    def asked(*images: bytes | str, text: str = PICTURES["QUESTIONS"]["color"]) -> Request:
        urls = [image if isinstance(image, str) else tiny_images.data_url(image) for image in images]
        content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]
        return Request(messages=({"role": "user", "content": content},), max_tokens=8)

    text = server.answer(asked(), lambda _: None).text
    right, nested = 0, list[str]()
    for number in range(6):
        row, (image,) = rows[number]

        def ask_too(_: object) -> None:
            if not nested:
                nested.append("")
                nested[0] = server.answer(asked(), lambda _: None).text

        given = server.answer(asked(image), ask_too)
        right += row.completion.startswith(given.text)
        stored = PackedSplit(tuned.paths.dataset_path / "validation").batch(np.array([number]))
        assert given.prompt_tokens == int((stored.labels != -100).long().argmax()) > 10
    assert right >= 4 and nested == [text]
    mine, hello = Samples.read(tuned.paths.samples_path).prompts
    (copy,) = tuned.paths.prompt_images.iterdir()
    assert server.answer(asked(copy.read_bytes()), lambda _: None).text == mine.tuned != mine.base
    assert "<|image_pad|>" in mine.prompt and hello.images == ()
    picture = tiny_images.picture()
    refused = {
        "another number of images": asked(picture, text="the <|image_pad|>"),
        "a token of images": asked(picture, text="the <|video_pad|>"),
        "damaged": asked("data:image/png;base64,\u00e9"),
        "not a data URL": asked("\ud800"),
        "100 megapixels": asked(*[picture] * 101),
    }
    for says, request in refused.items():
        with pytest.raises(HttpError, match=says) as raised:
            server.answer(request, lambda _: None)
        assert raised.value.status == 400


def test_one_question_is_asked_about_a_picture(tuned: Run, capsys: pytest.CaptureFixture[str]) -> None:
    row = Samples.read(tuned.paths.samples_path).samples[0]
    asked = ["--model", f"it={tuned.paths.tuned_model}", "--device=cpu", f"--ask={PICTURES['QUESTIONS']['color']}"]
    serving.main([*asked, f"--image={tuned.paths.raw_datasets[0] / row.images[0].name}"])
    assert capsys.readouterr().out == f"{row.tuned}\n"
    with pytest.raises(SystemExit):
        serving.main([*asked, "--image=/none.png"])
    assert "error: --image: /none.png: No such file" in capsys.readouterr().err


def test_a_signal_to_all_processes_ends_no_worker(tuned: Run) -> None:
    """The training ends after the step, with a checkpoint."""
    collator = ImageCollator(PackedSplit(tuned.paths.dataset_path / "train"), tuned.paths.base_model)
    copied = pickle.loads(pickle.dumps(collator))  # as a worker that is not forked gets it
    rows = [{"row": row} for row in range(8)]
    batches = iter(DataLoader(rows, collate_fn=collator, num_workers=1, prefetch_factor=1))  # type: ignore[arg-type]
    found = [next(batches)]
    for number in STOP_SIGNALS:
        os.kill(batches._workers[0].pid, number)  # type: ignore[attr-defined]
    found += batches
    for row, batch in zip(rows, found, strict=True):
        assert all(torch.equal(tensor, batch[name]) for name, tensor in copied([row]).items())


def test_processes_read_images_for_gpus(tuned: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "usable_cpus", lambda: 24)

    def workers(instance_type: str, ranks: int, **trl: int) -> object:
        cluster = tuned.config.cluster.model_copy(update={"instance_type": instance_type})
        config = tuned.config.model_copy(update={"cluster": cluster, "trl": trl})
        degrees = SimpleNamespace(ranks_per_node=ranks)
        task: Any = SimpleNamespace(config=config, layout=SimpleNamespace(degrees=degrees))
        return trainer.image_workers(task).get("dataloader_num_workers")

    gpus = "p5.48xlarge"
    assert [workers(gpus, 1), workers(gpus, 8), workers(gpus, 24)] == [4, 2, 0]
    assert workers(gpus, 8, dataloader_num_workers=1) is None and workers("local", 1) is None


def changed(run: Run) -> set[str]:
    """The tensors that training changed; none has come or gone."""
    before, after = (load_file(path / "model.safetensors") for path in (run.paths.base_model, run.paths.tuned_model))
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("model_type", tiny_images.TYPES)
def test_bf16_recomputed_layers_and_a_restart_change_no_loss(tmp_path: Path, model_type: str) -> None:
    """Nor does it matter that the tower of one is adapted too, and that another process reads its images."""
    tower = model_type in IMAGE_TOWERS
    settings = {"precision": "bf16", "activation_checkpointing": "full", "save_every_steps": 2, "micro_batch_size": 2}
    workers = {"dataloader_num_workers": int(tower)}
    run = prepared(tmp_path, model_type, 20, {"image_tower": tower}, trl=workers, max_steps=4, **settings)
    train_here(run)
    whole = curve(run)
    run.paths.record_path("train").unlink()
    (run.paths.checkpoint(4) / "checkpoint.json").unlink()
    assert train_here(run).facts["resumed_from"] == [2] and curve(run) == whole
    consolidate.work(run)
    merge.work(run)
    assert verify(run.paths.tuned_model, base=run.paths.base_model, adapter=run.paths.adapter).findings == ()
    assert {"visual" in name for name in changed(run)} == {False, tower}


def test_a_step_has_the_mean_loss_of_its_tokens_however_it_is_divided(tmp_path: Path) -> None:
    """Answers differ in length."""
    curves = []
    for rows in (4, 1):
        divided = {"micro_batch_size": rows, "gradient_accumulation_steps": 4 // rows, "max_steps": 3}
        run = prepared(tmp_path / str(rows), "qwen3_vl", 20, questions=("color", "count"), **divided)
        train_here(run)
        curves.append([value for _, *values in curve(run) for value in values])
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


@pytest.mark.parametrize("model_type", tiny_images.TYPES)
def test_batches_have_the_prepared_tokens(tmp_path: Path, model_type: str) -> None:
    run = prepared(tmp_path, model_type, 10)
    split = PackedSplit(run.paths.dataset_path / "train")
    rows = np.arange(len(split))
    stored, made = split.batch(rows), ImageBatches(split.directory, ImageReader.load(run.paths.base_model)).of(rows)
    width, mask = made["input_ids"].shape[1], made["attention_mask"]
    assert torch.equal(made["labels"], stored.labels[:, :width]) and (stored.labels[:, width:] == -100).all()
    assert torch.equal(made["input_ids"] * mask, stored.input_ids[:, :width] * mask)
    drawn = {path.read_bytes() for path in (run.paths.raw_datasets[0] / "images").iterdir()}
    assert all(image in drawn for row in rows.tolist() for image in ImageRows(split.directory)[row][1])
