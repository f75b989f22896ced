"""Serve models, or answer one question.

python -m hyperpod_ft.serving --model NAME=DIR [--model NAME=DIR]... [--adapter NAME=DIR]... [--port N]
"""

import argparse
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hyperpod_ft import publish
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError
from hyperpod_ft.serving.openai_api import ApiError, Request
from hyperpod_ft.serving.server import API_KEY, Answers, Server

_EXAMPLE = "Which command submits a batch script?"


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parse(arguments)
    try:
        if given.ask is not None:
            _ask(given)
        else:
            _serve(given)
    except (UserError, ApiError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hyperpod_ft.serving", description="Serve models over HTTP.")
    parser.add_argument(
        "--model", action="append", type=_named, required=True, help="NAME=DIR; the first is the default"
    )
    parser.add_argument("--adapter", action="append", type=_named, default=[], help="NAME=DIR, of the last --model")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer and chat template; of the first model")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one")
    parser.add_argument("--title", default="hyperpod-ft")
    parser.add_argument("--address-file", type=Path, help="file to write once the models answer: JSON with the port")
    parser.add_argument("--ask", metavar="QUESTION", help="answer this on standard output instead of serving")
    return parser.parse_args(arguments)


def _named(text: str) -> tuple[str, Path]:
    name, equals, directory = text.partition("=")
    if not equals or not name or not directory:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, Path(directory)


def _serve(given: argparse.Namespace) -> None:
    server = Server(given.host, given.port, given.title, os.environ.get(API_KEY) or None)
    # as PID 1 of a container, a process without a handler ignores it
    signal.signal(signal.SIGTERM, _exit)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    print(f"Loading {', '.join(name for name, _ in [*given.model, *given.adapter])} ...", flush=True)
    server.answers = _load(given)
    print(_greeting(server, given.host), flush=True)
    if given.address_file:
        publish.write_json(given.address_file, {"host": given.host, "port": server.port})
    threading.Event().wait()


def _exit(*_: object) -> NoReturn:
    sys.exit(0)


def _load(given: argparse.Namespace) -> Answers:
    from hyperpod_ft.serving.answering import Answering, device_named  # noqa: PLC0415 - imports torch, for seconds

    tokenizer = given.tokenizer or given.model[0][1]
    return Answering.load(dict(given.model), dict(given.adapter), tokenizer, device_named(given.device))


def _greeting(server: Server, host: str) -> str:
    """Where the page is, and a command to try."""
    assert server.answers is not None
    shown = f"[{host}]" if ":" in host else host
    name = server.answers.names[0]
    path = "chat/completions"
    question: dict[str, object] = {"messages": [{"role": "user", "content": _EXAMPLE}]}
    if not server.answers.chats:
        path, question = "completions", {"prompt": _EXAMPLE}
    key = f' -H "Authorization: Bearer ${API_KEY}"' if server.api_key else ""
    body = shlex.quote(json.dumps({"model": name} | question))
    return (
        f"Chat page: http://{shown}:{server.port}/\n"
        f"curl http://{shown}:{server.port}/v1/{path} -H 'Content-Type: application/json'{key} -d {body}\n"
        "Stop: Ctrl-C"
    )


def _ask(given: argparse.Namespace) -> None:
    answers = _load(given)
    chat = answers.chats
    question = Request(
        model="",
        messages=({"role": "user", "content": given.ask},) if chat else None,
        prompt=None if chat else given.ask,
        max_tokens=None,
        temperature=0.0,
        top_p=1.0,
        seed=None,
        stop=(),
        stream=True,
        include_usage=False,
    )
    answers.answer(question, lambda text: print(text, end="", flush=True))
    print()


if __name__ == "__main__":
    main()
