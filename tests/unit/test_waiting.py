"""The wait of all tests: for a value, no longer than allowed, and not for a process that has ended."""

import subprocess
import time

import pytest

from tests.waiting import wait_for


def test_the_first_true_value_is_returned() -> None:
    values = iter([0, None, "", "found", "later"])
    assert wait_for(lambda: next(values), every=0) == "found"


def test_a_wait_in_vain_says_what_it_was_for() -> None:
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"^not so after 0\.05 s: the log$"):
        wait_for(lambda: False, 0.05, "the log", every=0.001)
    assert time.monotonic() - begun >= 0.05
    with pytest.raises(AssertionError, match=r"^not so after 0 s: 7$"):
        wait_for(lambda: False, 0, lambda: 7)
    with pytest.raises(AssertionError, match=r"^not so after 0 s$"):
        wait_for(lambda: False, 0)


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    with subprocess.Popen(["false"]) as process:
        process.wait()
        with pytest.raises(AssertionError, match=r"^the process ended before: its file$"):
            wait_for(lambda: False, what="its file", process=process)
        assert wait_for(lambda: True, process=process)
