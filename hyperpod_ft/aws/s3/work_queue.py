"""Runs many small tasks in a few threads, finishing files in progress before starting others.

So only some files are incomplete at any time, and what is in memory is bounded by the number of threads. Not all
threads work on one file as long as there are others: writes to one file wait for each other.
"""

import threading
from collections.abc import Callable, Iterable

_AT_ONCE = 2  # parts of a file, while there are other files

# Does one piece of work, and returns what can be done after it.
Task = Callable[[], "Iterable[Task] | None"]


def run_all(tasks: Iterable[Task], threads: int) -> None:
    """Run `tasks`, which is iterated as threads become free, and the tasks that they return.

    After the first error no task is begun; raises it once the running ones have ended.
    """
    queue = _Queue(tasks)
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


class _Source:
    """Tasks that belong together: the parts of a file. `running` of them are being done."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = iter(tasks)
        self.running = 0


class _Queue:
    def __init__(self, tasks: Iterable[Task]) -> None:
        self._files = _Source(tasks)
        self._begun: list[_Source] = []
        self._active = 0
        self._changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run tasks until there are none left."""
        while taken := self._next():
            task, source = taken
            more: Iterable[Task] | None = None
            try:
                more = task()
            except BaseException as error:
                self.stop(error)
            with self._changed:
                self._active -= 1
                source.running -= 1
                if more is not None:
                    self._begun.append(_Source(more))
                self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def _next(self) -> tuple[Task, _Source] | None:
        with self._changed:
            while self.error is None:
                try:
                    taken = self._take()
                except BaseException as error:  # of the caller's iterable
                    self.stop(error)
                    break
                if taken is not None:
                    self._active += 1
                    taken[1].running += 1
                    return taken
                if not self._active:
                    break
                self._changed.wait()
            return None

    def _take(self) -> tuple[Task, _Source] | None:
        """A part of a file that few threads are busy with, else a further file, else any part."""
        quiet = [source for source in self._begun if source.running < _AT_ONCE]
        for source in (*quiet, self._files, *self._begun):
            try:
                return next(source.tasks), source
            except StopIteration:
                if source in self._begun:
                    self._begun.remove(source)
        return None
