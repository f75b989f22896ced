"""Fewer points for a curve of many, without hiding a spike; and a smooth curve through a noisy one."""

from collections.abc import Sequence


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """Indices of at most `most` values (at least 4), in order: all that are not None if they are few enough.

    Otherwise the first, the last, and of each of equally long stretches its lowest and its highest value: the curve
    through them covers, at the resolution of these stretches, what the curve through all values does.
    """
    known = [index for index, value in enumerate(values) if value is not None]
    if len(known) <= most:
        return known
    stretches = (most - 2) // 2
    kept = {known[0], known[-1]}
    for number in range(stretches):
        stretch = known[number * len(known) // stretches : (number + 1) * len(known) // stretches]
        kept.add(min(stretch, key=values.__getitem__))  # type: ignore[arg-type]
        kept.add(max(stretch, key=values.__getitem__))  # type: ignore[arg-type]
    return sorted(kept)


def smoothed(values: Sequence[float | None], window: int) -> list[float | None]:
    """The exponential moving average with the weight 2 / (window + 1) for the newest value.

    The average of the first values is not drawn towards zero: it is divided by the sum of its weights. None stays None.
    """
    keep = 1 - 2 / (window + 1)
    total = weight = 0.0
    found: list[float | None] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight)
    return found
