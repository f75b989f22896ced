"""The pages: what they link to is there, their commands are known, and their whole run files are valid."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hyperpod_ft.cli.main import app
from hyperpod_ft.config import run_file
from tests.pages.blocks import ROOT, blocks

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]


def anchors(page: Path) -> set[str]:
    """Those of its headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\]\([^)]*\)", "", title).lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8"))
    found = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
    assert not [path for path, _ in found if not path.exists()]
    assert not [(path.name, anchor) for path, anchor in found if anchor and anchor not in anchors(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_known(page: Path) -> None:
    """Each with its options and arguments: not all of them can be typed in a test."""
    text = "\n".join(blocks(str(page.relative_to(ROOT)))).replace("\\\n", "")
    for line in re.findall("^hyperpod-ft .*", text, re.MULTILINE):
        command: Any = typer.main.get_command(app)
        name, words = "", shlex.split(line, comments=True)[1:]
        while hasattr(command, "commands"):
            if words[0] in command.commands:
                name, *words = words
            command = command.commands[name if name in command.commands else command.default]
        command.make_context(name, words)


@pytest.mark.parametrize(
    "text",
    [
        text
        for page in ("README", "docs/run-file", "docs/methods", "docs/models")
        for text in blocks(f"{page}.md", "yaml")
    ],
)
def test_run_files_are_valid(text: str) -> None:
    """Some pages show only what they are about."""
    shown = yaml.safe_load(text)
    given = {"name": "shown", "engine": "torch", "dataset": {"source": "tatsu-lab/alpaca", "format": "alpaca"}} | shown
    given["model"] = {"source": "Qwen/Qwen3-8B"} | shown.get("model", {})
    run_file.validate(given, "run.yaml")
