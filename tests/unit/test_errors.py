"""The text of errors."""

import pytest

from hyperpod_ft.errors import ConfigError, UserError, last_line, print_error


def test_the_last_line_of_what_a_program_said() -> None:
    assert last_line("first\n  last \n\n  \n") == "last"
    assert last_line(" \n") == ""


def test_errors_cannot_control_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError("a\x1b[2J.yaml: b\nc", "d\x9bm\udcff")
    assert str(error) == "a?[2J.yaml: b c; d?m?"
    assert (error.problem, error.remedy) == ("a?[2J.yaml: b c", "d?m?")
    assert str(ConfigError(["a\x07", "b"])) == "a?\nb"
    print_error("train", "/fsx/a\x1b: Permission denied")
    assert capsys.readouterr().err == "error: train: /fsx/a?: Permission denied\n"
