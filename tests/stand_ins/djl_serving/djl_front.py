"""DJL Serving with one worker: HTTP in front of the handler that OPTION_ENTRYPOINT names.

python tests/stand_ins/djl_serving/djl_front.py ADDRESS MODEL   the file for its port, and the model's directory

It loads the model before it listens, and answers one request after another. What the image is not known to have cannot
be imported.
"""

import importlib
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

sys.modules.update(dict.fromkeys(("xxhash", "typer", "rich", "threadpoolctl")))  # type: ignore[arg-type]

from djl_python import Input, Output  # type: ignore[attr-defined]  # noqa: E402 - from this directory

address, model = Path(sys.argv[1]), sys.argv[2]
handler = importlib.import_module(os.environ["OPTION_ENTRYPOINT"])
assert ".zip" in str(handler.__file__), "the code that was uploaded, not that of this checkout"


def invoke(headers: dict[str, str], content: bytes | None) -> Output:
    made: Any = handler.handle(Input({**headers, "model_dir": model, "device_id": "-1"}, content))
    return Output(204, "No content") if made is None else made


class Front(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(Output())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        made = invoke(dict(self.headers), body)
        self._send(made)
        made.finish()

    def _send(self, made: Output) -> None:
        self.send_response(made.code, made.message)
        for name, value in made.properties.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in made.pieces:
            self.wfile.write(piece)


assert invoke({}, None).code < 300, "Failed to initialize model"
print(f"Model [model] initialized by {handler.__name__}", flush=True)
server = HTTPServer(("127.0.0.1", 0), Front)
partial = address.with_suffix(".partial")
partial.write_text(json.dumps({"port": server.server_port}))
partial.rename(address)
server.serve_forever()
