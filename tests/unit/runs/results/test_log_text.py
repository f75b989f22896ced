"""The end of a log, and the progress in it."""

import time
from pathlib import Path

import pytest

from hyperpod_ft import progress
from hyperpod_ft.progress import ByteProgress, report_growth
from hyperpod_ft.runs.job_files import banner
from hyperpod_ft.runs.results.log_text import StageProgress, parse_progress, stage_progress, tail


def test_the_last_lines_are_read_from_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log, 3) == []
    log.touch()
    assert tail(log, 3) == []
    log.write_text("".join(f"line {number} {'ä' * 100}\n" for number in range(5000)))
    lines = tail(log, 2000)
    assert [line.split(" ")[1] for line in lines] == [str(number) for number in range(3000, 5000)]
    log.write_text("first\r\n 10%\r 20%\r 30%\n\nunfinished")
    assert tail(log, 9) == ["first", " 30%", "", "unfinished"]


def test_an_endless_line_is_not_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stream:
        stream.truncate(1 << 30)
    begun = time.process_time()
    tail(log, 10)
    assert time.process_time() - begun < 2


def test_every_progress_in_bytes_is_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = ByteProgress("check finished files", 4_000_000_000, every_seconds=0)
    counted._started -= 10
    counted.add(1_000_000_000)
    found = parse_progress(capsys.readouterr().err.rstrip("\n"))
    assert found is not None and found.fraction == 0.25
    assert found.seconds_left == pytest.approx(30, rel=0.01)
    monkeypatch.setattr(progress, "_SECONDS", 0.001)
    (tmp_path / "file").write_bytes(b"x" * 500_000)
    printed = ""
    with report_growth("download model", tmp_path, 1_000_000):
        while "%" not in printed:
            printed += capsys.readouterr().out
    assert parse_progress(printed.splitlines()[0]) == StageProgress(0.5, printed.splitlines()[0])


@pytest.mark.parametrize(
    ("line", "fraction"),
    [
        ("generate: 3 of 20 answers", 0.15),
        ("train: reference of 1,500 of 3,000 validation rows", 0.5),
        ("tokenized 12,345 rows, 21% of the data, 1,200 rows/s", 0.21),
        ("merge: 0.0 kB of 0.0 kB, 0.0 kB/s", 1.0),
        ("warning: 3 of 20 rows were skipped", None),
        ("download model: 5.0 GB in 3.0 s", None),
        ("push: 1..2 GB of 2.0 GB, 1.0 GB/s", None),
        ("generate: , of , answers", None),
    ],
)
def test_lines_of_stages(line: str, fraction: float | None) -> None:
    found = parse_progress(line)
    assert (found and found.fraction) == fraction


def test_progress_of_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{banner('merge', '7')}\nmerge: 1.0 GB of 4.0 GB, 100.0 MB/s\nsaved\n")
    found = stage_progress(log)
    assert found is not None and (found.fraction, found.seconds_left) == (0.25, 30)
    with log.open("a") as stream:
        stream.write(f"{banner('merge', '7')}, restart 1\n")
    assert stage_progress(log) is None
