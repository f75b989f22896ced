"""Unpickling without running code: a pickle may only name what the caller lists, and gets inert stand-ins for that.

torch's checkpoint index files are pickles, and a pickle is a program. The stand-ins keep the state handed to them and
do nothing else, so that even a hostile file can at worst describe a checkpoint that does not exist.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.errors import UserError

Names = Mapping[tuple[str, str], Any]


class Inert:
    """Replaces an object of any class: keeps its arguments and state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        # called only for fields of the dataclass that it replaces
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


def inert(*_arguments: Any) -> None:
    """Replaces a function whose result is not needed."""


def loads(content: bytes, names: Names, where: Path, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The object in a pickle. Raises UserError when the pickle is damaged or names anything outside `names`."""
    try:
        _refuse_large_memo(content)
        return _Unpickler(io.BytesIO(content), names, where, persistent).load()
    except UserError:
        raise
    # a damaged pickle may raise nearly anything
    except Exception as error:
        raise UserError(
            f"{where}: cannot be read: {type(error).__name__}: {error}",
            "the file is damaged: use an earlier checkpoint",
        ) from error


def _refuse_large_memo(content: bytes) -> None:
    # the C unpickler makes room for every index up to the one named
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise pickle.UnpicklingError(f"memo index {argument}")


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        stream: io.BytesIO,
        names: Names,
        where: Path,
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(stream)
        self._names = names
        self._where = where
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise UserError(
                f"{self._where}: refused: names {module}.{name}, which no checkpoint needs",
                "do not use the file unless you trust its source",
            )
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("holds an external reference")
        return self._persistent(pid)
