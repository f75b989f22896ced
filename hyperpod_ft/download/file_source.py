"""The place that an asset comes from, by its kind."""

from typing import Literal

from hyperpod_ft.config.sources import Asset
from hyperpod_ft.download.listing import FileSource
from hyperpod_ft.download.local import Local
from hyperpod_ft.download.s3 import S3


def source_of(kind: Literal["model", "dataset"], where: str, asset: Asset) -> FileSource:
    """`where` is the run file's key, for errors."""
    if asset.kind == "hub":
        from hyperpod_ft.download.hub import Hub  # noqa: PLC0415 - takes half a second, needed for this source only

        return Hub(where, kind, asset)
    return S3(where, asset.source) if asset.kind == "s3" else Local(where, asset)
