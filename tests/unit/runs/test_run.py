"""Where a run keeps things."""

from collections.abc import Callable

from hyperpod_ft.errors import last_line
from hyperpod_ft.runs.run import Run


def test_checkpoints_are_found_by_their_full_names(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert run.checkpoints_by_step() == {}
    for name in ("step-00000400", "step-00000012", "step-12", "step-00000500.partial", ".step-00000600.partial", "x"):
        (run.checkpoints / name).mkdir(parents=True)
    assert list(run.checkpoints_by_step().items()) == [(12, run.checkpoint(12)), (400, run.checkpoint(400))]
    assert run.checkpoint(12).name == "step-00000012"


def test_the_last_line_of_what_a_program_said() -> None:
    assert last_line("first\n  last \n\n  \n") == "last"
    assert last_line(" \n") == ""
