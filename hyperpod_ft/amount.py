"""Sizes for a reader."""

GB = 1e9


def amount(size: float) -> str:
    """Bytes for a reader, in decimal units as disks and networks are sold."""
    for unit, name in ((GB, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1e3:.1f} kB"
