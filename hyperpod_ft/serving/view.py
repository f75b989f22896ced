"""`view`: the report of every run below a root, served to a browser.

On this machine only, for whoever knows the token. Pages are made when they are asked for; nothing is started, created
or cancelled.
"""

import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import MAY_CHANGE, RunStatus, list_runs, status
from hyperpod_ft.progress import poll_seconds
from hyperpod_ft.report.gather import gather
from hyperpod_ft.report.page import report_page, runs_page
from hyperpod_ft.report.run_report import RunReport
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import directory_of
from hyperpod_ft.serving.http import connection
from hyperpod_ft.serving.http.connection import Connection, Listener
from hyperpod_ft.serving.http.openai_api import HttpError

_REFRESH_SECONDS = 10.0  # as often as `watch` asks Slurm
_KEPT = 20  # pages
_MOST_COMPARED = 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[0-9a-f]+")
_LOOPBACK = "127.0.0.1"
# The pages themselves say what they may load. The token in their addresses is sent to no other site.
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass
class _Page:
    """A page as it was made last. Locked while it is made: a launcher may take its time, which holds up no other."""

    content: bytes = b""
    made: float = 0.0  # of time.monotonic()
    lock: threading.Lock = field(default_factory=threading.Lock)


class Pages:
    """The pages below a root. Each is made once at a time, and shown to everyone until it is some seconds old."""

    def __init__(self, root: Path, launchers: Callable[[], Launchers]) -> None:
        self._root = root
        self._launchers = launchers  # made anew for each page: credentials may have been renewed
        self._refresh = poll_seconds(_REFRESH_SECONDS)
        self._lock = threading.Lock()
        self._pages: dict[tuple[str, ...], _Page] = {}

    def all_runs(self) -> bytes:
        """The list of all runs, with links to the pages below."""

        def make() -> str:
            return runs_page(str(self._root), list_runs(self._root, self._launchers()), max(1, round(self._refresh)))

        return self._page((), make)

    def run(self, name: str) -> bytes:
        """The report of the run `name/id`. Raises HttpError (404) when the root has no such run."""
        return self._page((name,), lambda: self._report([name], all_runs="../../"))

    def comparison(self, names: Sequence[str]) -> bytes:
        """The report of several runs. Raises HttpError."""
        if not 0 < len(names) <= _MOST_COMPARED:
            raise HttpError(400, f"{len(names)} runs: choose 1 to {_MOST_COMPARED}")
        return self._page(("compare", *names), lambda: self._report(names, all_runs="./"))

    def _report(self, names: Sequence[str], all_runs: str) -> str:
        launchers = self._launchers()
        found = [self._gather(name, launchers) for name in dict.fromkeys(names)]
        changing = any(current.state in MAY_CHANGE for current, _ in found)
        refresh = max(1, round(self._refresh)) if changing else None
        return report_page([report for _, report in found], refresh_seconds=refresh, all_runs=all_runs)

    def _gather(self, name: str, launchers: Launchers) -> tuple[RunStatus, RunReport]:
        directory = directory_of(self._root, name)
        if not _NAME.fullmatch(name) or not directory.is_dir():
            raise HttpError(404, f"no such run below {self._root}")
        run = Run.open(directory)
        current = status(run, launchers)
        return current, gather(run, current)

    def _page(self, key: tuple[str, ...], make: Callable[[], str]) -> bytes:
        with self._lock:
            page = self._pages[key] = self._pages.pop(key, _Page())
            while len(self._pages) > _KEPT:
                del self._pages[next(iter(self._pages))]  # the one that was not asked for the longest
        with page.lock:
            if not page.content or time.monotonic() - page.made >= self._refresh / 2:
                try:
                    page.content = make().encode()
                except (UserError, OSError) as error:
                    raise HttpError(500, str(error)) from error
                finally:
                    if not page.content:  # a wrong address keeps no page of a run from being remembered
                        self._forget(key)
                page.made = time.monotonic()
            return page.content

    def _forget(self, key: tuple[str, ...]) -> None:
        with self._lock:
            self._pages.pop(key, None)


class ViewServer(Listener):
    """Serves the pages of a root's runs. Port 0 takes a free one. Raises UserError when it cannot listen."""

    def __init__(self, root: Path, port: int, launchers: Callable[[], Launchers]) -> None:
        self.pages = Pages(root, launchers)
        # other users of this machine reach its ports too
        self.token = secrets.token_urlsafe(24)
        super().__init__(_LOOPBACK, port, ViewHandler)

    @property
    def url(self) -> str:
        """Of the list of all runs; a run's page is at `runs/<name>/<id>` below it."""
        return f"{connection.url(_LOOPBACK, self.port)}/{self.token}/"


class ViewHandler(Connection):
    """The requests of one connection."""

    server: ViewServer

    def get(self, path: str) -> None:
        # a name that resolves to this machine would make a foreign page one of this server's own
        connection.check_site(True, self.headers.get("Host", ""), self.headers.get("Origin", ""))
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
