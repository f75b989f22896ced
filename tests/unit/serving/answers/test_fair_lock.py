"""Threads acquire the lock in the order in which they requested it."""

import threading
from itertools import pairwise

from hyperpod_ft.serving.answers.decoding import FairLock
from tests.waiting import wait_for


def test_two_threads_alternate() -> None:
    lock, order = FairLock(), []
    ready = threading.Barrier(3)

    def work(name: str) -> None:
        ready.wait()
        with lock:
            for _ in range(20):
                order.append(name)
                lock.release()
                lock.acquire()

    lock.acquire()
    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    ready.wait()
    wait_for(lambda: len(lock._waiting) == 2, every=0.001)
    lock.release()
    for thread in threads:
        thread.join(300)
    assert len(order) == 40
    assert all(one != other for one, other in pairwise(order))
