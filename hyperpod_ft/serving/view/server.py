"""The HTTP server of `view`: on this machine only, for whoever knows the token, and it only reads."""

import hmac
import secrets
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from hyperpod_ft.serving.http import access
from hyperpod_ft.serving.http.connection import Connection, Listener
from hyperpod_ft.serving.http.openai_api import HttpError
from hyperpod_ft.serving.view.pages import Pages

_LOOPBACK = "127.0.0.1"
# The pages themselves say what they may load. The token in their addresses is told to nobody.
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class ViewServer(Listener):
    """Serves the pages of a root's runs. Port 0 takes a free one. Raises UserError when it cannot listen."""

    def __init__(self, root: Path, port: int) -> None:
        self.pages = Pages(root)
        # other users of this machine reach its ports too
        self.token = secrets.token_urlsafe(24)
        super().__init__(_LOOPBACK, port, ViewHandler)

    @property
    def url(self) -> str:
        """Of the list of all runs; a run's page is at `runs/<name>/<id>` below it."""
        return f"{access.url(_LOOPBACK, self.port)}/{self.token}/"


class ViewHandler(Connection):
    """The requests of one connection."""

    server: ViewServer

    def get(self, path: str) -> None:
        # a name that resolves to this machine would make a foreign page one of this server's own
        access.check_site(True, self.headers.get("Host", ""), self.headers.get("Origin", ""))
        token, slash, page = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise HttpError(404, "use the whole URL that `hyperpod-ft view` printed when it started")
        if slash:
            self.send(200, "text/html; charset=utf-8", self._page(page), _HEADERS)
        else:  # links are relative
            self.send(308, "text/plain", b"", {"Location": f"/{token}/"})

    def post(self, path: str) -> None:
        raise HttpError(405, "this server only reads")

    def _page(self, path: str) -> bytes:
        pages = self.server.pages
        if path == "":
            return pages.all_runs()
        if path == "compare":
            return pages.comparison(parse_qs(urlsplit(self.path).query).get("run", []))
        if path.startswith("runs/"):
            return pages.run(unquote(path.removeprefix("runs/")))
        raise HttpError(404, "unknown; known: the list of runs, runs/<name>/<id>, compare?run=<name>/<id>&run=...")

    def log(self, outcome: str) -> None:
        """Nothing: pages load themselves again every few seconds, and their addresses hold the token."""
