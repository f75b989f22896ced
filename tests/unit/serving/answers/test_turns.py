"""Threads take turns in the order in which they asked."""

import threading
from itertools import pairwise

from hyperpod_ft.serving.answers.turns import Turns


def test_turns_go_round() -> None:
    turns, order = Turns(), []
    ready = threading.Barrier(3)

    def work(name: str) -> None:
        ready.wait()
        with turns:
            for _ in range(20):
                order.append(name)
                turns.release()
                turns.acquire()

    turns.acquire()
    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    ready.wait()
    while len(turns._waiting) < 2:
        threading.Event().wait(0.001)
    turns.release()
    for thread in threads:
        thread.join(10)
    assert len(order) == 40
    assert all(one != other for one, other in pairwise(order))


def test_it_is_free_after_an_error() -> None:
    turns = Turns()
    try:
        with turns:
            raise ValueError
    except ValueError:
        pass
    taken = threading.Thread(target=turns.acquire)
    taken.start()
    taken.join(10)
    assert not taken.is_alive()
