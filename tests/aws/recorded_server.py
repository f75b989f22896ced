"""A container's server in miniature, for tests of what is around it: it starts at once, and answers from a table.

python tests/aws/recorded_server.py ADDRESS ANSWERS   the file for its port, and a JSON object, {prompt: answer}
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS: dict[str, str] = json.loads(sys.argv[2])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send({"choices": [{"text": ANSWERS.get(request["prompt"], "")}]})

    def _send(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


print("recorded answers", flush=True)
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
address = Path(sys.argv[1])
partial = address.with_suffix(".partial")
partial.write_text(json.dumps({"port": server.server_port}))
partial.rename(address)
server.serve_forever()
