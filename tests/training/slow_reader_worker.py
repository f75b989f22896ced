"""A rank of a job whose others are slow to read what rank 0 gathered; rank 0 ends at once, and its store with it."""

import os
import time
from typing import Any

from hyperpod_ft.engines.ranks import join_ranks


class SlowStore:
    def __init__(self, store: Any) -> None:
        self.store = store

    def get(self, key: str) -> bytes:
        time.sleep(1)
        found: bytes = self.store.get(key)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


if __name__ == "__main__":
    ranks = join_ranks(3)
    if not ranks.is_rank_0:
        object.__setattr__(ranks, "store", SlowStore(ranks.store))
    assert ranks.gather("names", ranks.rank) == [0, 1, 2]
    os._exit(0)
