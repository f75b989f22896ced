"""The kit's server as a handler of DJL Serving, which AWS's LMI image runs: `OPTION_ENTRYPOINT` names this module.

DJL starts a process for each GPU, and calls `handle` in it: first without content, to load the model, then with one
request after another. Each is passed to the kit's server on the loopback interface, which words every answer and error.
"""

import http.client
import json
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

from djl_python import Output

from hyperpod_ft.serving.http.openai_api import HttpError
from hyperpod_ft.serving.http.server import Server

_HOST = "127.0.0.1"
# SageMaker waits 60 seconds for an answer, or its first part, and DJL longer than this, before it kills the process.
_ANSWER_SECONDS = 58.0
_MAX_LENGTH = "HYPERPOD_FT_MAX_LENGTH"  # the environment variable: of a request, in tokens


def handle(inputs: Any) -> Any:
    """The server's answer to an `Input` of DJL, as its `Output`. Raises UserError if the model cannot be loaded.

    Ends the process when the device can no longer be used: then DJL starts another.
    """
    server = _server(Path(inputs.get_property("model_dir")))
    if inputs.is_empty():
        return None
    connection = http.client.HTTPConnection(_HOST, server.port, timeout=_ANSWER_SECONDS)

    def end() -> None:
        connection.close()
        if server.answers is not None and server.answers.failure:
            print(f"The device can no longer be used: {server.answers.failure}", flush=True)
            os._exit(1)

    connection.request("POST", "/invocations", bytes(inputs.get_as_bytes()), {"Content-Type": "application/json"})
    try:
        answer = connection.getresponse()
    except TimeoutError:
        end()  # the server stops at the next token
        return _timed_out()
    made = Output(answer.status, answer.reason)
    made.add_property("Content-Type", answer.getheader("Content-Type"))
    if answer.chunked:
        made.add_stream_content(iter(answer.read1, b""), None)
        return made.finalize(end)
    made.add(answer.read())
    end()
    return made


def _timed_out() -> Any:
    problem = f"no answer within {_ANSWER_SECONDS:g} seconds; ask for fewer tokens (max_tokens), or for a stream"
    made = Output(504, "Gateway Timeout")
    made.add_property("Content-Type", "application/json")
    return made.add(json.dumps(HttpError(504, problem, "timeout").as_dict()).encode())


@cache
def _server(model: Path) -> Server:
    # torch; DJL waits only two minutes for this module, but `startup_minutes` for the model
    from hyperpod_ft.serving.answers.answering import Answering  # noqa: PLC0415
    from hyperpod_ft.serving.answers.decoding import device_named  # noqa: PLC0415

    server = Server(_HOST, 0, "hyperpod-ft")
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    max_length = int(os.environ[_MAX_LENGTH])
    server.answers = Answering.load({"tuned": model}, {}, model, device_named("auto"), max_length)
    return server
