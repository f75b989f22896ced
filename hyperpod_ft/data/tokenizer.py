"""The base model's tokenizer in transformers, and how one prompt becomes token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from hyperpod_ft.errors import UserError


class Tokenizer(Protocol):
    """What the data code uses of transformers' PreTrainedTokenizerFast."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    @property
    def backend_tokenizer(self) -> Any: ...
    @property
    def special_tokens_map(self) -> dict[str, Any]: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    def __call__(self, text: str) -> Any: ...
    def get_chat_template(self) -> str: ...


def load(model: Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises UserError when there is none, or one without EOS."""
    import transformers  # noqa: PLC0415 - a second to import, three more where torch is wanted

    loader: Any = transformers.AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise UserError(f"{model}: no usable tokenizer: {reason}", "give a model that has one") from error
    if not tokenizer.is_fast:
        raise UserError(f"{model}: its tokenizer has no fast form", "add a tokenizer.json to the model")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{model}: its tokenizer has no EOS token", "name eos_token in tokenizer_config.json")
    return cast(Tokenizer, tokenizer)


def bos_ids(tokenizer: Tokenizer) -> list[int]:
    """`[bos]` when the tokenizer opens a text with it, else `[]`."""
    opening = list(tokenizer("")["input_ids"][:1])
    return opening if opening and opening[0] == tokenizer.bos_token_id else []


def pad_id(tokenizer: Tokenizer) -> int:
    """What fills a row's end. Its label is -100 and its segment is its own, so EOS does where there is no PAD."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0


def encode(library: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text by itself, without special tokens around it; those written in the text are recognised.

    `library`: a tokenizer of the `tokenizers` library.
    """
    library.no_truncation()  # a tokenizer.json may carry both
    library.no_padding()
    return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, chat: bool = False) -> list[int]:
    """A prompt's ids exactly as in training: BOS first where the tokenizer adds one and the text has none.

    A chat template writes all special tokens itself: with `chat` nothing is added.
    """
    ids = encode(tokenizer.backend_tokenizer, [prompt])[0]
    opening = [] if chat else bos_ids(tokenizer)
    return ids if ids[:1] == opening else opening + ids
