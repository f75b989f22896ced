"""Rows out of files: kinds, order, line numbers, and files that cannot be read."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from hyperpod_ft.data import reading
from hyperpod_ft.data.reading import BadRow, RawRow, chunks, read
from hyperpod_ft.errors import UserError


def rows(directory: Path) -> list[RawRow | BadRow]:
    return [row for chunk in chunks(directory) for row in read(directory, chunk)]


def places(directory: Path) -> list[str]:
    return [row.where for row in rows(directory)]


def test_files_in_sorted_order_and_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"n": 2}\r\n\n{"n": 3}')
    (tmp_path / "a.json").write_text('\ufeff [\n {"n": 0},\n\n {"n":\n 1}]\n')
    (tmp_path / "c.json").write_text('{"n": 4}\n{"n": 5}\n')
    (tmp_path / "d").mkdir()
    parquet.write_table(pyarrow.table({"n": [6, 7, 8]}), tmp_path / "d" / "e.parquet", row_group_size=2)
    (tmp_path / ".hyperpod-ft.json").write_text("{}")
    found = rows(tmp_path)
    assert [row.values["n"] for row in found if isinstance(row, RawRow)] == list(range(9))
    assert [row.where for row in found] == [
        *("a.json:2", "a.json:4", "b.jsonl:1", "b.jsonl:3", "c.json:1", "c.json:2"),
        *("d/e.parquet:1", "d/e.parquet:2", "d/e.parquet:3"),
    ]


def test_chunks_cut_between_lines_and_know_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"n": n, "pad": "x" * (n % 50)}) for n in range(500)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    whole = rows(tmp_path)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 100)
    assert len(chunks(tmp_path)) > 50
    assert rows(tmp_path) == whole
    assert whole[-1].where == "a.jsonl:500"


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"t": "a\u2028b\u0085c"}\n{"t": "d"}\n', encoding="utf-8")
    assert places(tmp_path) == ["a.jsonl:1", "a.jsonl:2"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"t": "\xff"}', "invalid UTF-8"),
        (b'{"t": ', "invalid JSON"),
        (b'{"t": 1} trailing', "invalid JSON"),
        (b'"text"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"n": ' + b"[" * 100_000 + b"}", "invalid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "invalid JSON"),
    ],
)
def test_bad_lines(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"t": "ok"}\n' + line + b'\n{"t": "ok"}\n')
    found = rows(tmp_path)
    assert isinstance(found[1], BadRow)
    assert (found[1].where, found[1].reason) == ("a.jsonl:2", reason)
    assert isinstance(found[0], RawRow)
    assert isinstance(found[2], RawRow)


def test_bad_elements_of_an_array(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"t": "ok"},\n"text",\n{"t": "\xff"}]')
    first, second, third = rows(tmp_path)
    assert isinstance(first, RawRow)
    assert isinstance(second, BadRow)
    assert (second.where, second.reason) == ("a.json:2", "not a JSON object")
    # its text cannot be encoded, which rendering finds; see test_data_formats
    assert isinstance(third, RawRow)
    assert third.values["t"] == "\udcff"


def test_invalid_utf8_in_parquet(tmp_path: Path) -> None:
    column = pyarrow.array([b"ok", b"\xff", b"fine"]).cast(pyarrow.string(), safe=False)
    bad = pyarrow.StringArray.from_buffers(3, column.buffers()[1], column.buffers()[2])
    parquet.write_table(pyarrow.table({"t": bad}), tmp_path / "a.parquet")
    found = rows(tmp_path)
    assert [type(row) for row in found] == [RawRow, BadRow, RawRow]
    assert str(found[1]) == "a.parquet:2 (invalid UTF-8)"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"t": 1}, {"t": ', r"a\.json:1: invalid JSON"),
        ("a.json", b'[{"t": 1}\n{"t": 2}]', r"a\.json:1: .* lacks a comma after this row"),
        ("a.json", b'[{"t": 1}', r"a\.json:1: the array ends early"),
        ("a.json", b'{\n "data": []\n}', r"a\.json: .*array.*; .*JSON Lines"),
        ("a.csv", b"a,b", r"a\.csv: .*; correct dataset\.files"),
        ("a.parquet", b"not parquet", r"a\.parquet: not a parquet file: .*dataset\.files"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        rows(tmp_path)
    assert "\n" not in str(refused.value)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no data files; correct dataset\.files"):
        rows(tmp_path)


def test_structs_of_parquet_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    calls = [[{"name": "weather", "arguments": {"place": "Bern"}}], [{"name": "search", "arguments": {"query": None}}]]
    table = pyarrow.table(
        {"calls": [*calls, [{"name": "search", "arguments": {"query": "fox"}}]], "note": ["a", None, ""]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    found = [row.values for row in read(tmp_path, chunks(tmp_path)[0]) if isinstance(row, RawRow)]
    assert found[0] == {"calls": [{"name": "weather", "arguments": {"place": "Bern"}}], "note": "a"}
    assert found[2]["calls"] == [{"name": "search", "arguments": {"query": "fox"}}]
    assert found[1]["note"] is None, "a column is there, whatever it holds"
