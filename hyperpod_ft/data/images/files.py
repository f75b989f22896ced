"""The file of an image: beside the rows that name it, within a row, or in a data URL; and what is in it."""

import base64
import importlib.util
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hyperpod_ft.config import prompt_images
from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.errors import printable

if TYPE_CHECKING:
    from PIL.Image import Image

_Found = TypeVar("_Found")
_DATA_URL = re.compile(r"data:[^,]*;base64,")
_SHOWN = 60  # characters of a name in a message
# A few bytes may be an image of many pixels, and a model's processor may enlarge each of many small ones.
_MOST_PIXELS = 100_000_000  # of a text's images
_LEAST_PIXELS = 1_000_000  # that each counts as


def content(given: Any, folder: Path) -> bytes:
    """The file that a row in `folder` names or has: a path, bytes, both as Hugging Face datasets have them, a data URL.

    Raises RowError.
    """
    if isinstance(given, Mapping):
        given = given.get("bytes") or given.get("path")
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str) or not given:
        raise RowError("image that is neither a path nor bytes", f"it is {type(given).__name__}")
    if given.startswith("data:"):
        return of_data_url(given)
    if re.match(r"https?://", given):
        raise RowError("image at a URL", f"{_named(given)}; fetch it, and write its path in the dataset")
    path = Path(given)
    if path.is_absolute() or ".." in path.parts:
        raise RowError("image whose path leads out of the dataset", _named(given))
    try:
        return (folder / path).read_bytes()
    except (OSError, ValueError) as error:  # no file's name has a null character, or half of a surrogate pair
        why = error.strerror if isinstance(error, OSError) else "no file has such a name"
        raise RowError("image that is not in the dataset", f"{_named(given)}: {why}") from error


def of_submission(image: Any) -> bytes:
    """The file that a prompt of a run file names, which may be gone once the run has its copy: then it is empty.

    Raises RowError, for one that is not an image only where Pillow is installed.
    """
    if prompt_images.is_pinned(image):
        source = Path(image["source"])
        found = source.read_bytes() if source.is_file() else b""
    else:
        found = content(image, Path())
    if found and importlib.util.find_spec("PIL"):
        opened([found])
    return found


def of_data_url(given: Any) -> bytes:
    """The file in `data:image/png;base64,...`. Raises RowError for anything else."""
    start = _DATA_URL.match(given) if isinstance(given, str) else None
    if not start:
        raise RowError("image that is not a data URL in base64", _named(str(given)))
    try:
        return base64.b64decode(given[start.end() :], validate=True)
    except ValueError as error:
        raise RowError("image whose base64 is damaged", str(error)) from error


def opened(files: Sequence[bytes]) -> "list[Image]":
    """The images of a text in RGB, turned as their EXIF data say.

    Raises RowError, for more than 100 megapixels in all before any of them takes memory.
    """
    if sum(max(_read(file, _pixels), _LEAST_PIXELS) for file in files) > _MOST_PIXELS:
        raise RowError("images of more than 100 megapixels in all", "each counts as at least one")
    return [_read(file, _in_rgb) for file in files]


def _named(given: str) -> str:
    return printable(given[:_SHOWN])


def _pixels(image: "Image") -> int:
    return image.width * image.height


def _in_rgb(image: "Image") -> "Image":
    from PIL import ImageOps  # noqa: PLC0415 - only such rows need it

    return ImageOps.exif_transpose(image).convert("RGB")


def _read(file: bytes, what: "Callable[[Image], _Found]") -> _Found:
    """What a function finds in an image, of which nothing but the header has been read. Raises RowError."""
    from PIL import Image  # noqa: PLC0415

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(file), formats=prompt_images.FORMATS) as image:
                return what(image)
    except Exception as error:  # a damaged file raises errors of any type
        reason = str(error) if "BytesIO" not in str(error) else f"not one of {', '.join(prompt_images.FORMATS)}"
        raise RowError("image that cannot be read", reason[:200]) from error
