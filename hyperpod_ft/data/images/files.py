"""The file of an image: beside the rows that name it, within a row, or in a data URL; and what is in it."""

import base64
import binascii
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperpod_ft.data.text.example import RowError

if TYPE_CHECKING:
    from PIL.Image import Image

# Those that most have. Pillow reads many more, some with programs of their own.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_DATA_URL = re.compile(r"data:[^,]*;base64,")
_SHOWN = 60  # characters of a name in a message


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
        raise RowError("image at a URL", f"{given[:_SHOWN]}; fetch it, and write its path in the dataset")
    path = Path(given)
    if path.is_absolute() or ".." in path.parts:
        raise RowError("image whose path leads out of the dataset", given[:_SHOWN])
    try:
        return (folder / path).read_bytes()
    except OSError as error:
        raise RowError("image that is not in the dataset", f"{given[:_SHOWN]}: {error.strerror}") from error


def of_data_url(given: Any) -> bytes:
    """The file in `data:image/png;base64,...`. Raises RowError for anything else."""
    start = _DATA_URL.match(given) if isinstance(given, str) else None
    if not start:
        raise RowError("image that is not a data URL in base64", str(given)[:_SHOWN])
    try:
        return base64.b64decode(given[start.end() :], validate=True)
    except binascii.Error as error:
        raise RowError("image whose base64 is damaged", str(error)) from error


def opened(file: bytes) -> "Image":
    """The image in RGB, turned as its EXIF data say. Raises RowError."""
    from PIL import Image, ImageOps  # noqa: PLC0415 - only such rows need it

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(file), formats=_FORMATS) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a damaged file raises errors of any type
        reason = str(error) if "BytesIO" not in str(error) else f"not one of {', '.join(_FORMATS)}"
        raise RowError("image that cannot be read", reason[:200]) from error
