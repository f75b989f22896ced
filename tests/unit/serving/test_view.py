"""`view`: a real server asked over HTTP, and its pages in a real browser."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urljoin

import pytest

from hyperpod_ft.config import run_file
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.process.launcher import ProcessLauncher
from hyperpod_ft.launch.submit import cancel, prepare
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving.view import Pages, ViewServer
from tests.browser import Browser, browser, installed
from tests.conftest import run_file_values
from tests.unit.stage_runs import tree
from tests.waiting import wait_for

BACKSPACE = "\ue003"  # https://www.w3.org/TR/webdriver2/#keyboard-actions
# where to leave pictures of the pages, to look at
PICTURES = os.environ.get("HYPERPOD_FT_PAGE_PICTURES")


def make(base: Path, **settings: object) -> Run:
    values = run_file_values(base / "root", **settings)
    return Run.of(run_file.resolve(run_file.validate(values, "run.yaml"), base))


def log_steps(run: Run, *steps: int) -> None:
    with run.paths.metrics_path.open("a") as stream:
        for step in steps:
            row = {"step": step, "loss": 4.0 / step, "seconds": float(step), "tokens_per_second": 100.0}
            stream.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def working(base: Path) -> Iterator[Run]:
    """Its first job works until it is cancelled."""
    run = make(base, name="working")
    prepare(run, Launchers())
    run.paths.script("env").write_text("echo ready; exec sleep 3600\n")
    ProcessLauncher().submit(run, run.plan.stages[:1], {})
    wait_for(lambda: [state.state for state in Launchers().active(run).values()] == ["RUNNING"])
    log_steps(run, 1, 2)
    yield run
    cancel(run, Launchers())


@pytest.fixture(scope="module")
def idle(base: Path) -> Run:
    """Never submitted."""
    run = make(base, name="idle", training__learning_rate=3e-4)
    run.freeze()
    log_steps(run, 1, 2, 3)
    return run


@pytest.fixture(scope="module")
def server(base: Path, working: Run, idle: Run) -> Iterator[ViewServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERPOD_FT_POLL_SECONDS", "0.02")
        server = ViewServer(base / "root", 0, Launchers)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def ask(server: ViewServer) -> Iterator[Ask]:
    """Status and text of a request; paths go over the wire as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)

    def request(path: str, method: str = "GET", token: str | None = None, **headers: str) -> tuple[int, str]:
        before = server.token if token is None else token
        connection.request(method, f"/{before}/{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    yield request
    connection.close()


def test_every_run_is_listed_and_every_link_leads_somewhere(
    server: ViewServer, ask: Ask, working: Run, idle: Run
) -> None:
    status, page = ask("")
    assert status == 200
    links = re.findall(r'href="([^"]+)"', page)
    assert sorted(links) == [f"runs/{idle.paths.full_name}", f"runs/{working.paths.full_name}"]
    assert re.search(r"working/.*\n.*running.*\n<td>env</td>", page)
    for link in links:
        status, report = ask(link)
        assert status == 200 and f"<h1>{link.removeprefix('runs/')}</h1>" in report
        (back,) = re.findall(r'href="([^"]+)">All runs', report)
        assert urljoin(f"{server.url}{link}", back) == server.url
    comparison = ask(f"compare?run={idle.paths.full_name}&run={working.paths.full_name}")[1]
    assert "2 runs compared" in comparison and "training.learning_rate" in comparison


def test_the_report_of_a_run_at_work_is_always_new(ask: Ask, working: Run, idle: Run) -> None:
    assert 'data-refresh-seconds="1"' in ask(f"runs/{working.paths.full_name}")[1]
    assert "data-refresh-seconds" not in ask(f"runs/{idle.paths.full_name}")[1]
    log_steps(working, 3)
    wait_for(lambda: "1.3333" in ask(f"runs/{working.paths.full_name}")[1])


def test_only_who_knows_the_token_sees_anything(server: ViewServer, ask: Ask, idle: Run) -> None:
    for token in ("", "x", server.token[:-1], server.token + "x", "%2e", "%C3%BC"):
        for path in ("", f"runs/{idle.paths.full_name}"):
            status, text = ask(path, token=token)
            assert status == 404 and idle.paths.full_name not in text and server.token not in text
    assert ask("", method="HEAD") == (200, "")


def test_a_page_of_another_site_gets_nothing(server: ViewServer, ask: Ask) -> None:
    """Not by a name that resolves to this machine either; a forwarded port has another number."""
    assert server.server_address[0] == "127.0.0.1"
    for host in ("attacker.example", "attacker.example:8008", "127.0.0.1.attacker.example", "0.0.0.0"):
        assert ask("", Host=host)[0] == 403
    for host in ("localhost:9999", "127.0.0.1", "[::1]:8008"):
        assert ask("", Host=host)[0] == 200
    assert ask("", Origin="https://attacker.example")[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(ask: Ask, base: Path, method: str, idle: Run) -> None:
    assert ask(f"runs/{idle.paths.full_name}", method=method)[0] in (405, 501)


def test_looking_writes_nothing(ask: Ask, idle: Run) -> None:
    before = tree(idle.paths.directory)
    for path in ("", f"runs/{idle.paths.full_name}", f"compare?run={idle.paths.full_name}"):
        assert ask(path)[0] == 200
    assert tree(idle.paths.directory) == before
    assert "0 runs: choose 1 to 20" in ask("compare")[1]


@pytest.mark.parametrize(
    "path",
    [
        "runs/../../secret",
        "runs/..%2f..%2fsecret",
        "runs/%2e%2e/%2e%2e",
        "runs//etc",
        "runs/working/..",
        "runs/working/%00",
        "runs/idle",
        "runs/idle/0123456789ab/run.yaml",
        "../secret",
        "secret",
        "compare",
        "compare?run=../../secret",
        "compare?run=" + "&run=".join(f"a/{number:x}" for number in range(100)),
    ],
)
def test_nothing_but_runs_is_served(ask: Ask, base: Path, path: str) -> None:
    secret = base / "secret" / "run.yaml"
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("hunter2")
    status, text = ask(path)
    assert status in (400, 404) and "hunter2" not in text


def test_a_run_that_is_damaged_says_so(ask: Ask, base: Path) -> None:
    run = make(base, name="damaged")
    run.freeze()
    run.paths.plan_path.write_text("{")
    try:
        status, text = ask(f"runs/{run.paths.full_name}")
        assert status == 500 and "plan.json" in text
        assert ask("")[0] == 200
    finally:
        run.paths.config_path.unlink()


def test_the_command_says_where_and_how_to_reach_it(idle: Run) -> None:
    viewing = subprocess.Popen(
        [sys.executable, "-m", "hyperpod_ft", "view", str(idle.paths.directory), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert viewing.stdout is not None
    lines = [viewing.stdout.readline() for _ in range(4)]
    url = re.fullmatch(
        rf"{idle.paths.full_name}: (http://127\.0\.0\.1:(\d+)/[\w-]{{32}})/runs/{idle.paths.full_name}\n", lines[0]
    )
    assert url is not None
    assert lines[1] == f"All runs below {idle.paths.root}: {url[1]}/\n"
    assert f"cluster ssh CLUSTER_FILE -L {url[2]}:127.0.0.1:{url[2]}" in lines[2]
    connection = http.client.HTTPConnection("127.0.0.1", int(url[2]), timeout=300)
    connection.request("GET", url[1].partition(url[2])[2])  # without the slash at its end
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Location"]) == (308, f"{url[1].partition(url[2])[2]}/")
    viewing.send_signal(signal.SIGINT)
    assert viewing.wait(300) == 0
    connection.close()
    viewing.stdout.close()


@pytest.mark.skipif(not installed(), reason="chromium and chromedriver are missing")
def test_in_a_browser(server: ViewServer, working: Run, idle: Run, tmp_path: Path) -> None:
    with browser(tmp_path) as window:
        window.resize(1100, 700)
        window.requests()  # of the browser's first page
        window.open(server.url)
        picture(window, "runs")
        window.type("#wanted", "idle")
        shown = "return [...document.querySelectorAll('tbody tr')].filter(row => !row.hidden).length"
        assert window.run(shown) == 1 and window.text("#count") == "1 of 2 runs"
        window.type("#wanted", BACKSPACE * len("idle"))
        assert window.run(shown) == 2
        window.run("document.querySelectorAll('tbody input').forEach(box => box.click())")
        window.run("document.querySelector('#compare').click()")
        window.wait_for(lambda: "2 runs compared" in window.text("main"))
        window.run("document.querySelector('nav a').click()")
        window.wait_for(lambda: window.texts("tbody a"))
        window.run(f"document.querySelector('a[href$=\"{working.paths.full_name}\"]').click()")
        window.wait_for(lambda: working.paths.full_name in window.text("h1"))
        log_steps(working, 4, 5, 6, 7, 8)
        window.wait_for(lambda: "fell from 4 to 0.5" in window.text("main"))
        window.resize(1100, 1600)
        picture(window, "working")
        window.resize(360, 700)
        window.open(server.url)
        picture(window, "runs-narrow")
        assert window.run("return document.documentElement.scrollWidth") <= 360
        assert window.complaints() == []
        icon = server.url.replace(f"{server.token}/", "favicon.ico")
        assert all(url == icon or url.startswith(server.url) for url in window.requests())


def picture(window: Browser, name: str) -> None:
    if PICTURES:
        window.screenshot(Path(PICTURES) / f"view-{name}.png")


def test_a_page_that_takes_its_time_holds_up_no_other(tmp_path: Path) -> None:
    """As when Slurm does not answer. The same page is made once for all who ask."""
    pages, asked, answered = Pages(tmp_path, Launchers), threading.Event(), threading.Event()
    made: list[str] = []

    def slow() -> str:
        made.append("slow")
        asked.set()
        assert answered.wait(300)
        return "slow"

    with ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(pages._page, ("slow",), slow)
            assert asked.wait(300)
            second = pool.submit(pages._page, ("slow",), slow)
            assert pool.submit(pages._page, ("other",), lambda: "other").result(timeout=200) == b"other"
        finally:
            answered.set()
        assert first.result() == second.result() == b"slow" and made == ["slow"]
