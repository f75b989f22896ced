"""Serve models, or answer one question.

python -m hyperpod_ft.serving --model NAME=DIR [--model NAME=DIR]... [--adapter NAME=DIR]... [--port N]
"""

import argparse
import base64
import json
import os
import platform
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hyperpod_ft import gc_pause, publish
from hyperpod_ft.checkpoint.formats.model_directory import has_chat_template, is_image_text, read_config
from hyperpod_ft.data.text import answer_format
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError
from hyperpod_ft.serving import vllm
from hyperpod_ft.serving.http.connection import API_KEY, refuse_open, url
from hyperpod_ft.serving.http.openai_api import HttpError, Request
from hyperpod_ft.serving.http.server import Server
from hyperpod_ft.serving.markup.parts import Part, Reasoning, ToolCall
from hyperpod_ft.serving.models import name_and_directory
from hyperpod_ft.shipped import installing

if TYPE_CHECKING:
    from hyperpod_ft.serving.answers.answering import Answering

_EXAMPLE = "Which command submits a batch script?"


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parse(arguments)
    try:
        if given.ask is not None:
            _ask(given)
        else:
            _serve(given)
    except (UserError, HttpError) as error:
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
    parser.add_argument("--tokenizer", type=Path, help="directory of tokenizer and chat template; by default the first")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one")
    parser.add_argument("--title", default="hyperpod-ft")
    parser.add_argument("--address-file", type=Path, help="file to write once the models answer: JSON")
    parser.add_argument("--with", dest="python", type=Path, help="serve with vLLM of this Python interpreter")
    parser.add_argument("--vllm-args", default="", help="further arguments for vLLM, as one string")
    parser.add_argument("--ask", metavar="QUESTION", help="answer this on standard output instead of serving")
    parser.add_argument("--image", action="append", type=Path, default=[], help="picture before that QUESTION")
    return parser.parse_args(arguments)


def _named(text: str) -> tuple[str, Path]:
    try:
        return name_and_directory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _serve(given: argparse.Namespace) -> None:
    # as PID 1 of a container, a process without a handler ignores it
    signal.signal(signal.SIGTERM, _exit)
    if given.python:
        _serve_with_vllm(given)
        return
    server = Server(given.host, given.port, given.title, os.environ.get(API_KEY) or None)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    print(f"Loading {', '.join(name for name, _ in [*given.model, *given.adapter])} ...", flush=True)
    server.answers = _load(given)
    if server.answers.chats:
        _describe(_tokenizer(given))
    print(f"Chat page: {url(given.host, server.port)}/")
    _announce(given, server.port, server.answers.names[0], chat=server.answers.chats)
    threading.Event().wait()


def _serve_with_vllm(given: argparse.Namespace) -> None:
    if len(given.model) > 1:
        raise UserError("--model: vLLM serves one base model", "give one model, with its adapters")
    key = os.environ.get(API_KEY) or None
    refuse_open(given.host, key)
    port = given.port or vllm.free_port(given.host)
    (model,), tokenizer = given.model, _tokenizer(given)
    chat = has_chat_template(tokenizer)
    command = vllm.command(given.python, model, dict(given.adapter), tokenizer, given.host, port, given.vllm_args)
    if chat:
        _describe(tokenizer)
    started = vllm.Vllm(command, given.host, port, key)
    try:
        started.wait_until_ready()
        names = [name for name, _ in [*given.adapter, *given.model]]
        _announce(given, port, names[0], chat=chat)
        sys.exit(started.wait())
    finally:
        started.stop()


def _exit(*_: object) -> NoReturn:
    sys.exit(0)


def _load(given: argparse.Namespace) -> "Answering":
    try:
        gc_pause.pause_collection()
        from hyperpod_ft.serving.answers.answering import Answering  # noqa: PLC0415 - imports torch, for seconds
        from hyperpod_ft.serving.answers.decoding import device_named  # noqa: PLC0415 - as above

        gc_pause.resume_collection()
    except ModuleNotFoundError as error:
        raise UserError(f"{sys.executable}: {error}", installing("torch")) from error
    return Answering.load(dict(given.model), dict(given.adapter), _tokenizer(given), device_named(given.device))


def _tokenizer(given: argparse.Namespace) -> Path:
    return given.tokenizer or Path(given.model[0][1])


def _describe(tokenizer: Path) -> None:
    form = answer_format.of_model(tokenizer)
    print(f"Tool calls: {form.description}{'; reasoning: in <think>' if form.reasoning else ''}", flush=True)


def _announce(given: argparse.Namespace, port: int, name: str, *, chat: bool) -> None:
    """Print a command to try, and write where the server listens."""
    path = "chat/completions" if chat else "completions"
    messages = [{"role": "user", "content": _EXAMPLE}]
    question: dict[str, object] = {"messages": messages} if chat else {"prompt": _EXAMPLE}
    key = f' -H "Authorization: Bearer ${API_KEY}"' if os.environ.get(API_KEY) else ""
    body = shlex.quote(json.dumps({"model": name} | question))
    print(f"curl {url(given.host, port)}/v1/{path} -H 'Content-Type: application/json'{key} -d {body}")
    print("Stop: Ctrl-C", flush=True)
    if given.address_file:
        publish.write_json(given.address_file, {"node": platform.node(), "host": given.host, "port": port})


def _ask(given: argparse.Namespace) -> None:
    content = _content(given)
    answers = _load(given)
    chat = answers.chats or bool(given.image)
    question = Request(
        messages=({"role": "user", "content": content},) if chat else None,
        prompt=None if chat else given.ask,
        stream=True,
    )
    before: type[Part] | None = None

    def show(parts: Sequence[Part]) -> None:
        nonlocal before
        for part in parts:
            assert not isinstance(part, ToolCall), "there are no tools"
            apart = "\n\n" if before is Reasoning and type(part) is not before else ""
            print(apart + part.text, end="", flush=True)
            before = type(part)

    answers.answer(question, show)
    print()


def _content(given: argparse.Namespace) -> Sequence[object]:
    """The question, or the parts of one with images. Raises UserError for a model that reads none."""
    name, directory = given.model[0]
    if given.image and not is_image_text(read_config(directory)):
        raise UserError(f"--image: {name} reads no images", "ask a model that does, or leave --image out")
    try:
        files = [base64.b64encode(path.read_bytes()).decode() for path in given.image]
    except OSError as error:
        raise UserError(f"--image: {error.filename}: {error.strerror}", "name the file of a picture") from error
    images = [{"type": "image_url", "image_url": {"url": f"data:;base64,{file}"}} for file in files]
    return [*images, {"type": "text", "text": given.ask}] if images else given.ask


if __name__ == "__main__":
    main()
