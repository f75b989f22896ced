"""What a handler gets from DJL Serving, and gives it: as in engines/python/setup/djl_python of djl-serving 0.36."""

from collections.abc import Callable, Iterator
from typing import Any


class Input:
    """A request: its properties are headers and the model's options; without content it asks to load the model."""

    def __init__(self, properties: dict[str, str], content: bytes | None = None) -> None:
        self.properties, self._content = properties, content

    def get_property(self, key: str) -> str | None:
        return next((value for name, value in self.properties.items() if name.lower() == key.lower()), None)

    def is_empty(self) -> bool:
        return self._content is None

    def get_as_bytes(self) -> bytearray | None:
        return None if self._content is None else bytearray(self._content)


class Output:
    """An answer: whole, or as a stream, which is read once the handler has returned."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code, self.message = code, message
        self.properties: dict[str, str] = {}
        self.pieces: Iterator[Any] = iter(())
        self.finish: Callable[[], Any] = lambda: None

    def add_property(self, key: str, val: str) -> "Output":
        self.properties[key] = val
        return self

    def add(self, value: bytes) -> "Output":
        self.pieces = iter([value])
        return self

    def add_stream_content(self, stream_content: Iterator[Any], output_formatter: Callable[[Any], Any] | None) -> None:
        assert output_formatter is None, "the default one would wrap each piece in JSON"
        self.pieces = stream_content

    def finalize(self, finalize_function: Callable[..., Any], *args: Any) -> "Output":
        self.finish = lambda: finalize_function(*args)
        return self
