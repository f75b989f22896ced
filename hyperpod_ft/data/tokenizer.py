"""The base model's tokenizer in transformers, and the token ids of a prompt."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from hyperpod_ft.errors import UserError
from hyperpod_ft.shipped import installing


class Tokenizer(Protocol):
    """The part of transformers' fast tokenizers that this package uses."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    @property
    def backend_tokenizer(self) -> Any: ...
    @property
    def special_tokens_map(self) -> dict[str, Any]: ...
    @property
    def all_special_tokens(self) -> list[str]: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    def __call__(self, text: str) -> Any: ...
    def get_chat_template(self, *, tools: Any = None) -> str: ...


def without_torch() -> None:
    """For programs that need no torch: transformers loads tokenizers and renders chats without it.

    It saves three seconds and 270 MB; the environment variable USE_TORCH no longer does, since transformers 5. Call it
    before transformers is imported; the program then cannot import torch.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that it is not


def load(model: Path) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises UserError when it is missing, slow, or has no EOS, or transformers is not installed.
    """
    try:
        import transformers  # noqa: PLC0415 - takes seconds to import
    except ModuleNotFoundError as error:
        raise UserError(
            f"{model}: reading its tokenizer needs {error.name}, which is not installed here",
            installing("torch", sys.executable),
        ) from error

    loader: Any = transformers.AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        remedy = "use a model that has one"
        if "TokenizersBackend" in reason:  # a name that transformers 4 does not know
            remedy = (
                "transformers 5 saved it: for this version, set tokenizer_class in its tokenizer_config.json to"
                " PreTrainedTokenizerFast and extra_special_tokens to {}"
            )
        raise UserError(f"{model}: no usable tokenizer: {reason}", remedy) from error
    if not tokenizer.is_fast:
        raise UserError(f"{model}: has no fast tokenizer", "add a tokenizer.json to the model")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{model}: its tokenizer has no EOS token", "set eos_token in tokenizer_config.json")
    return cast(Tokenizer, tokenizer)


def bos_ids(tokenizer: Tokenizer) -> list[int]:
    """`[bos]` if the tokenizer adds it to a text, else `[]`."""
    opening = list(tokenizer("")["input_ids"][:1])
    return opening if opening and opening[0] == tokenizer.bos_token_id else []


def pad_id(tokenizer: Tokenizer) -> int:
    """The id that pads rows: PAD, or else EOS, which is safe since padding has label -100 and its own segment."""
    assert tokenizer.eos_token_id is not None  # `load` refuses such a tokenizer
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def encode(library: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, encoded separately. Adds no special tokens, but recognizes those written in the text.

    `library`: a tokenizer of the `tokenizers` library.
    """
    library.no_truncation()  # a tokenizer.json may set both
    library.no_padding()
    return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


def offsets(library: Any, text: str) -> list[tuple[int, int]]:
    """Where the characters of each token of `encode` are in a text; tokens that share a character overlap."""
    library.no_truncation()
    library.no_padding()
    return list(library.encode(text, add_special_tokens=False).offsets)


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, chat: bool = False) -> list[int]:
    """A prompt's ids exactly as in training: with BOS, if the tokenizer adds one and the text has none.

    A chat template writes all special tokens: with `chat` none are added.
    """
    ids = encode(tokenizer.backend_tokenizer, [prompt])[0]
    opening = [] if chat else bos_ids(tokenizer)
    return ids if ids[:1] == opening else opening + ids


def beginning(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The first tokens of a text, as text."""
    library = tokenizer.backend_tokenizer
    return str(library.decode(encode(library, [text])[0][:tokens]))


def source_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """What an encoder reads, exactly as in training: the prompt's ids, then EOS."""
    assert tokenizer.eos_token_id is not None  # `load` refuses such a tokenizer
    return [*encode(tokenizer.backend_tokenizer, [prompt])[0], tokenizer.eos_token_id]
