"""The text of errors."""

from hyperpod_ft.errors import last_line


def test_the_last_line_of_what_a_program_said() -> None:
    assert last_line("first\n  last \n\n  \n") == "last"
    assert last_line(" \n") == ""
