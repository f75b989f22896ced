"""A user's function in its own process: nothing that it does stops its caller."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.rewards.process import NoRewardError, RewardProcess

FUNCTION = """
import os, subprocess, time
def fork(path):
    if not os.fork():
        time.sleep(20)
        open(path, "w")
        os._exit(0)
    time.sleep(600)
def scored(prompt, completion, *, answer, **columns):
    print("what a function prints is no answer of its process")
    what = {
        "hang": lambda: time.sleep(600),
        "exit": lambda: os._exit(3),
        "raise": lambda: 1 / 0,
        "text": lambda: "good",
        "nan": lambda: float("nan"),
        "none": lambda: None,
        "group": lambda: os.getpgid(0),
        "input": lambda: len(subprocess.run(["cat"], stdout=subprocess.PIPE).stdout),
        "fork": lambda: fork(answer),
    }
    return what[completion]() if completion in what else completion == answer
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RewardProcess]:
    (tmp_path / "rewards.py").write_text(FUNCTION)
    reward = Reward(function="rewards.py:scored", timeout=300.0)
    with closing(RewardProcess(reward, tmp_path / "rewards.py")) as started:
        yield started


@contextmanager
def taking_too_long(process: RewardProcess) -> Iterator[None]:
    """A call that does; others may take as long as a busy machine makes them."""
    patient = process.reward
    process.reward = patient.model_copy(update={"timeout": 1.0})
    with pytest.raises(NoRewardError, match=r"^takes longer than 1 s"):
        yield
    process.reward = patient


def test_what_fails_gets_no_reward_and_the_next_answer_does(process: RewardProcess) -> None:
    with taking_too_long(process):
        process("p", "hang", {"answer": "42"})
    assert process("p", "42", {"answer": "42", "other": [1]}) == 1.0
    expected = {
        "exit": "ends its process with status 3",
        "raise": "raises ZeroDivisionError: division by zero",
        "text": "returns a str, not a number",
        "nan": "returns nan",
    }
    for completion, says in expected.items():
        with pytest.raises(NoRewardError, match=f"^{says}"):
            process("p", completion, {"answer": "42"})
        assert process("p", "42", {"answer": "42", "other": [1]}) == 1.0, completion
    assert process("p", "none", {"answer": "42"}) is None
    with pytest.raises(NoRewardError, match="missing 1 required keyword-only argument: 'answer'"):
        process("p", "42", {})


def test_a_process_ends_with_what_it_started(process: RewardProcess, tmp_path: Path) -> None:
    """What it started holds the pipes too."""
    with taking_too_long(process):
        process("p", "fork", {"answer": str(tmp_path / "survived")})
    assert not (tmp_path / "survived").exists()
    assert process("p", "42", {"answer": "42"}) == 1.0


def test_a_process_has_neither_the_signals_nor_the_input_of_its_caller(process: RewardProcess) -> None:
    assert process("p", "group", {"answer": ""}) != os.getpgid(0)
    assert process("p", "input", {"answer": ""}) == 0.0


def test_columns_may_have_the_names_of_parameters(process: RewardProcess, tmp_path: Path) -> None:
    columns = {"prompt": "x", "completion": "42"}
    assert process("p", "42", {"answer": "42", **columns}) == 1.0
    own = "def f(prompt, completion, /, **columns): return prompt == 'p' and completion == columns['completion']"
    (tmp_path / "own.py").write_text(own)
    for reward, file in (
        (Reward(function="exact_match", column="completion"), None),
        (Reward(function="own.py:f"), tmp_path / "own.py"),
    ):
        with closing(RewardProcess(reward, file)) as started:
            assert [started("p", answer, columns) for answer in ("42", "41")] == [1.0, 0.0]


def test_a_pattern_that_never_ends_is_stopped() -> None:
    reward = Reward(function="regex", pattern="(a+)+b", timeout=300.0)
    with closing(RewardProcess(reward, None)) as process:
        assert process("p", "aab", {}) == 1.0
        with taking_too_long(process):
            process("p", "a" * 64, {})


def test_a_file_that_cannot_be_loaded_says_so_each_time(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("import nothing_of_this_name\n")
    with closing(RewardProcess(Reward(function="rewards.py:f"), tmp_path / "rewards.py")) as process:
        for _ in range(2):
            with pytest.raises(NoRewardError, match="cannot be loaded: ModuleNotFoundError"):
                process("p", "c", {})


@pytest.mark.parametrize(
    ("settings", "answer", "reward"),
    [
        ({"function": "json", "json_schema": {"type": "object", "maxProperties": 1}}, '{"a": 1}', 1.0),
        ({"function": "json", "json_schema": {"type": "object", "maxProperties": 1}}, '{"a": 1, "b": 2}', 0.0),
        ({"function": "math_verify", "column": "answer"}, r"It is $\frac{4}{2}$.", 1.0),
    ],
)
def test_settings_and_packages_of_the_kits_functions_reach_the_process(
    settings: dict[str, Any], answer: str, reward: float
) -> None:
    with closing(RewardProcess(Reward.model_validate(settings), None)) as process:
        assert process("p", answer, {"answer": 2}) == reward
