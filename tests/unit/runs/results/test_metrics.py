"""Rows of metrics.jsonl."""

from pathlib import Path

import pytest

from hyperpod_ft.runs.results import metrics
from hyperpod_ft.runs.results.metrics import last_row


@pytest.mark.parametrize("block", [1, 7, 1 << 14])
@pytest.mark.parametrize(
    ("content", "step"),
    [
        (b"", None),
        (b"\n\xff\xfe\n[1]\n", None),
        (b'{"step": 1}', 1),
        (b'{"step": 1}\n{"step": 2}\n', 2),
        (b'{"step": 1}\n{"step": 2}\n{"st', 2),
        (b'{"step": 1}\n' + b"\0" * 100 + b'\n{"note": "\xc3\xa9"}\n', 1),
    ],
)
def test_the_last_intact_row_is_found_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, content: bytes, step: int | None
) -> None:
    monkeypatch.setattr(metrics, "_TAIL_BYTES", block)
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) is None
    path.write_bytes(content)
    row = last_row(path)
    assert (row and row["step"]) == step


def test_rows_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert metrics.last_row(path) is None
    path.write_text('{"step": 1}\n{"ste\n[]\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    assert [row for _, row in metrics.intact_rows(path)] == [{"step": 1}, {"step": 2, "loss": 1.5}]
    assert metrics.last_row(path) == {"step": 2, "loss": 1.5}


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        f'{{"step": 1{"0" * 400}}}',
        f'{{"step": 2, "loss": -1{"0" * 400}}}',
        '{"step": 2, "loss": "1.5"}',
        '{"loss": 1.5}',
        "3",
    ],
)
def test_what_no_training_writes_is_no_row(line: str) -> None:
    assert metrics._row_of(line) is None


def test_rows_are_read_once_as_the_file_grows_and_all_again_once_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = metrics.GrowingRows(path)
    assert rows.read() == ([], False)
    path.write_text('{"step": 1}\n{"st')
    assert rows.read() == ([{"step": 1}], True)
    with path.open("a") as stream:
        stream.write('ep": 2}\ndamaged\n')
    assert rows.read() == ([{"step": 2}], False)
    assert rows.read() == ([], False)
    path.write_text('{"step": 1}\n')
    assert rows.read() == ([{"step": 1}], True), "shorter: written anew"
    other = tmp_path / "other"
    other.write_text('{"step": 1}\n{"step": 5}\n')
    other.replace(path)
    assert rows.read() == ([{"step": 1}, {"step": 5}], True)
    path.unlink()
    assert rows.read() == ([], False)
