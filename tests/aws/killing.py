"""A process that is killed between two requests to S3."""

import itertools
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

from hyperpod_ft.aws.session import Session


def killed(work: Callable[[Any], object], count: int, operation: str = "*") -> bool:
    """Do the work in a child process that kills itself after `count` requests of an operation; whether it came to that.

    `work` is given a client for S3. A fork, since a new interpreter would take seconds for its imports.
    """
    child = os.fork()
    if not child:
        try:
            client = Session().client("s3")
            counter = itertools.count(1)

            def after(**_: Any) -> None:
                if next(counter) == count:
                    os.kill(os.getpid(), signal.SIGKILL)

            client.meta.events.register(f"after-call.s3.{operation}", after)
            work(client)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status != 0
