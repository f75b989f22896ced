"""vLLM as the server: its command line, a program in its place, and vLLM itself where there is one."""

import json
import os
import shlex
import shutil
import socket
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving import models, vllm
from tests.programs import call
from tests.unit.serving import tuned
from tests.unit.serving.conftest import serve

# In the place of vLLM's server: answers /health, and writes what it was started with.
STAND_IN = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
key = os.environ.get("VLLM_API_KEY")
json.dump([sys.argv[1:], key, os.environ.get("PYTHONPATH"), os.getpid()], open({file!r}, "w"))
if "--fail" in sys.argv:
    sys.exit(3)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(directory: Path) -> Path:
    """An interpreter whose `-m vllm...` is the program above."""
    directory.mkdir()
    program = directory / "server.py"
    program.write_text(STAND_IN.format(file=str(directory / "started.json")))
    python = directory / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nshift 2\nexec {shlex.quote(sys.executable)} {program} "$@"\n'
    )
    python.chmod(0o755)
    return python


def arguments_of(line: list[str]) -> dict[str, str]:
    return {name: value for name, value in pairwise(line) if name.startswith("--")}


def test_a_lora_run_is_served_as_base_and_adapter(tuned_run: Run) -> None:
    served, *_ = vllm.vllm_setup(
        models.find(str(tuned_run.paths.directory), Launchers()), Path("/p"), "", base=True, on_node=False
    )
    assert served.directories == {"base": tuned_run.paths.base_model}
    assert served.adapters == {"tuned": tuned_run.paths.adapter} and served.tokenizer == tuned_run.paths.tuned_model
    (model,) = served.directories.items()
    line = vllm.command(Path("/p"), model, served.adapters, served.tokenizer, "127.0.0.1", 8000, "--dtype 'float32'")
    given = arguments_of(line)
    assert line[:3] == ["/p", "-m", "vllm.entrypoints.openai.api_server"] and line[-2:] == ["--dtype", "float32"]
    assert given["--chat-template"] == str(tuned_run.paths.tuned_model / "chat_template.jinja")
    assert (given["--max-lora-rank"], given["--lora-modules"]) == ("8", f"tuned={tuned_run.paths.adapter}")


def test_a_model_that_calls_tools_has_its_answers_read_so(tmp_path: Path) -> None:
    def options(template: str) -> list[str]:
        (tmp_path / "chat_template.jinja").write_text(template)
        line = vllm.command(Path("/p"), ("m", tmp_path), {}, tmp_path, "127.0.0.1", 8000, "--tool-call-parser mine")
        return line[line.index("--chat-template") + 2 :]

    mine = ["--tool-call-parser", "mine"]  # the last one counts
    known = ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3"]
    assert options(r"{{ '<tool_call>\n<function=' }}{{ '<think></think>' }}") == known + mine
    assert options("{{ messages }}") == mine


def test_without_the_base_the_merged_model_is_served(tuned_run: Run) -> None:
    found = models.find(str(tuned_run.paths.directory), Launchers())
    served, *_ = vllm.vllm_setup(found, Path("/p"), "", base=False, on_node=False)
    assert served.directories == {"tuned": tuned_run.paths.tuned_model} and not served.adapters
    with pytest.raises(UserError, match="--no-base"):
        vllm.vllm_setup(
            replace(found, adapters={"a": tuned_run.paths.adapter}), Path("/p"), "", base=False, on_node=False
        )


def test_a_run_whose_adapter_has_whole_modules_is_served_merged(tuned_run: Run) -> None:
    file = tuned_run.paths.adapter / "adapter_config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps(json.loads(before) | {"modules_to_save": ["lm_head"]}))
        found = models.find(str(tuned_run.paths.directory), Launchers())
        served, *_ = vllm.vllm_setup(found, Path("/p"), "", base=True, on_node=False)
        assert served.directories == {"tuned": tuned_run.paths.tuned_model} and not served.adapters
    finally:
        file.write_text(before)


def test_a_run_with_new_tokens_is_served_merged(tuned_run: Run) -> None:
    found = models.find(str(tuned_run.paths.directory), Launchers())
    given = tuned_run.config.model.model_copy(update={"new_tokens": ("<tool>",)})
    run = replace(tuned_run, config=tuned_run.config.model_copy(update={"model": given}))
    served, *_ = vllm.vllm_setup(replace(found, run=run), Path("/p"), "", base=True, on_node=False)
    assert served.directories == {"tuned": tuned_run.paths.tuned_model} and not served.adapters


def test_adapters_that_vllm_cannot_serve(tuned_run: Run, tmp_path: Path) -> None:
    config = json.loads((tuned_run.paths.adapter / "adapter_config.json").read_text())
    for changes, reason in (
        ({"use_dora": True}, "DoRA"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 600}, "rank 600"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=f"{reason}.*--no-base"):
            vllm.command(Path("/p"), ("base", tmp_path), {"a": tmp_path}, tmp_path, "127.0.0.1", 1, "")


