"""Columns of raw rows that a dataset format does not use: some would change the training, the others only describe."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from hyperpod_ft.config import prompt_images
from hyperpod_ft.config.sections.inputs import TEXT_OR_MESSAGES, Dataset
from hyperpod_ft.data.text.conversation import BESIDE_MESSAGES
from hyperpod_ft.errors import UserError

_USED = {
    "dolly": ("instruction", "context", "response"),
    "alpaca": ("instruction", "input", "output"),
    "prompt-completion": ("prompt", "completion"),
    "chat": ("messages", "conversations", "prompt", "completion", *BESIDE_MESSAGES),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected", *BESIDE_MESSAGES),
    "unpaired-preference": ("prompt", "completion", "label", *BESIDE_MESSAGES),
    "prompt": ("prompt", *BESIDE_MESSAGES),
}
_UNSEEN = "the model would not see {it}"
_CONVERSATION = ("system", "system_prompt", "history")
_ALIKE = "all would count alike"
# Columns by which other tools train in another way, and what leaving them out does.
_TRAINED_ELSEWHERE = {
    **dict.fromkeys(prompt_images.COLUMNS, "without dataset.images, the kit trains on text only"),
    **dict.fromkeys(("video", "videos", "audio", "audios"), _UNSEEN),
    **dict.fromkeys(_CONVERSATION, _UNSEEN),
    **dict.fromkeys(("tools", "functions", "chat_template_kwargs"), "the chat template would not get {it}"),
    **dict.fromkeys(("weight", "weights", "sample_weight"), _ALIKE),
    "label": "answers that are marked as wrong would be learned",
}
_OF_MESSAGES = {"weight": _ALIKE, "train": _ALIKE, "training": _ALIKE}
LISTED = 50  # columns; a row may have any number


def used(dataset: Dataset) -> frozenset[str]:
    """The columns that make the text of an example."""
    if dataset.prompt_template is None and dataset.completion_template is None:
        return frozenset((*_USED[dataset.format], *(prompt_images.COLUMNS if dataset.images else ())))
    from jinja2 import meta  # noqa: PLC0415 - only this format needs it
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    environment = ImmutableSandboxedEnvironment()
    sources = (dataset.prompt_template or "", dataset.completion_template or "")
    return frozenset().union(*(meta.find_undeclared_variables(environment.parse(source)) for source in sources))


class UnusedColumns:
    """The columns of the rows seen so far that the format does not use; `names` has at most 50 of them."""

    def __init__(self, dataset: Dataset) -> None:
        self.names: set[str] = set()
        self._format = dataset.format
        self._used = used(dataset)
        self._with_messages = sorted(self._used) if dataset.format in ("template", *TEXT_OR_MESSAGES) else ()
        self._for_rewards = not dataset.has_answers
        self._ignored = frozenset(dataset.ignored_columns)

    def add(self, where: str, row: Mapping[str, Any]) -> None:
        """Raises UserError for a row with a column that would change the training; `where` is its file and line."""
        unused = row.keys() - self._used
        if not self._for_rewards and not unused <= self.names and len(self.names) < LISTED:
            self.names.update(sorted(unused)[: LISTED - len(self.names)])
        changing = {name: why for name, why in self._changing(row, unused) if name not in self._ignored}
        if changing:
            names, (noun, it) = ", ".join(changing), ("column", "it") if len(changing) == 1 else ("columns", "them")
            why = next(iter(changing.values())).format(it=it)
            instead = f"put {it} into the messages of format chat, " if changing.keys() <= {*_CONVERSATION} else ""
            raise UserError(
                f"{where}: format {self._format} does not use {noun} {names}: {why}",
                f"{instead}remove {it}, or to train without {it} set dataset.ignored_columns to [{names}]",
            )

    def _changing(self, row: Mapping[str, Any], unused: Set[str]) -> Iterator[tuple[str, str]]:
        for name in () if unused.isdisjoint(_TRAINED_ELSEWHERE) else sorted(unused & _TRAINED_ELSEWHERE.keys()):
            # a class is no mark of wrong answers, as KTO's are
            if row[name] is False if name == "label" else _says_something(row[name]):
                yield name, _TRAINED_ELSEWHERE[name]
        for column in self._with_messages:
            messages = row.get(column)
            for message in messages if isinstance(messages, list) else ():
                for key in _OF_MESSAGES.keys() & message.keys() if isinstance(message, dict) else ():
                    if _says_something(message[key]):
                        yield f"{column}.{key}", _OF_MESSAGES[key]


def _says_something(value: Any) -> bool:
    """Not for empty values, as parquet files have in rows without the column, nor for a weight of one."""
    return value not in (None, "", [], {}) and value != 1
