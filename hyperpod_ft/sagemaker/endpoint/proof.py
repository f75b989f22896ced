"""The proof of an endpoint: its greedy answers to the run's own prompts next to those of samples.json. Pure.

The container computes in another precision, in other batches and with other kernels than stage generate, so that a
right answer may leave the recorded one at a token that is almost as likely. A wrong model (the base without its
adapter, another prompt format) answers otherwise from the start. So each answer is also compared with the base model's.
"""

from dataclasses import asdict, dataclass
from typing import Any

from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results.samples import RecordedAnswers


@dataclass(frozen=True)
class ComparedAnswer:
    """The endpoint's answer to a prompt of samples.json, beside the recorded ones."""

    recorded: RecordedAnswers
    answer: str

    @property
    def distinguishing(self) -> bool:
        """Whether the answer shows which of the two models gave it."""
        return self.recorded.base.strip() != self.recorded.tuned.strip()

    @property
    def equal(self) -> bool:
        return self.answer.strip() == self.recorded.tuned.strip()

    @property
    def like_tuned(self) -> bool:
        """Whether the answer agrees with the tuned model's for longer than with the base model's."""
        return self._agrees(self.recorded.tuned) > self._agrees(self.recorded.base)

    def _agrees(self, recorded: str) -> int:
        answer, recorded = self.answer.strip(), recorded.strip()
        pairs = enumerate(zip(answer, recorded, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), min(len(answer), len(recorded)))
        # an answer that ends where the recorded one does agrees for longer than one that continues
        return same + (answer == recorded)


@dataclass(frozen=True)
class Proof:
    """The endpoint's answers to the recorded prompts, compared with the recorded answers."""

    asked: tuple[ComparedAnswer, ...]

    @property
    def equal(self) -> int:
        return sum(one.equal for one in self.asked)

    @property
    def different(self) -> list[ComparedAnswer]:
        """The answers that do not equal samples.json."""
        return [one for one in self.asked if not one.equal]

    @property
    def distinguishing(self) -> int:
        return sum(one.distinguishing for one in self.asked)

    @property
    def like_tuned(self) -> int:
        """How many of the distinguishing answers agree with the tuned model's for longer than with the base model's."""
        return sum(one.like_tuned for one in self.asked if one.distinguishing)

    @property
    def holds(self) -> bool:
        """Whether the endpoint answers like the tuned model: more than half of the distinguishing answers do."""
        return 2 * self.like_tuned > self.distinguishing or (self.distinguishing == 0 and self.equal == len(self.asked))

    def summary(self) -> str:
        return (
            f"{self.equal} of {len(self.asked)} answers equal samples.json; of {self.distinguishing} where base and"
            f" tuned model differ, {self.like_tuned} are nearer to the tuned one"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "answers": len(self.asked),
            "equal": self.equal,
            "distinguishing": self.distinguishing,
            "like_tuned": self.like_tuned,
            "asked": [asdict(one.recorded) | {"answer": one.answer, "equal": one.equal} for one in self.asked],
        }


def completion_request(recorded: RecordedAnswers, model: str | None, max_new_tokens: int) -> dict[str, Any]:
    """The request for a completion as stage generate makes it: greedy, regardless of generation_config.json."""
    request: dict[str, Any] = {
        "prompt": recorded.prompt,
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "add_special_tokens": not recorded.templated,
    }
    return request if model is None else {"model": model, **request}


def completion_text(answer: dict[str, Any]) -> str:
    """The text of a server's answer. Raises UserError when it is not an OpenAI completion."""
    try:
        return str(answer["choices"][0]["text"])
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"the endpoint's answer is not a completion: {str(answer)[:200]}", "see `hyperpod-ft deploy logs`"
        ) from error
