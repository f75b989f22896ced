"""Runs many small tasks in a few threads: the parts of the files that were begun come before further files.

So only a few files are incomplete at any time, and what is in memory is bounded by the number of threads.
"""

import threading
from collections.abc import Callable, Iterable, Iterator

# Does one piece of work, and returns what can be done after it.
Task = Callable[[], "Iterable[Task] | None"]


def run_all(tasks: Iterable[Task], threads: int) -> None:
    """Run `tasks`, which is iterated as threads become free, and the tasks that they return.

    After the first error no task is begun; raises it once the running ones have ended.
    """
    queue = _Queue(iter(tasks))
    workers = [threading.Thread(target=queue.work, name=f"s3-{number}", daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException as interrupt:
        queue.stop(interrupt)
        for worker in workers:
            worker.join()
    if queue.error is not None:
        raise queue.error


class _Queue:
    def __init__(self, tasks: Iterator[Task]) -> None:
        self._sources = [tasks]  # the parts of files in the order of the files, then the further files
        self._active = 0
        self._changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run tasks until there are none left."""
        while task := self._next():
            more: Iterable[Task] | None = None
            try:
                more = task()
            except BaseException as error:
                self.stop(error)
            with self._changed:
                self._active -= 1
                if more is not None:
                    self._sources.insert(-1, iter(more))
                self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def _next(self) -> Task | None:
        with self._changed:
            while self.error is None:
                try:
                    task = self._take()
                except BaseException as error:  # of the caller's iterable
                    self.stop(error)
                    break
                if task is not None:
                    self._active += 1
                    return task
                if not self._active:
                    break
                self._changed.wait()
            return None

    def _take(self) -> Task | None:
        for source in list(self._sources):
            try:
                return next(source)
            except StopIteration:
                if source is not self._sources[-1]:
                    self._sources.remove(source)
        return None
