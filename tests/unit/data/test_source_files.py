"""Which files and rows of a dataset's source are read."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import reading
from hyperpod_ft.data.reading import RawRow
from hyperpod_ft.data.source_files import chosen, rows_of
from hyperpod_ft.errors import UserError

ANY = Dataset.model_fields["files"].default


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        # as Hugging Face's datasets resolves them
        ("train-00000-of-00002.parquet train-00001-of-00002.parquet test-00000-of-00001.parquet", "train", "01"),
        ("data/train_sft-00000-of-00001.parquet data/test_sft-00000-of-00001.parquet", "train_sft", "0"),
        ("plain/unsupervised-00000-of-00001.parquet plain/train-00000-of-00001.parquet", "unsupervised", "0"),
        ("train/part-00000-of-00002.json train/part-00001-of-00002.json test/part-00000-of-00001.json", "train", "01"),
        ("training.jsonl dev.jsonl testing.jsonl eval_set.json", "validation", "1"),
        ("training.jsonl dev.jsonl testing.jsonl eval_set.json", "test", "23"),
        ("gsm8k-train.jsonl gsm8k-test.jsonl", "train", "0"),
        ("a/valid/train.jsonl a/train/test-cases.jsonl", "train", "1"),
        ("train.jsonl extra.jsonl test.jsonl", "train", "0"),
        # names that tell nothing are train
        ("a.jsonl b/c.json contest.jsonl latest.jsonl trainer.jsonl", "train", "01234"),
        ("part-00000-of-00002.jsonl part-00001-of-00002.jsonl", "train", "01"),
        ("questions.jsonl questions.test.jsonl", "train", "0"),
        # descriptions and hidden files are no data
        ("dataset_info.json dataset_infos.json .cache/train.jsonl .b.json c.json", "train", "4"),
        ("train.jsonl test.jsonl extra.jsonl README.md", "all", "012"),
        ("train.jsonl test.jsonl", "test[:10%]", "1"),
    ],
)
def test_names_tell_the_split(names: str, split: str, expected: str) -> None:
    there = names.split()
    assert chosen(there, "org/rows", ANY, split) == sorted(there[int(index)] for index in expected)


def test_patterns_that_name_one_split_choose_it(tmp_path: Path) -> None:
    there = ["test.jsonl", "train.jsonl", "data/train_prefs-00000-of-00001.parquet"]
    for patterns, found in (("test*", "test.jsonl"), ("data/*", there[2])):
        assert chosen(there, "org/rows", (patterns,), "train") == [found]
    assert chosen(there, "org/rows", ("t*",), "train") == ["train.jsonl"], "of several, the names still tell"
    with pytest.raises(UserError, match="validation"):
        chosen(there, "org/rows", ("test*",), "validation")


def test_images_are_of_the_rows_that_name_them_and_tell_nothing_of_splits() -> None:
    there = ["images/2.JPG", "images/test-1.png", "rows.jsonl"]
    assert chosen(there, "org/rows", ("*",), "train") == there
    assert chosen([*there, "test.jsonl"], "org/rows", ("*.jsonl", "images/*"), "test") == [*there[:2], "test.jsonl"]


def test_a_source_of_one_file_is_read_whatever_its_name() -> None:
    assert chosen(["test.jsonl"], "/data/test.jsonl", ANY, "train") == ["test.jsonl"]


def test_a_split_that_is_not_there_is_one_line_with_those_that_are() -> None:
    for there, split in ((["test-00000-of-00001.parquet", "val.jsonl"], "train"), (["test.json", "val.json"], "dev")):
        with pytest.raises(UserError, match=r"dataset\.split: org/rows .*test, validation") as refused:
            chosen(there, "org/rows", ANY, split)
        assert f"'{split}'" in refused.value.problem and "all" in refused.value.remedy


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", (0, 11)),
        ("train[:]", (0, 11)),
        ("train[:5]", (0, 5)),
        ("train[3:5]", (3, 5)),
        ("train[-2:]", (9, 11)),
        ("train[:50%]", (0, 6)),  # datasets rounds to the closest, ties to even
        ("train[90%:]", (10, 11)),
        ("train[-50%:]", (5, 11)),
        ("train[:5000]", (0, 11)),
    ],
)
def test_a_slice_limits_the_rows(split: str, expected: tuple[int, int]) -> None:
    Dataset.model_validate({"source": "a/b", "format": "text", "split": split})
    rows = rows_of(split, 11)
    assert (rows.start, rows.stop) == expected


@pytest.mark.parametrize("split", ["", "train+test", "train[5]", "train[:5", "train[a:]", "../x", "train[:5%%]"])
def test_a_split_that_is_none_is_refused(split: str) -> None:
    with pytest.raises(ValueError, match="split"):
        Dataset.model_validate({"source": "a/b", "format": "text", "split": split})


def test_rows_of_every_kind_of_file_are_sliced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [{"n": n} for n in range(30)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows[:10])))
    (tmp_path / "b.json").write_text(json.dumps(rows[10:20]))
    parquet.write_table(pyarrow.Table.from_pylist(rows[20:]), tmp_path / "c.parquet", row_group_size=3)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 20)
    whole = reading.chunks(tmp_path)

    def read(split: str, wanted: set[int] | None = None) -> list[int]:
        chunks = reading.sliced(tmp_path, whole, split)
        found = [row for chunk in chunks for row in reading.read(tmp_path, chunk, wanted)]
        return [row.values["n"] for row in found if isinstance(row, RawRow)]

    for split, first, stop in (("train[7:24]", 7, 24), ("train[:10%]", 0, 3), ("all[-4:]", 26, 30), ("train", 0, 30)):
        assert read(split) == list(range(first, stop))
    assert read("train[12:15]", {1, 2}) == [13, 14], "counted from the first row that is read"
    assert reading.sliced(tmp_path, whole, "train")[0].rows == (0, None), "nothing is counted"
    with pytest.raises(UserError, match=r"dataset\.split: train\[40:\] has none of the 30"):
        read("train[40:]")
