"""Stage dataset with images: where rows have them, which rows are refused, and what is kept."""

import base64
import io
import json
import random
import shutil
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from hyperpod_ft.data.images.previews import previews
from hyperpod_ft.data.images.stored import ImageRows
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import dataset as stage
from hyperpod_ft.stages.stage import perform
from hyperpod_ft.stages.train import check_data
from tests.unit import tiny_images
from tests.unit.stage_runs import finish, make_run

LARGE = tiny_images.data_url(tiny_images.picture(size=(8000, 8000)))
RED, BLUE = tiny_images.picture("red"), tiny_images.picture("blue", form="JPEG")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen3_vl"
    tiny_images.save(directory, "qwen3_vl")
    return directory


def prepared(
    base: Path, model: Path, rows: Iterable[Mapping[str, Any]] | pa.Table, prompts: Sequence[Any] = (), **dataset: Any
) -> Run:
    """A run whose rows are in a folder of its data, with two pictures beside them."""
    folder = base / "data" / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(rows, pa.Table):
        parquet.write_table(rows, folder / "rows.parquet", row_group_size=1)
    else:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "red.png").write_bytes(RED)
    (folder / "blue.JPG").write_bytes(BLUE)
    (base / "data" / "secret.png").write_bytes(RED)
    settings = {"source": str(base / "data"), "files": ["*"], "format": "chat", "images": True, "max_length": 160}
    more = {"engine": "trl", "generate": {"prompts": prompts}}
    run = make_run(base, str(model), settings | {"validation_share": 0} | dataset, more=more)
    shutil.copytree(model, run.paths.base_model)
    shutil.copytree(base / "data", run.paths.raw_datasets[0])
    finish(run, "download")
    perform(run, "dataset", stage.work)
    return run


def asked(*content: Any, answer: str = "fox") -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}, {"role": "assistant", "content": answer}]


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


IMAGE = {"type": "image"}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_every_form_of_an_image_becomes_the_same_row(tmp_path: Path, model: Path) -> None:
    """A column, parts with a path, a data URL or OpenAI's shape; a question without a part has its images before it."""
    url = tiny_images.data_url(RED)
    plain = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "fox"}]
    rows = [
        {"images": ["red.png"], "messages": asked(IMAGE, text("how many"))},
        {"image": "red.png", "messages": plain},
        {"messages": asked({"type": "image", "image": "red.png"}, text("how many"))},
        {"messages": asked({"type": "image", "path": "red.png"}, text("how many"))},
        {"messages": asked({"type": "image", "image": url}, text("how many"))},
        {"messages": asked({"type": "image_url", "image_url": {"url": url}}, text("how many"))},
        {"images": ["red.png"], "prompt": plain[:1], "completion": plain[1:]},
        {
            "image": "red.png",
            "conversations": [{"from": "human", "value": "<image>how many"}, {"from": "gpt", "value": "fox"}],
        },
        {"messages": plain},
        {"images": ["red.png", "blue.JPG"], "messages": asked(text("the"), IMAGE, text("or"), IMAGE)},
    ]
    run = prepared(tmp_path, model, rows)
    found = PreparedDataset.open(run.paths.dataset_path)
    kept = ImageRows(run.paths.dataset_path / "train")
    made = sorted((kept[row] for row in range(len(rows))), key=lambda one: (len(one[1]), one[0].prompt))
    assert {row.prompt for row, _ in made[1:9]} == {made[1][0].prompt}
    assert made[0][0].prompt == made[1][0].prompt.replace(PLACE, "") and made[0][1] == []
    assert [images for _, images in made[1:]] == [[RED]] * 8 + [[RED, BLUE]]
    assert f"the{PLACE}or{PLACE}" in made[9][0].prompt
    assert {row.completion for row, _ in made} == {"fox<|im_end|>"}
    report = found.report()
    assert report["images"] == 2 and report["rows_used"] == 10
    assert (run.paths.dataset_path / "images.bin").stat().st_size == len(RED) + len(BLUE)
    samples = found.samples("train")
    assert sorted(len(found.images(sample)) for sample in samples) == [0, *[1] * 8, 2]
    assert sorted(tuple(sample.image_names) for sample in samples) == [
        *[(), ("",), ("",), *[("red.png",)] * 6, ("red.png", "blue.JPG")]
    ]


def test_copies_for_a_page_are_small_and_few() -> None:
    """Whatever the files are, of which no byte is copied."""
    noise = Image.frombytes("RGB", (400, 400), random.Random(1).randbytes(400 * 400 * 3))
    stream = io.BytesIO()
    noise.save(stream, "JPEG", comment=b"<script>")
    made = previews([stream.getvalue() + b"<script>"] * 40)
    some = [base64.b64decode(copy) for copy in made if copy]
    assert 1 < len(some) < 40 and sum(map(len, made)) < 200_000 and made[len(some) :] == [""] * (40 - len(some))
    for copy in some:
        with Image.open(io.BytesIO(copy)) as image:
            assert image.size == (160, 160) and b"script" not in copy
    with pytest.raises(RowError, match="cannot be read"):
        previews([b"<svg/>"])


def test_images_in_parquet_are_as_hugging_face_datasets_write_them(tmp_path: Path, model: Path) -> None:
    message = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "fox"}]
    images = [[{"bytes": BLUE, "path": None}], [{"bytes": None, "path": "red.png"}]]
    table = pa.table({"images": images, "messages": [message, message]})
    run = prepared(tmp_path, model, table, workers=2)
    kept = ImageRows(run.paths.dataset_path / "train")
    assert sorted([kept[0][1], kept[1][1]]) == sorted([[BLUE], [RED]])


