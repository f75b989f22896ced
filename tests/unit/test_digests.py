"""Digests tell apart what differs."""

from pathlib import Path

from hyperpod_ft.digests import file_sha256, files_sha256


def test_a_name_cannot_stand_for_two_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a")
    second.write_text("b")
    merged = f"first {file_sha256(first)}\nsecond"
    assert files_sha256({"first": first, "second": second}) != files_sha256({merged: second})
