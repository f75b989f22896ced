"""`sampled.json`: answers of some steps of a training that samples them, with their rewards."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hyperpod_ft import publish

_STEPS = 10
_CHARACTERS = 2_000  # kept of each text


@dataclass(frozen=True)
class SampledAnswer:
    """The first answer of a step. `rewards`: by the names of the functions; None: it got none of this one."""

    step: int
    prompt: str
    answer: str
    rewards: Mapping[str, float | None]


_ANSWERS = TypeAdapter(tuple[SampledAnswer, ...])


def is_kept(step: int, steps: int) -> bool:
    """Whether the file has an answer of the step: the first, the last, and others evenly between, ten in all."""
    return step in {1 + round(number * (steps - 1) / (_STEPS - 1)) for number in range(_STEPS)}


def keep(path: Path, answer: SampledAnswer) -> None:
    """Add the answer, in place of what the file has from its step on: a restart trains these steps again."""
    kept = [earlier for earlier in read(path) if earlier.step < answer.step]
    kept.append(SampledAnswer(answer.step, answer.prompt[:_CHARACTERS], answer.answer[:_CHARACTERS], answer.rewards))
    publish.write_json(path, _ANSWERS.dump_python(tuple(kept)))


def read(path: Path) -> tuple[SampledAnswer, ...]:
    """The answers, oldest first; none without the file, or if it is damaged."""
    try:
        return _ANSWERS.validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return ()