def test_each_answer_of_a_conversation_is_a_row(tmp_path: Path, model: Path) -> None:
    """With the images before it."""
    turns = [*asked(IMAGE, text("the")), *asked(IMAGE, text("or"), answer="clips")]
    run = prepared(tmp_path, model, [{"images": ["red.png", "blue.JPG"], "messages": turns}])
    kept = ImageRows(run.paths.dataset_path / "train")
    assert [(row.completion, images) for row, images in (kept[0], kept[1])] == [
        ("fox<|im_end|>", [RED]),
        ("clips<|im_end|>", [RED, BLUE]),
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"images": ["none.png"], "messages": asked(IMAGE)}, "image that is not in the dataset: none.png"),
        ({"images": ["../secret.png"], "messages": asked(IMAGE)}, "image whose path leads out of the dataset"),
        ({"images": ["https://a.b/c.png"], "messages": asked(IMAGE)}, "image at a URL: https://a.b/c.png"),
        ({"images": ["data:image/png;base64,?"], "messages": asked(IMAGE)}, "image whose base64 is damaged"),
        ({"images": ["rows.jsonl"], "messages": asked(IMAGE)}, "image that cannot be read: not one of PNG"),
        ({"images": [7], "messages": asked(IMAGE)}, "neither a path nor bytes: it is int"),
        ({"images": ["red.png"], "messages": asked(IMAGE, IMAGE)}, "more image parts than images"),
        ({"images": ["red.png"] * 3, "messages": asked(IMAGE, IMAGE)}, "more images than image parts"),
        (
            {"images": ["red.png"], "messages": asked(text("<image> or <image>"))},
            "another number of <image> than images",
        ),
        ({"messages": asked(text("the <|image_pad|>"))}, "writes another number of images: 1, and the row has 0"),
        ({"messages": asked(text("the <|video_pad|>"))}, "text with a token of images"),
        (
            {"images": ["red.png"], "messages": asked(IMAGE, answer="fox <|image_pad|> dog")},
            "writes another number of images: 1, and the row has 0",
        ),
        (
            {"images": ["red\0.png"], "messages": asked(IMAGE)},
            r"not in the dataset: red\?\.png: no file has such a name",
        ),
        ({"images": ["red\ud800.png"], "messages": asked(IMAGE)}, "not in the dataset"),
        ({"images": ["data:image/png;base64,\u00e9"], "messages": asked(IMAGE)}, "image whose base64 is damaged"),
        ({"images": [LARGE, LARGE], "messages": asked(IMAGE, IMAGE)}, "more than 100 megapixels in all"),
        ({"images": ["red.png"] * 101, "messages": asked(*[IMAGE] * 101)}, "more than 100 megapixels in all"),
        ({"messages": asked(text("the \ufdd0"))}, r"text with the character U\+FDD0"),
        (
            {"messages": [*asked(text("the"))[:1], {"role": "assistant", "content": [IMAGE]}], "image": "red.png"},
            "answer",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, model: Path, row: dict[str, Any], says: str) -> None:
    good = {"images": ["red.png"], "messages": asked(IMAGE, text("how many"))}
    with pytest.raises(UserError, match=rf"1 of 2 rows cannot be used .* rows/rows\.jsonl:2 .*{says}"):
        prepared(tmp_path, model, [good, row])


def test_a_prompt_is_asked_before_the_training(tmp_path: Path, model: Path) -> None:
    """With its picture, as stage generate will ask it."""
    (tmp_path / "wide.png").write_bytes(tiny_images.picture(size=(4000, 16)))
    row = {"images": ["red.png"], "messages": asked(IMAGE, text("how many"))}
    with pytest.raises(UserError, match=r"^generate\.prompts\.0: image that the model's processor refuses"):
        prepared(tmp_path, model, [row], [{"images": ["wide.png"], "messages": "how many"}])


def test_a_few_pictures_are_in_memory_at_a_time(tmp_path: Path, model: Path) -> None:
    padding = bytes(4 << 20)  # which decoders do not read
    for number in range(10):
        (tmp_path / "data" / "rows").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "rows" / f"{number}.png").write_bytes(
            tiny_images.picture("red") + padding + bytes([number])
        )
    rows = [{"images": [f"{number}.png"], "messages": asked(IMAGE, text("how many"))} for number in range(10)]
    tracemalloc.start()
    run = prepared(tmp_path, model, rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (run.paths.dataset_path / "images.bin").stat().st_size > 10 * len(padding)
    assert peak < 5 * len(padding)


def test_a_picture_that_has_changed_is_not_trained(tmp_path: Path, model: Path) -> None:
    """All of them are not read before the training, for which accelerators wait; each is checked when it is read."""
    rows = [{"images": [name], "messages": asked(IMAGE, text("how many"))} for name in ("red.png", "blue.JPG")]
    run = prepared(tmp_path, model, rows)
    kept = ImageRows(run.paths.dataset_path / "train")
    first = int(kept[1][1] == [RED])  # the row whose picture comes first
    before, other = (kept[row] for row in (first, 1 - first))
    with (run.paths.dataset_path / "images.bin").open("r+b") as stream:
        stream.write(b"?")
    check_data(run.journal)
    with pytest.raises(UserError, match=r"images\.bin: differs from what stage dataset wrote"):
        kept[first]
    assert kept.row(first) == before[0] and kept[1 - first] == other


def test_a_row_is_as_long_as_its_images_make_it(tmp_path: Path, model: Path) -> None:
    rows = [{"images": ["red.png"] * count, "messages": asked(text("how many"))} for count in (1, 20)]
    run = prepared(tmp_path, model, rows, max_length=96, max_bad_rows=1)
    report = PreparedDataset.open(run.paths.dataset_path).report()
    assert report["bad_reasons"] == {"longer than max_length": 1} and report["images"] == 1
