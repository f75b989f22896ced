"""Small copies of images, for pages: their files are of others, and may be large."""

import base64
import io
from collections.abc import Iterable

from hyperpod_ft.data.images import files

_SIDE = 160  # pixels
_MOST = 200_000  # characters of all together


def previews(images: Iterable[bytes]) -> list[str]:
    """Of each image a JPEG in base64; empty for those beyond 200,000 characters in all. Raises RowError."""
    made, left = list[str](), _MOST
    for file in images:
        made.append(_preview(file) if left else "")
        left = max(0, left - len(made[-1]))
        if not left:
            made[-1] = ""
    return made


def _preview(file: bytes) -> str:
    (image,) = files.opened([file])
    image.thumbnail((_SIDE, _SIDE))
    image.info.clear()  # a comment in the file would be written again
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85, subsampling=0)
    return base64.b64encode(stream.getvalue()).decode()