def test_trainium_serves_the_merged_model_with_kept_artifacts() -> None:
    run = Run.of(run_file.load(run_file.find("llama3-8b-dolly-lora-trn1")))
    found = models.Models(
        "t", {"tuned": run.paths.tuned_model, "base": run.paths.base_model}, {}, run.paths.tuned_model, run
    )
    served, options, environment = vllm.vllm_setup(found, Path("/p"), "--max-model-len 512", base=True, on_node=True)
    assert list(served.directories) == ["tuned"]
    assert environment["NEURON_COMPILED_ARTIFACTS"].startswith(str(run.paths.directory))
    assert options[-1].endswith("--max-model-len 512") and "--tensor-parallel-size 8" in options[-1]


def test_serve_with_becomes_its_parent(tuned_run: Run, tmp_path: Path) -> None:
    python = stand_in(tmp_path / "vllm")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    proxies = {"http_proxy": nowhere, "HTTP_PROXY": nowhere, "no_proxy": "", "NO_PROXY": ""}
    started = serve(str(tuned_run.paths.directory), "--with", str(python), HYPERPOD_FT_API_KEY="secret", **proxies)
    line, key, path, pid = json.loads((tmp_path / "vllm" / "started.json").read_text())
    assert arguments_of(line)["--allowed-origins"] == "[]"
    assert key == "secret" and "secret" not in " ".join(line) and path is None
    (command,) = [shown for shown in started.printed if shown.startswith("curl ")]
    assert '"model": "tuned"' in command and "chat/completions" in command
    started.process.terminate()
    assert started.process.wait(300) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_template_in_the_tokenizer_configuration_is_asked_as_a_chat(tuned_run: Run, tmp_path: Path) -> None:
    """Llama 3 Instruct keeps its template there."""
    model = tmp_path / "instruct"
    shutil.copytree(tuned_run.paths.tuned_model, model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    for given, path in ((template, "chat/completions"), (None, "completions")):
        (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": given}))
        started = serve(str(model), "--with", str(stand_in(tmp_path / path.replace("/", "-"))))
        started.process.terminate()
        assert started.process.wait(300) == 0
        (command,) = [shown for shown in started.printed if shown.startswith("curl ")]
        assert f"/v1/{path} " in command


def test_what_goes_wrong_is_one_line(tuned_run: Run, tmp_path: Path) -> None:
    python = stand_in(tmp_path / "vllm")
    for options, reason in (
        (["--with", str(python), "--vllm-args", "--fail"], "vLLM ended with status 3 before it answered"),
        (["--with", sys.executable], "has no vLLM; pip install vllm"),
        (["--with", str(tmp_path / "none")], "cannot run it"),
        (["--with", str(python), "--host", "0.0.0.0"], "HYPERPOD_FT_API_KEY"),
    ):
        done = call("serve", tuned_run.paths.directory, "--port", "0", *options)
        assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.vllm
@pytest.mark.skipif(
    "HYPERPOD_FT_VLLM_PYTHON" not in os.environ, reason="HYPERPOD_FT_VLLM_PYTHON names no interpreter with vLLM"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("base", ["--base", "--no-base"])
def test_vllm_answers_as_stage_generate(tuned_run: Run, base: str) -> None:
    """On CPUs: LD_PRELOAD of its libiomp5.so, VLLM_CPU_KVCACHE_SPACE and the like are the caller's environment."""
    options = "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 2"
    started = serve(
        str(tuned_run.paths.directory), base, "--with", os.environ["HYPERPOD_FT_VLLM_PYTHON"], "--vllm-args", options
    )
    asking = openai.OpenAI(base_url=f"{started.url}/v1", api_key="none", max_retries=0)
    try:
        for row, sample in zip(
            tuned.ROWS, json.loads(tuned_run.paths.samples_path.read_text())["prompts"], strict=True
        ):
            for name in ("tuned", "base")[: 2 if base == "--base" else 1]:
                text = asking.completions.create(
                    model=name, prompt=sample["prompt"], max_tokens=tuned.TOKENS, temperature=0
                )
                assert text.choices[0].text == sample[name]
                messages = [{"role": "system", "content": row["context"]}] if row["context"] else []
                messages += [{"role": "user", "content": row["instruction"]}]
                chat = asking.chat.completions.create(
                    model=name,
                    messages=messages,  # type: ignore[arg-type]
                    max_tokens=tuned.TOKENS,
                    temperature=0,
                )
                assert chat.choices[0].message.content == sample[name] and chat.usage == text.usage
    finally:
        started.process.terminate()
        started.process.wait(300)
