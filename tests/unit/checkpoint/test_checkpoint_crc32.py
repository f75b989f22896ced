"""A CRC-32 made of parts is that of the whole."""

import random
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np

from hyperpod_ft.checkpoint.tensors.crc32 import Ledger, combine


def test_parts_of_any_length() -> None:
    chance = random.Random(0)
    for _ in range(50):
        whole = chance.randbytes(chance.randrange(1 << chance.randrange(20)))
        cuts = sorted({0, len(whole), *(chance.randrange(len(whole) + 1) for _ in range(chance.randrange(6)))})
        parts = [whole[low:high] for low, high in pairwise(cuts)]
        assert combine((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(whole)


def test_only_what_was_read_exactly_once_is_known() -> None:
    file, content = Path("file"), np.frombuffer(random.Random(1).randbytes(100), np.uint8)
    ledger = Ledger()
    for begin, end in ((40, 70), (10, 25), (25, 40), (80, 90)):
        ledger.note(file, begin, content[begin:end])
    ledger.sort()
    assert ledger.crc32(file, 10, 60) == zlib.crc32(content[10:70])
    assert ledger.crc32(file, 25, 15) == zlib.crc32(content[25:40])
    for offset, size in ((10, 61), (9, 10), (70, 20), (11, 10), (80, 9), (0, 5)):
        assert ledger.crc32(file, offset, size) is None
    assert ledger.crc32(Path("other"), 10, 60) is None
    ledger.note(file, 20, content[20:30])
    ledger.sort()
    assert ledger.crc32(file, 10, 60) is None
