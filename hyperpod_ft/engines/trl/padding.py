"""Whether a model computes padded texts as it computes them alone, and samples their answers so.

TRL gives the texts of some objectives an attention mask and no positions: recurrences, and positions that are learned,
may take padding for text.
"""

from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hyperpod_ft.engines.certificate.alone import TOLERANCE, difference
from hyperpod_ft.engines.certificate.model import documents
from hyperpod_ft.errors import UserError

_ANSWER = 4  # tokens


@torch.no_grad()
def check_padded(model: PreTrainedModel, side: Literal["left", "right"], refused: str) -> None:
    """Raise UserError where padding at this side changes logits or scores. `refused`: what is not possible then."""
    padded = model(**_padded(side), use_cache=False).logits
    for ids, found in zip(documents(), padded, strict=True):
        expected, length = model(input_ids=ids, use_cache=False).logits[0], ids.shape[1]
        own = found if found.ndim == 1 else found[-length:] if side == "left" else found[:length]
        if (off := difference(own, expected)) > TOLERANCE:
            raise _error(refused, f"padding at the {side} changes what the model makes of a text, by {off:.0e}")


@torch.no_grad()
def check_answers(model: PreTrainedModel, refused: str) -> None:
    """Raise UserError where answers that are sampled together have other logits than each text alone has."""
    generate: Any = model.generate  # whose annotations transformers leaves out
    answers = generate(
        **_padded("left"),
        max_new_tokens=_ANSWER,
        min_new_tokens=_ANSWER,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(answers.logits, 1)
    for ids, sequence, found in zip(documents(), answers.sequences, logits, strict=True):
        text = torch.cat([ids, sequence[None, -_ANSWER:]], 1)
        expected = model(input_ids=text, use_cache=False).logits[0, -_ANSWER - 1 : -1]
        if (off := difference(found, expected)) > TOLERANCE:
            raise _error(refused, f"answers are not sampled as the model computes them, by {off:.0e}")


def _padded(side: str) -> dict[str, torch.Tensor]:
    """The documents as TRL gives them to a model: ids, and 1 for each of their tokens, int64 [documents, longest]."""
    texts = [ids[0] for ids in documents()]
    columns = {"input_ids": texts, "attention_mask": [torch.ones_like(ids) for ids in texts]}
    return {name: pad_sequence(each, batch_first=True, padding_side=side) for name, each in columns.items()}


def _error(refused: str, what: str) -> UserError:
    return UserError(f"{refused}: {what}", "choose a model of another type")
