"""Example: a raw row as text, or one of the two documents of a pair."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.data.text.conversation import Conversation


@dataclass(frozen=True)
class Segment:
    """A piece of an example's text; `trained` says whether the loss is on its tokens.

    `untrained`: its first characters, whose tokens are not; they are encoded together with the others.
    """

    text: str
    trained: bool
    untrained: int = 0


@dataclass(frozen=True)
class Example:
    """`segments` in order are the whole text; prompt and completion are for a reader who compares answers.

    For `chat` they differ from the segments: the completion is the last answer without its markup.
    """

    prompt: str
    completion: str
    segments: tuple[Segment, ...]
    templated: bool = False  # a chat template wrote it, with its special tokens
    conversation: "Conversation | None" = field(default=None, compare=False)  # that it is of
    places: tuple[int, ...] = ()  # of its turns in the conversation; every other segment is one of them
    loses_reasoning: int = 0  # turns whose reasoning the chat template does not write
    desirable: bool | None = None  # of an unpaired preference: its label

    @property
    def images(self) -> tuple[bytes, ...]:
        """Those before its last turn."""
        return self.conversation.images_before(self.places[-1]) if self.conversation else ()

    @property
    def image_names(self) -> tuple[str, ...]:
        return self.conversation.image_names_before(self.places[-1]) if self.conversation else ()

    def without_images(self) -> "Example":
        """The same without the files of its images, which may be much larger than its text."""
        return replace(self, conversation=replace(self.conversation, images=())) if self.conversation else self


class RowError(UserError):
    """Why a raw row cannot become an example. Bad rows are counted by `reason`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
