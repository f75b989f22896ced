"""A headless Chromium, driven by chromedriver with the W3C WebDriver protocol (https://www.w3.org/TR/webdriver2/)."""

import base64
import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of an element's reference
ENTER, ESCAPE, SHIFT, TAB, RELEASE = "\ue007", "\ue00c", "\ue008", "\ue004", "\ue000"
# Nothing but the page may use the network, and no name resolves.
_ARGUMENTS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def installed() -> bool:
    return all(shutil.which(program) for program in ("chromium", "chromedriver"))


@dataclass
class Browser:
    """One window. Elements are named by CSS selectors."""

    session: str

    def open(self, url: str) -> None:
        self.call("POST", "url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's `return`."""
        return self.call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, condition: Callable[[], Any], seconds: float = 300) -> Any:
        """The first true value of the condition."""
        return wait_for(condition, seconds, lambda: self.text("body"))

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector))

    def type(self, selector: str, keys: str) -> None:
        found = self.call("POST", "element", {"using": "css selector", "value": selector})
        self.call("POST", f"element/{found[_ELEMENT]}/value", {"text": keys})

    def press(self, key: str) -> None:
        """A key for whatever has the focus."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.call("POST", "actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def point(self, selector: str, *shares: float, height: float = 0.5) -> None:
        """Move the mouse over an element, at these shares of its width and height; drag to each further one."""
        found = self.call("POST", "element", {"using": "css selector", "value": selector})
        box = "return arguments[0].getBoundingClientRect()"
        size = {side: self.run(f"{box}.{side}", found) for side in ("width", "height")}
        y = round((height - 0.5) * size["height"])
        first, *others = (
            {"type": "pointerMove", "x": round((share - 0.5) * size["width"]), "y": y, "origin": found}
            for share in shares
        )
        drag = [{"type": "pointerDown", "button": 0}, *others, {"type": "pointerUp", "button": 0}] if others else []
        actions = {"type": "pointer", "id": "mouse", "actions": [first, *drag]}
        self.call("POST", "actions", {"actions": [actions]})

    def emulate(self, media: str = "", **features: str) -> None:
        """Media (`print`) and features (`prefers_color_scheme="dark"`) of the page from now on."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        params = {"media": media, "features": listed}
        self.call("POST", "goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": params})

    def resize(self, width: int, height: int) -> None:
        """The page's own size: a window cannot be narrower than 500 pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self.call("POST", "goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def measure_work(self) -> None:
        """For `work_seconds` of the pages that are opened from now on."""
        self.call("POST", "goog/cdp/execute", {"cmd": "Performance.enable", "params": {"timeDomain": "threadTicks"}})

    def work_seconds(self) -> float:
        """Processor time of the page's own thread since it was opened: scripts, layout, drawing."""
        answer = self.call("POST", "goog/cdp/execute", {"cmd": "Performance.getMetrics", "params": {}})
        return next(float(metric["value"]) for metric in answer["metrics"] if metric["name"] == "TaskDuration")

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("GET", "screenshot")))

    def requests(self) -> list[str]:
        """The addresses of all requests since the last call."""
        entries = [
            json.loads(entry["message"])["message"] for entry in self.call("POST", "se/log", {"type": "performance"})
        ]
        return [
            entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console."""
        return [entry["message"] for entry in self._log("browser")]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        return list(self.call("POST", "se/log", {"type": kind}))

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return _call(method, f"{self.session}/{path}", body)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """`profile`: an empty directory for Chromium's files."""
    driver, url = _driver()
    try:
        options = {"args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
        made = _call("POST", url, {"capabilities": {"alwaysMatch": wanted}})
        session = f"{url}/{made['sessionId']}"
        try:
            opened = Browser(session)
            opened.open("about:blank")  # no request of the first tab's page comes later, in a test's list
            opened.requests()
            yield opened
        finally:
            _call("DELETE", session)
    finally:
        driver.terminate()
        driver.wait(300)


def _driver(attempts: int = 5) -> tuple["subprocess.Popen[str]", str]:
    """A chromedriver and its address. It binds a free port for IPv4, and ends if another has it for IPv6."""
    for _ in range(attempts):
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        for line in driver.stdout:
            if "started successfully on port" in line:
                return driver, f"http://127.0.0.1:{line.rstrip().rstrip('.').rpartition(' ')[2]}/session"
        driver.wait(300)
    raise AssertionError(f"chromedriver did not start in {attempts} attempts")


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error
