"""Texts to token ids: with tiktoken if it gives the model's ids, else with the `tokenizers` library.

tiktoken takes a sixth of the time. Package `byte_level` decides for which models the ids are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft.data import tokenizer
from hyperpod_ft.data.byte_level import bpe
from hyperpod_ft.data.byte_level.bpe import ByteLevelBpe
from hyperpod_ft.data.images.reader import ImageReader
from hyperpod_ft.data.reading import RawRow
from hyperpod_ft.data.text.formats import RowImages
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError

# Separates texts that are encoded in one call: a code point that Unicode will never assign to a character.
_BOUNDARY = "\U0010ffff"


@dataclass(frozen=True)
class Encoded:
    """ids: int32 [tokens], the texts' tokens end to end; lengths: int64 [texts]."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Encoder:
    """A model's tokenizer as the dataset stage uses it."""

    backend: "LibraryBackend | RankedBackend"
    bos: tuple[int, ...]  # BOS, if the tokenizer adds it to a text
    eos: int
    pad: int
    tokenizer: Tokenizer | None  # renders chats; None if it was not needed
    unknown: int | None = None  # what stands for text that no token spells; None: every text has its tokens
    images: ImageReader | None = None  # of rows with images

    @classmethod
    def load(cls, model: Path, *, chat: bool, images: bool = False) -> "Encoder":
        """Raises UserError when the model has no usable tokenizer. `chat`: it must also render chats, `images`: those
        that have some.
        """
        if images:
            return replace(cls.load(model, chat=chat), images=ImageReader.load(model))
        described = bpe.read(model)
        ranked = RankedBackend.of(described, model / "tokenizer.json") if described else None
        if described is None or ranked is None or described.eos is None:
            return cls.of(tokenizer.load(model))
        if chat:
            return cls.of(tokenizer.load(model), ranked)
        bos = described.opening if described.opening == (described.bos,) else ()
        return cls(ranked, bos, described.eos, described.eos if described.pad is None else described.pad, None)

    def images_of(self, row: RawRow, directory: Path) -> RowImages | None:
        """The images of a row of the dataset in `directory`; None where rows have none."""
        return self.images.beside(row.folder(directory)) if self.images else None

    @property
    def special_ids(self) -> NDArray[np.int32]:
        """Those of the tokenizer's special tokens, which end turns; only of an encoder that renders chats."""
        assert self.tokenizer is not None
        return np.array(self.tokenizer.all_special_ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens; only of an encoder that renders chats."""
        assert self.tokenizer is not None
        return str(self.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where the characters of each of a text's tokens are in it."""
        return tokenizer.offsets(self._library, text)

    def token(self, token: int) -> str:
        """How the tokenizer writes a special token."""
        return str(self._library.id_to_token(token))

    def check_ids(self, ids: Mapping[str, int]) -> None:
        """Raise UserError unless each of these tokens of tokenizer.json is encoded to its id there, and decoded again.

        For some models, transformers adds tokens of its own when it loads the file, or takes only a part of it. In
        byte-level vocabularies, characters stand for bytes: `é` for one that is no text alone.
        """
        for token, number in ids.items():
            if (found := self.backend.encode([token]).ids.tolist()) != [number]:
                raise UserError(
                    f"model.new_tokens: {token!r} is {number} in tokenizer.json, and {found} with transformers",
                    "load the tokenizer with transformers, save it, and give the model with these files",
                )
            text = str(self._library.decode([number], skip_special_tokens=False))
            if text.strip(" ") != token.strip(" "):
                raise UserError(
                    f"model.new_tokens: the model's tokenizer decodes {token!r} as {text!r}",
                    "choose another, such as one of ASCII characters",
                )

    @property
    def _library(self) -> Any:
        return self.tokenizer.backend_tokenizer if self.tokenizer else self.backend.library

    @classmethod
    def of(cls, loaded: Tokenizer, backend: "RankedBackend | None" = None) -> "Encoder":
        """The encoder of a tokenizer of transformers."""
        assert loaded.eos_token_id is not None  # tokenizer.load refuses such a model
        # byte-level tokenizers name one too, which they never use
        unknown = loaded.unk_token_id
        return cls(
            backend or LibraryBackend(loaded.backend_tokenizer),
            tuple(tokenizer.bos_ids(loaded)),
            loaded.eos_token_id,
            tokenizer.pad_id(loaded),
            loaded,
            None if unknown in (loaded.bos_token_id, loaded.eos_token_id) else unknown,
        )


@dataclass(frozen=True)
class LibraryBackend:
    """Any tokenizer of the `tokenizers` library.

    `reach`: how many characters beside a cut in a text show whether it changes tokens; None: all of them.
    """

    library: Any
    reach: None = None

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode each text separately. Adds no special tokens, but recognizes those written in the text."""
        ids = tokenizer.encode(self.library, list(texts))
        lengths = np.array([len(piece) for piece in ids], np.int64)
        return Encoded(np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum())), lengths)


@dataclass(frozen=True)
class RankedBackend:
    """tiktoken with the model's tokens. `library`: the same tokenizer in the `tokenizers` library."""

    encoding: Any
    added: frozenset[str]
    boundary: int
    file: Path
    # Its regex splits a text from left to right, and merges stay within what it splits: where both sides of a cut have
    # the same tokens as one text, all that follows has them, too. A longer run of spaces crosses the cut in both.
    reach: int = 64

    @classmethod
    def of(cls, described: ByteLevelBpe, file: Path) -> "RankedBackend | None":
        """The backend; None if tiktoken is not installed, or one of the model's tokens contains the boundary."""
        try:
            import tiktoken  # noqa: PLC0415 - an optional dependency
        except ImportError:
            return None
        if any(_BOUNDARY in token for token in described.added):
            return None
        boundary = 1 + max(chain(described.ranks.values(), described.added.values()))
        encoding = tiktoken.Encoding(
            file.parent.name,
            pat_str=described.pattern,
            mergeable_ranks=described.ranks,
            special_tokens=described.added | {_BOUNDARY: boundary},
        )
        return cls(encoding, frozenset(described.added), boundary, file)

    def encode(self, texts: Sequence[str]) -> Encoded:
        try:
            return self._encode(texts)
        except ValueError:  # its regex engine gives up on half a million spaces in a row
            return LibraryBackend(self.library).encode(texts)

    @cached_property
    def library(self) -> Any:
        from tokenizers import Tokenizer as Library  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415

        return Library.from_file(str(self.file))

    def _encode(self, texts: Sequence[str]) -> Encoded:
        # In one call: for short texts, the call takes longer than encoding.
        ids = self._ids(_BOUNDARY.join(texts), self.added | {_BOUNDARY})
        ends = np.flatnonzero(ids == self.boundary)
        if len(ends) + 1 == len(texts):
            lengths = np.diff(ends, prepend=-1, append=len(ids)) - 1
            return Encoded(np.delete(ids, ends), lengths)
        apart = [self._ids(text, self.added) for text in texts]
        return Encoded(
            np.concatenate([np.empty(0, np.int32), *apart]), np.array([len(piece) for piece in apart], np.int64)
        )

    def _ids(self, text: str, added: frozenset[str]) -> NDArray[np.int32]:
        ids: NDArray[np.uint32] = self.encoding.encode_to_numpy(text, allowed_special=added, disallowed_special=())
        return ids.view(np.int32)
