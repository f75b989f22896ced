"""The kit's server as a handler of DJL Serving, which AWS's LMI image runs: `OPTION_ENTRYPOINT` names this module.

DJL starts a process for each GPU, and calls `handle` in it: first without content, to load the model, then with one
request after another. Each is passed to the kit's server on the loopback interface, which words every answer and error.
"""

import http.client
import threading
from functools import cache
from pathlib import Path
from typing import Any

from djl_python import Output

from hyperpod_ft.serving.http.server import Server

_HOST = "127.0.0.1"


def handle(inputs: Any) -> Any:
    """The server's answer to an `Input` of DJL, as its `Output`. Raises UserError if the model cannot be loaded."""
    server = _server(Path(inputs.get_property("model_dir")))
    if inputs.is_empty():
        return None
    connection = http.client.HTTPConnection(_HOST, server.port)
    connection.request("POST", "/invocations", bytes(inputs.get_as_bytes()), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    made = Output(answer.status, answer.reason)
    made.add_property("Content-Type", answer.getheader("Content-Type"))
    if answer.chunked:
        made.add_stream_content(iter(answer.read1, b""), None)
    else:
        made.add(answer.read())
    return made.finalize(connection.close)


@cache
def _server(model: Path) -> Server:
    # torch; DJL waits only two minutes for this module, but `startup_minutes` for the model
    from hyperpod_ft.serving.answers.answering import Answering  # noqa: PLC0415
    from hyperpod_ft.serving.answers.decoding import device_named  # noqa: PLC0415

    server = Server(_HOST, 0, "hyperpod-ft")
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    server.answers = Answering.load({"tuned": model}, {}, model, device_named("auto"))
    return server
