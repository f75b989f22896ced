"""The proof, on prepared tokens, that conversations are trained as they are served: contexts, masks, ends of turns."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.images.reader import ImageReader
from hyperpod_ft.data.inspection import shown
from hyperpod_ft.data.mixing.sources import ReadExample
from hyperpod_ft.data.reading import RawRow
from hyperpod_ft.data.report import ChatReport, EndOfTurn
from hyperpod_ft.data.stored.token_stream import StoredTokens
from hyperpod_ft.data.text import chat, formats
from hyperpod_ft.data.text.example import Example
from hyperpod_ft.data.text.formats import RowImages
from hyperpod_ft.data.tokenization import ChatCount
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError, printable

ROWS = 100  # that are compared
_AROUND = 12  # tokens of each text around a difference


def chat_report(
    counts: ChatCount, base_model: Path, encoder: Encoder, found: Mapping[int, ReadExample], tokens: StoredTokens
) -> ChatReport:
    """The report on conversations. Raises UserError where one of `found` would be trained otherwise than it is served.

    `found`: sampled examples by their number, whose first 100 conversations are compared; `tokens`: of all examples.
    """
    assert encoder.tokenizer is not None
    stops = {encoder.eos, *model_directory.stop_ids(base_model)}
    chats = [number for number, one in found.items() if one.source.part.dataset.format == "chat"][:ROWS]
    compared = 0
    for number in chats:
        one, own = found[number], tokens.of(np.array([number]))
        (example,) = one.documents
        images, dataset = encoder.images_of(one.row, one.source.directory), one.source.part.dataset
        compared += check(one.row, example, dataset, encoder.tokenizer, own.ids, own.trained, images, encoder.images)
    return ChatReport(
        turns=counts.turns,
        unrolled=counts.unrolled,
        left_out=counts.left_out,
        loses_reasoning=counts.loses_reasoning,
        ends=tuple(
            EndOfTurn(token, encoder.decode([token]), count, token in stops)
            for token, count in sorted(counts.ends.items())
        ),
        compared_examples=len(chats),
        compared_turns=compared,
        compared_tokens=shown.tallies(found[number].shown(encoder) for number in chats),
    )


def check(
    row: RawRow,
    example: Example,
    dataset: Dataset,
    tokenizer: Tokenizer,
    ids: NDArray[np.int32],
    trained: NDArray[np.bool_],
    images: RowImages | None = None,
    reader: ImageReader | None = None,
) -> int:
    """Compare each turn's context in a prepared example with the ids that `serve` reads for the same messages.

    ids (int32 [tokens]) and trained (bool [tokens]) are those of the example, which may be cut. Returns how many turns
    were compared. Raises UserError for a difference, for a context that is trained, for an answer that is not, and for
    one that does not end with a special token, at which a server stops.
    """
    given = formats.conversation_of(dataset, row.values, images)
    learned, compared = ids.tolist(), 0
    for place in example.places:
        where = f"{row.where}: message {place + 1}"
        asked = chat.request(given, tokenizer, place)
        if reader:
            served = reader.ids(asked, given.images_before(place))
        else:
            served = tokenizers.prompt_ids(tokenizer, asked, chat=True)
        start = len(served)
        if start >= len(learned):
            break  # its answer was cut away
        if served != learned[:start]:
            raise UserError(f"{where}: {_difference(served, learned, tokenizer)}", _REMEDY)
        if dataset.loss_on == "completion" and trained[start - 1]:
            raise UserError(f"{where}: the last token of the prompt is trained", _REMEDY)
        if dataset.reasoning != "context" and not trained[start]:
            raise UserError(f"{where}: the first token of the answer is not trained", _REMEDY)
        stop = start + int(np.argmin(np.append(trained[start:], False)))
        comparable = dataset.loss_on == "completion" and dataset.reasoning != "context" and stop < len(learned)
        if comparable and learned[stop - 1] not in tokenizer.all_special_ids:
            raise UserError(f"{where}: the last token of the answer is not a special one", _REMEDY)
        compared += 1
    return compared


_REMEDY = "report this row with the model's name; to train the others, remove it"


def _difference(served: Sequence[int], learned: Sequence[int], tokenizer: Tokenizer) -> str:
    pairs = enumerate(zip_longest(served, learned[: len(served)]))
    first = next(place for place, (one, other) in pairs if one != other)
    around = slice(max(0, first - _AROUND), first + _AROUND)
    one, other = (
        printable(repr(str(tokenizer.backend_tokenizer.decode(list(text[around]), skip_special_tokens=False))))
        for text in (served, learned)
    )
    return f"a server would read other tokens than are trained, from token {first + 1}: {one}, but trained is {other}"
