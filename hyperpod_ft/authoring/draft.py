"""A run file that is being written: values, a comment for each key that needs one, and lines at its top and end."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hyperpod_ft.config import yaml_text
from hyperpod_ft.config.run_config import RunConfig

_WIDTH = 110


@dataclass
class Draft:
    """Values are as in a run file. Keys are written with dots, as `--set` takes them."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # comments by key
    head: list[str] = field(default_factory=list)  # lines of comment
    end: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, note: str = "") -> None:
        """Set a key, with the comment that explains the value."""
        section, _, name = key.rpartition(".")
        (self.values.setdefault(section, {}) if section else self.values)[name] = value
        if note:
            self.notes[key] = note
        else:
            self.notes.pop(key, None)

    def default(self, key: str, value: Any, note: str = "") -> None:
        """Set a key that has no value yet."""
        if self.get(key) is None:
            self.set(key, value, note)

    def get(self, key: str) -> Any:
        """The value of a key; None if it has none."""
        section, _, name = key.rpartition(".")
        return (self.values.get(section, {}) if section else self.values).get(name)

    def drop(self, key: str) -> bool:
        """Remove a key of a section; whether it had a value that is not false."""
        section, _, name = key.partition(".")
        found = self.values.get(section, {})
        value = found.pop(name, None)
        if not found:
            self.values.pop(section, None)
        return bool(value)

    def text(self) -> str:
        """The run file, its sections and keys in the order of docs/run-file.md."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for line in self.head:
            yield from _comment(line, "")
        for name, known in RunConfig.model_fields.items():
            if name not in self.values:
                continue
            section = self.values[name]
            if not isinstance(section, dict):
                yield from [""] * isinstance(section, list)
                yield from self._entry(name, name, section, "")
                continue
            yield from ("", f"{name}:")
            # of an optional section, the section
            fields = getattr(known.annotation, "model_fields", section)
            for key in sorted(section, key=list(fields).index):
                yield from self._entry(f"{name}.{key}", key, section[key], "  ")
        if self.end:
            yield ""
        for line in self.end:
            yield from _comment(line, "")

    def _entry(self, path: str, key: str, value: Any, indent: str) -> Iterator[str]:
        lines = textwrap.indent(yaml_text.dump_values({key: value}).rstrip(), indent).splitlines()
        note = self.notes.get(path, "")
        if note and len(lines) == 1 and len(lines[0]) + len(note) + 4 <= _WIDTH:
            yield f"{lines[0]}  # {note}"
            return
        yield from _comment(note, indent) if note else ()
        yield from lines


def _comment(text: str, indent: str) -> list[str]:
    # what a comment quotes may have line breaks of its own
    return textwrap.wrap(" ".join(text.split()), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
