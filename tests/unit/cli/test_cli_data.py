"""`data show`: what is trained of a row, on a terminal, in a pipe and as a page."""

import json
import os
import pty
import struct
import termios
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.browser import Browser, browser, installed
from tests.programs import call, commands
from tests.unit.tiny_tokenizer import make, save

HOSTILE = "</script><img src=x onerror='window.attacked = 1'>\x1b[31m"
CHATS = (
    {"role": "user", "content": "\ta"},
    {"messages": [{"role": "user", "content": "How many foxes?"}, {"role": "assistant", "content": "many\nclips"}]},
    {"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "fox " * 40}]},
    {"messages": [{"role": "user", "content": "fox " * 400}, {"role": "assistant", "content": "no"}]},
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run file, its model's tokenizer and its rows, of which only the second and third are used."""
    base = tmp_path_factory.mktemp("rows")
    save(base / "model", make())
    (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    sections = {
        "name": "look",
        "engine": "torch",
        "cluster": {"root": str(base / "volume"), "instance_type": "local"},
        "model": {"source": "./model"},
        "dataset": {"source": "./rows.jsonl", "format": "chat", "max_length": 256},
    }
    (base / "run.yaml").write_text(json.dumps(sections))
    return base


def on_a_terminal(place: Path, *arguments: str, **environment: str) -> str:
    """What the command writes to a terminal of 80 columns."""
    keyboard, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    given = os.environ | {"TERM": "xterm-256color"} | environment
    server = commands("tests.unit.cli.data_modules")
    server.start(["hyperpod_ft", "data", "show", *arguments], given, Path(os.ttyname(terminal)), place)
    os.close(terminal)
    printed = b""
    while part := _read(keyboard):
        printed += part
    os.close(keyboard)
    return printed.decode()


def _read(keyboard: int) -> bytes:
    try:
        return os.read(keyboard, 1 << 16)
    except OSError:  # the terminal's program has ended
        return b""


def test_the_first_row_that_is_used_and_nothing_is_written(place: Path) -> None:
    shown = call("data", "show", "run.yaml", cwd=place)
    assert shown.returncode == 0, shown.stderr
    assert "rows.jsonl:2 trains message 2" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert [line.split()[:2] for line in shown.stdout.splitlines() if line.startswith("+")] == [
        ["+", "answer"],
        ["+", "end"],
    ]
    assert "man·y·↵" in shown.stdout, "borders of tokens, and line breaks that are trained"
    assert "the token at which a server stops" in shown.stdout
    assert not (place / "volume").exists()


def test_a_terminal_of_80_columns_has_colors_and_every_character(place: Path) -> None:
    plain = call("data", "show", "run.yaml", "--row=3", cwd=place).stdout
    printed = on_a_terminal(place, "run.yaml", "--row=3")
    assert "\x1b[32m" in printed, "trained tokens are green"
    uncolored = on_a_terminal(place, "run.yaml", "--row=3", NO_COLOR="1")
    assert "\x1b[32m" not in uncolored and "+" in uncolored
    lines = _without_styles(printed).splitlines()
    assert max(map(len, lines)) <= 80
    assert "?[31m" in _without_styles(printed) and "\x1b" not in plain, "what rows contain controls no terminal"
    answer = "".join(line[14:].rstrip() for line in lines if line.startswith(("+ answer", "              fox")))
    assert answer.replace(" ", "") == "fox" * 40


def _without_styles(text: str) -> str:
    found, rest = "", text
    while "\x1b[" in rest:
        before, _, after = rest.partition("\x1b[")
        found, rest = found + before, after.partition("m")[2]
    return found + rest


def test_rows_that_cannot_be_used_say_what_stage_dataset_says(place: Path) -> None:
    bad = call("data", "show", "run.yaml", "--row=1", cwd=place)
    said = "rows.jsonl:1 (missing field 'messages': the row has role, content)"
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", f"error: {said}\n")
    long = call("data", "show", "run.yaml", "--row=4", cwd=place)
    assert long.returncode == 2
    assert "error: rows.jsonl:4 (longer than max_length: 423 tokens" in long.stderr and long.stderr.count("\n") == 1
    assert "cut" in long.stdout and "not trained: longer than max_length" in long.stdout
    cut = call("data", "show", "run.yaml", "--row=4", "--set=dataset.overlong=truncate", cwd=place)
    assert cut.returncode == 0 and "its prompt fills dataset.max_length" in cut.stdout
    beyond = call("data", "show", "run.yaml", "--row=9", cwd=place)
    assert beyond.stderr == "error: row 9: the dataset has 4 rows; give a number from 1 on\n"
    none = call("data", "show", "run.yaml", "--set=dataset.max_length=8", cwd=place)
    assert none.returncode == 2 and none.stderr.startswith("error: no row can be used: rows.jsonl:1 (missing field")


def test_what_is_not_on_this_machine_is_one_line(place: Path) -> None:
    for key in ("model", "dataset"):
        done = call("data", "show", "run.yaml", f"--set={key}.source=someone/something", cwd=place)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"error: {key}.source: someone/something is not on this machine;"
            " run: hyperpod-ft submit run.yaml --launcher process --only download --watch\n"
        )
    (place / "empty").mkdir(exist_ok=True)
    (place / "empty" / "config.json").write_text("{}")
    done = call("data", "show", "run.yaml", "--set=model.source=./empty", cwd=place)
    assert done.returncode == 2 and "no usable tokenizer" in done.stderr and done.stderr.count("\n") == 1


def test_rows_with_images_name_them(tmp_path: Path) -> None:
    """Their many tokens are written once."""
    shown = call("data", "show", "quickstart-images", "--row=2", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "rows.jsonl:2 trains message 2; image images/001.png (32 x 32 pixels)\n" in shown.stdout
    assert "<|vision_start|>·<|image_pad|> 4 times·<|vision_end|>" in shown.stdout
    assert call("data", "show", "quickstart-images", "--row=2", "--html=rows.html", cwd=tmp_path).returncode == 0
    assert "image images/001.png (32 x 32 pixels)" in (tmp_path / "rows.html").read_text()


def test_a_recipe_without_transformers_or_torch(tmp_path: Path) -> None:
    """Rows that are no chats need only the `tokenizers` library; torch is never imported."""
    for name in ("torch", "transformers"):
        (tmp_path / "poison" / name).mkdir(parents=True)
        (tmp_path / "poison" / name / "__init__.py").write_text(f"raise RuntimeError('{name} was imported')")
    path = f"{tmp_path / 'poison'}:{os.environ.get('PYTHONPATH', '')}"
    shown = call("data", "show", "quickstart", "--row=3", cwd=tmp_path, PYTHONPATH=path)
    assert shown.returncode == 0, shown.stderr
    assert "+ completion" in shown.stdout and "requests.jsonl:3" in shown.stdout


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.mark.skipif(not installed(), reason="chromium and chromedriver are missing")
def test_a_page_of_rows(place: Path, window: Browser) -> None:
    done = call("data", "show", "run.yaml", "--html=rows.html", cwd=place)
    assert (done.returncode, done.stdout) == (0, "rows.html\n"), done.stderr
    page = place / "rows.html"
    window.requests()
    window.complaints()
    window.resize(1000, 800)
    window.open(page.as_uri())
    assert window.texts("h2") == [f"rows.jsonl:{number}" for number in range(1, 5)]
    assert "missing field 'messages'" in window.text(".refused")
    assert "</script><img src=x" in window.text("body")
    assert window.run("return window.attacked") is None and window.run("return document.images.length") == 0
    assert {url for url in window.requests() if not url.startswith("chrome:")} == {page.as_uri()}
    titles = window.run("return [...document.querySelectorAll('mark')].map(e => e.title)")
    assert "end of turn, trained, 1 token" in titles
    assert window.texts(".reasons tbody th")[0] == "user"
    for width in (1000, 360):
        window.resize(width, 640)
        assert window.run("return document.documentElement.scrollWidth") <= width
    assert window.complaints() == []
    assert call("data", "show", "run.yaml", "--row=2", "--html=one.html", cwd=place).returncode == 0
    assert (place / "one.html").read_text().count("<h2") == 1
    bad = call("data", "show", "run.yaml", "--row=1", "--html=bad.html", cwd=place)
    assert bad.returncode == 2 and "missing field" in bad.stderr and "missing field" in (place / "bad.html").read_text()


def test_without_transformers_where_it_is_needed(place: Path, tmp_path: Path) -> None:
    """As in an environment of the kit without its extra torch: chats are rendered by transformers."""
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(name='transformers')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = call("data", "show", "run.yaml", cwd=place, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs transformers, which is not installed here; " in done.stderr
    assert done.stderr.endswith("-m pip install -c constraints.txt '.[torch]'\n") and done.stderr.count("\n") == 1
