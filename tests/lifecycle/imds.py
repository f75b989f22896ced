"""A stand-in for EC2's instance metadata service (IMDSv2): `python3 imds.py INSTANCE.json`, on 169.254.169.254:80.

Answers what INSTANCE.json maps paths to, and, like the service, nothing without a token that it gave out.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS: dict[str, str] = json.loads(Path(sys.argv[1]).read_text())
TOKEN = "a-token-of-the-stand-in"


class Metadata(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        asked = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self._answer(200 if asked else 400, TOKEN if asked else "")

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            self._answer(401, "")
        else:
            known = self.path in ANSWERS
            self._answer(200 if known else 404, ANSWERS.get(self.path, ""))

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("169.254.169.254", 80), Metadata).serve_forever()
