"""The images of prompts in section `generate`: where a prompt names them, and the user's files, pinned as others are.

A pinned image has `path`, as the user wrote it, `source`, where the file is, and `revision`, its digest.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.config import sources
from hyperpod_ft.config.fields import shortened
from hyperpod_ft.errors import UserError

Prompt = str | dict[str, Any]

COLUMNS = ("images", "image")
PARTS = ("image", "image_url", "input_image")  # types of parts of messages
# Those that most have. Pillow reads many more, some with programs of their own.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
KEYS = ("image", "image_url", "url", "path")  # of such a part; without any, it is the next of the row's column
# How files of these formats begin. The command `plan` may have no Pillow.
_BEGINNING = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF.{4}WEBP|GIF8[79]a|BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0{3}"
    rb"|II[*+]\0|MM\0[*+]",
    re.DOTALL,
)


def changed(prompt: Prompt, change: Callable[[Any], Any]) -> Prompt:
    """The prompt with each image in a column or in a part of a message changed."""
    if isinstance(prompt, str):
        return prompt
    found = dict(prompt)
    for column in COLUMNS:
        if given := prompt.get(column):
            found[column] = [change(image) for image in given] if isinstance(given, list) else change(given)
    if isinstance(messages := prompt.get("messages"), list):
        found["messages"] = [_message(message, change) for message in messages]
    return found


def of(prompt: Prompt) -> list[Any]:
    """The images of a prompt."""
    found = list[Any]()
    changed(prompt, found.append)
    return found


def pinned(prompt: Prompt, where: str, base: Path) -> Prompt:
    """The prompt with its files pinned; relative paths are relative to `base`. `where` names the prompt in errors.

    Raises UserError unless each is an existing picture, whose content must match a `revision` that is there already.
    What names no file has none.
    """

    def pin(image: Any) -> Any:
        if (path := path_of(image)) is None:
            return {key: image[key] for key in image if key != "revision"} if isinstance(image, dict) else image
        name, revision = (image.get("path", path), image.get("revision")) if isinstance(image, dict) else (path, None)
        found = sources.resolve_path(where, path, where, revision, base)
        if not Path(found.source).is_file():
            raise UserError(f"{where}: {shortened(found.source)} is not a file", "name the file of a picture")
        check_file(where, Path(found.source))
        return {"path": name, "source": found.source, "revision": found.revision}

    return changed(prompt, pin)


def check_file(where: str, file: Path) -> None:
    """Raise UserError unless the file begins as a picture does: a run's copies may be read by others."""
    with file.open("rb") as stream:
        if _BEGINNING.match(stream.read(32)):
            return
    problem = f"{where}: {file}: image that cannot be read: not one of {', '.join(FORMATS)}"
    raise UserError(problem, "name the file of a picture")


def without_sources(prompt: Prompt) -> Prompt:
    """The prompt without where its pinned files are: what is in them counts."""
    return changed(
        prompt, lambda image: {"path": image["path"], "revision": image["revision"]} if is_pinned(image) else image
    )


def is_pinned(image: Any) -> bool:
    return isinstance(image, Mapping) and {"path", "source", "revision"} <= image.keys()


def path_of(image: Any) -> str | None:
    """The path of an image's file; None for a URL, and for what names no file."""
    if isinstance(image, Mapping):
        image = image.get("source") or image.get("url") or image.get("path")
    return image if isinstance(image, str) and not re.match(r"data:|https?://", image) else None


def _message(message: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return message | {"content": [_part(part, change) for part in message["content"]]}


def _part(part: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(part, dict) or part.get("type") not in PARTS:
        return part
    return part | {key: change(part[key]) for key in [key for key in KEYS if part.get(key)][:1]}
