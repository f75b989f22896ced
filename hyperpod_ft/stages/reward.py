"""Stage `reward`: copy the user's reward functions into the run, and try every function on CPUs.

python -m hyperpod_ft.stages.reward RUN_DIR

Prompts without a column that a function compares with, columns of which it rewards nothing, and functions that fail on
the first prompt, are found before accelerators are held. The training calls the copies.
"""

import contextlib
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.config import sources
from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.data.prepared import Prompts
from hyperpod_ft.errors import UserError
from hyperpod_ft.rewards.process import NoRewardError, RewardProcess
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main

_ANSWER = "An answer."
_TRIED = 20  # prompts


def work(run: Run) -> Result:
    with publish.new_directory(run.paths.reward_files) as directory:
        for number, reward in enumerate(run.config.reward):
            if reward.file is not None:
                key = f"reward.{number}"
                # it may have changed since the run was submitted
                sources.resolve_path(f"{key}.function", reward.file, f"{key}.revision", reward.revision, Path("/"))
                shutil.copyfile(reward.file, directory / f"{number}.py")
        prompts = Prompts(run.paths.dataset_path / "train")
        _check_columns(run.config.reward, prompts)
        prompt = prompts[0]
        for number, reward in enumerate(run.config.reward):
            process = RewardProcess(reward, directory / f"{number}.py" if reward.file else None)
            with contextlib.closing(process):
                try:
                    value = process(prompt.text, _ANSWER, prompt.columns)
                except NoRewardError as error:
                    raise UserError(
                        f"reward.{number}.function: {reward.known_as} {error}; it was called with {prompt.where}",
                        "correct it, or the columns of the dataset",
                    ) from error
                if reward.column:
                    _check_rewarded(f"reward.{number}", reward, process, prompts)
            print(f"reward: {reward.known_as} gives {_ANSWER!r} to {prompt.where}: {value}", flush=True)
    copied = [run.paths.reward_files] if any(reward.file for reward in run.config.reward) else []
    return Result(copied, {"functions": [reward.known_as for reward in run.config.reward]})


def _check_rewarded(key: str, reward: Reward, process: RewardProcess, prompts: Prompts) -> None:
    """Raise UserError when none of the first prompts' expected answers gets a reward, for math_verify as math."""
    assert reward.column
    for prompt in itertools.islice(prompts, _TRIED):
        expected = str(prompt.columns[reward.column])
        answer = f"${expected}$" if "\\" in expected and "$" not in expected else expected
        with contextlib.suppress(NoRewardError):
            if process(prompt.text, answer, prompt.columns):
                return
    raise UserError(
        f"{key}.column: {reward.known_as} rewards no answer that is the expected one, such as"
        f" {shown(prompts[0].columns[reward.column])} of {prompts[0].where}",
        "choose another column, or function exact_match",
    )


def _check_columns(rewards: Sequence[Reward], prompts: Prompts) -> None:
    """Raise UserError for a prompt without a column that a function compares with."""
    needed = {reward.column: f"reward.{number}.column" for number, reward in enumerate(rewards) if reward.column}
    for prompt in prompts if needed else ():
        if missing := needed.keys() - prompt.columns.keys():
            column = min(missing)
            said = f"{needed[column]}: {prompt.where} has no column {shown(column)}"
            raise UserError(said, "correct it, or the dataset")


if __name__ == "__main__":
    main("reward", work)
