"""Prompts as TRL's trainer reads them, and the rewards of its answers.

TRL tokenizes text with the special tokens that its tokenizer adds, here only the BOS that the kit adds. The kit has
rendered messages already: each prompt becomes one message, which a chat template writes again as it is.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.data.prepared import Prompt, Prompts
from hyperpod_ft.data.tokenizer import bos_ids
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.errors import UserError
from hyperpod_ft.rewards.process import NoRewardError, RewardProcess
from hyperpod_ft.runs.results.sampled_answers import SampledAnswer

_ROW = "row"
_AS_IT_IS = "{{ messages[0]['content'] }}"
_SHOWN = 60  # characters of an answer in a message


def with_prompts(order: Dataset, prompts: Prompts, tokenizer: Any) -> Dataset:
    """The rows of `order`, each with its prompt: text, or a message of what a chat template wrote.

    The tokenizer, of transformers, is changed: it makes of them the tokens of the prepared rows.
    """
    opening = str(tokenizer.bos_token) if bos_ids(tokenizer) else ""
    tokenizer.add_bos_token, tokenizer.add_eos_token = bool(opening), False
    tokenizer.chat_template = _AS_IT_IS

    def given(prompt: Prompt) -> Any:
        return [{"role": "user", "content": prompt.text}] if prompt.templated else prompt.text.removeprefix(opening)

    def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        return {"prompt": [given(prompts[row]) for row in batch[_ROW]], _ROW: batch[_ROW]}

    return order.with_transform(read)


class RewardFunction:
    """One function of the run file as TRL calls it. Answers on which it fails get no reward of it, and are printed."""

    def __init__(
        self, number: int, reward: Reward, process: RewardProcess, prompts: Prompts, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.__name__ = reward.known_as  # in TRL's metrics
        self._key, self._process, self._prompts, self._tokenizer = f"reward.{number}", process, prompts, tokenizer
        self.first: tuple[str, str, float | None] = ("", "", None)
        """Of the newest step, the first prompt on this rank, its first answer, and that answer's reward."""

    def __call__(self, *, completion_ids: list[list[int]], row: Sequence[int], **_: Any) -> list[float | None]:
        """The rewards on this rank. Raises UserError, on every rank, when the function has failed on the whole step."""
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        rewards: list[float | None] = []
        failed: list[str] = []
        for text, number in zip(texts, row, strict=True):
            prompt = self._prompts[number]
            try:
                rewards.append(self._process(prompt.text, text, prompt.columns))
            except NoRewardError as error:
                failed.append(f"{self.__name__} {error}; the answer {text[:_SHOWN]!r} to {prompt.where}")
                print(f"train: {self._key}: {failed[-1]} gets no reward of it", flush=True)
                rewards.append(None)
        if not any(gather_object([len(failed) < len(rewards)])):  # TRL calls it once a step on every rank
            raise UserError(f"{self._key}.function: {failed[0]}, and all others of the step", "correct the function")
        self.first = self._prompts[row[0]].text, texts[0], rewards[0]
        return rewards


def first_answer(step: int, functions: Sequence[RewardFunction]) -> SampledAnswer:
    """The first answer of the step that the functions were called in last."""
    prompt, answer, _ = functions[0].first
    return SampledAnswer(step, prompt, answer, {function.__name__: function.first[2] for function in functions})


def reward_functions(
    task: TrainingTask, prompts: Prompts, tokenizer: PreTrainedTokenizerBase, ends: ExitStack
) -> list[RewardFunction]:
    """The run's functions, each with its process until `ends` is closed."""
    functions = []
    for number, reward in enumerate(task.config.reward):
        process = RewardProcess(reward, task.reward_files / f"{number}.py" if reward.file else None)
        ends.callback(process.close)
        functions.append(RewardFunction(number, reward, process, prompts, tokenizer))
    return functions
