"""What documents train alone, by transformers: what an engine's rows of them are compared with."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hyperpod_ft.checkpoint.formats import image_text, pretrained
from hyperpod_ft.data.packing import PackedRows
from hyperpod_ft.engines.batches import Batch
from hyperpod_ft.engines.certificate.model import NotBuiltError, documents
from hyperpod_ft.engines.certificate.small import VOCABULARY
from hyperpod_ft.errors import UserError, printable

TOLERANCE = 1e-4  # relative to the largest value of a tensor
_UNCHANGED = 1e-5  # of the same operations, of which some share a matrix with other numbers
_LEAST = 1e-2  # of the largest gradient of all
_TINY = 1e-30


@dataclass(frozen=True)
class Trained:
    """What a step of training would do: the loss summed over each document, fp32 [documents], and gradients by name."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, losses: torch.Tensor) -> "Trained":
        model.zero_grad()
        losses.sum().backward()
        found = ((name, parameter.grad) for name, parameter in model.named_parameters())
        return cls(losses.detach(), {name: gradient.clone() for name, gradient in found if gradient is not None})

    def in_whole(self, directory: Path) -> "Trained":
        """The same, with the names that the image-text model in `directory`, if it is one, has for its parameters."""
        names = image_text.names_in_whole(directory, self.gradients)
        return replace(self, gradients={names.get(name, name): value for name, value in self.gradients.items()})

    def differs(self, expected: "Trained", tolerance: float = TOLERANCE) -> str:
        """What differs by more than rounding; empty when nothing does."""
        if (off := difference(self.losses, expected.losses)) > tolerance:
            return f"their losses are {off:.0e} off"
        # one that is zero but for rounding, as of a key's bias, has no scale of its own
        least = _LEAST * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
        for name in sorted(self.gradients.keys() | expected.gradients.keys()):
            one, other = (each.gradients.get(name, torch.zeros(())) for each in (self, expected))
            if (off := difference(one, other, least)) > tolerance:
                return f"the gradients of {name} are {off:.0e} off"
        return ""


def difference(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """The largest, relative to the largest value, or to `least`; infinite for what is not a number."""
    off = float((found - expected).abs().max()) / max(float(expected.abs().max()), least, _TINY)
    return math.inf if math.isnan(off) else off


def alone(directory: Path) -> Trained:
    """Each document in a batch of its own, by transformers alone: its attention, logits and loss.

    Raises NotBuiltError when transformers cannot compute the small model, or its tokens do not depend on one another.
    """
    try:
        model = pretrained.load(directory, torch.float32, "eager").train()
        losses = []
        for ids in documents():
            logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
            losses.append(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum"))
        mixes = _mixes(model)
    except Exception as error:  # transformers' classes raise errors of any type
        raise NotBuiltError.of(error) from error
    if not mixes:
        raise NotBuiltError("no token of the small model sees another")
    return Trained.of(model, torch.stack(losses))


@torch.no_grad()
def _mixes(model: PreTrainedModel) -> bool:
    """Whether a document's third logits depend on its first token; where they do not, nothing can be seen to leak."""
    ids = documents()[0]
    changed = torch.cat([(ids[:, :1] + 1) % VOCABULARY, ids[:, 1:]], 1)
    one, other = (model(input_ids=each, use_cache=False).logits[0, 2] for each in (ids, changed))
    return difference(other, one) > 10 * TOLERANCE


def why_not_apart(
    directory: Path,
    expected: Trained,
    build: Callable[[], PreTrainedModel],
    *losses: Callable[[PreTrainedModel, int], torch.Tensor],
) -> str:
    """Why an engine would not train the documents of one row as `expected`, alone; empty when it would.

    `build` gives its model of `directory`; each of `losses` those of a packed row's documents, [documents], by the seed
    of the first one (model.py).
    """
    try:
        model = build()
        for of_seed in losses:
            before, changed = (Trained.of(model, of_seed(model, seed)[1:]) for seed in (1, 5))
            if seen := changed.differs(before, _UNCHANGED):
                return f"documents of a row see one another: when the first one changes, of the others {seen}"
            found = Trained.of(model, of_seed(model, 1))
            if found.gradients.keys() != expected.gradients.keys():  # of a language model without its whole
                found = found.in_whole(directory)
            if apart := found.differs(expected):
                return f"documents of a row do not train as they do alone: {apart}"
    except UserError as error:
        return error.problem.removeprefix("model.source: ")
    except Exception as error:  # a class that expects another mask raises errors of any type
        return "its attention does not take the documents of a row: " + printable(" ".join(str(error).split()))[:200]
    return ""


def batch_of(found: PackedRows) -> Batch:
    """The rows as an engine reads them."""
    return Batch(**{name: torch.from_numpy(array).long() for name, array in vars(found).items()})
