"""`hyperpod-ft serve` on a tuned run, asked by OpenAI's own client: the answers are those of stage generate.

`verify --served` asks it as any other server, and tells which model answers.
"""

import json
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.cli.main import app
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.runs import references
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving import __main__ as program
from hyperpod_ft.serving import models
from tests.unit.serving.conftest import Serving, serve
from tests.unit.serving.tuned import ROWS, TINY_LLAMA, TOKENS


@pytest.fixture(scope="module")
def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def samples(tuned_run: Run) -> list[dict[str, Any]]:
    """What stage generate wrote, a row for each of ROWS."""
    return list(json.loads(tuned_run.paths.samples_path.read_text())["prompts"])


def messages(row: dict[str, str]) -> list[Any]:
    system = [{"role": "system", "content": row["context"]}] if row["context"] else []
    return [*system, {"role": "user", "content": row["instruction"]}]


def test_base_tuned_and_adapter_are_side_by_side(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tuned", "base", "mine"]


@pytest.mark.parametrize("name", ["tuned", "base"])
def test_answers_are_those_of_stage_generate(client: openai.OpenAI, samples: list[dict[str, Any]], name: str) -> None:
    for row, sample in zip(ROWS, samples, strict=True):
        expected = sample[name]
        chat = client.chat.completions.create(model=name, messages=messages(row), max_tokens=TOKENS)
        assert chat.choices[0].message.content == expected
        text = client.completions.create(model=name, prompt=sample["prompt"], max_tokens=TOKENS)
        assert text.choices[0].text == expected and text.usage == chat.usage
        pieces = client.chat.completions.create(model=name, messages=messages(row), max_tokens=TOKENS, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    assert samples[0]["base"] != samples[0]["tuned"]


def test_the_adapter_answers_as_the_merged_model(client: openai.OpenAI, samples: list[dict[str, Any]]) -> None:
    for sample in samples:
        answer = client.completions.create(model="mine", prompt=sample["prompt"], max_tokens=TOKENS)
        assert answer.choices[0].text == sample["tuned"]


def test_eight_clients_at_once_get_their_own_answers(client: openai.OpenAI, samples: list[dict[str, Any]]) -> None:
    def ask(number: int) -> tuple[str, str]:
        sample, name = samples[number % 3], ("tuned", "base", "mine")[number % 3 - number % 2]
        pieces = client.completions.create(model=name, prompt=sample["prompt"], max_tokens=TOKENS, stream=True)
        return "".join(piece.choices[0].text for piece in pieces), sample["base" if name == "base" else "tuned"]

    with ThreadPoolExecutor(8) as pool:
        for found, expected in pool.map(ask, range(8)):
            assert found == expected


def test_a_prompt_that_does_not_fit_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tuned has room for 1024") as caught:
        client.completions.create(model="tuned", prompt="x " * 2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_tokens 1024"):
        client.completions.create(model="tuned", prompt="x", max_tokens=1024)
    with pytest.raises(openai.BadRequestError, match="user and assistant in turn"):
        client.chat.completions.create(model="tuned", messages=[{"role": "tool", "content": "x"}])  # type: ignore[list-item]


def test_what_it_prints_works_as_it_stands(serving: Serving) -> None:
    (command,) = [line for line in serving.printed if line.startswith("curl ")]
    done = subprocess.run(["curl", "--silent", *shlex.split(command)[1:]], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_ask_prints_one_answer_of_the_last_run(tuned_run: Run, samples: list[dict[str, Any]]) -> None:
    references.set_last("run", tuned_run.paths.directory)
    command = [sys.executable, "-m", "hyperpod_ft", "ask", ROWS[0]["instruction"]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(samples[0]["tuned"]) and done.stdout.endswith("\n")


def test_pictures_are_read_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [f"--model=it={tmp_path}", "--ask=What is this?", "--image=/none.png"]
    for described, said in (({}, "it reads no images"), ({"text_config": {}}, "/none.png: No such file")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"} | described))
        with pytest.raises(SystemExit):
            program.main(asked)
        assert f"error: --image: {said}" in capsys.readouterr().err


def test_a_directory_with_a_key_until_ctrl_c(tuned_run: Run) -> None:
    started = serve(str(tuned_run.paths.tuned_model), HYPERPOD_FT_API_KEY="secret")
    asking = openai.OpenAI(base_url=f"{started.url}/v1", api_key="secret", max_retries=0)
    assert [model.id for model in asking.models.list()] == ["merged"]
    with pytest.raises(openai.AuthenticationError, match="HYPERPOD_FT_API_KEY"):
        asking.with_options(api_key="guess").models.list()
    assert "secret" not in "\n".join(started.printed) and "$HYPERPOD_FT_API_KEY" in "\n".join(started.printed)
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(300) == 130


def test_what_cannot_be_served_is_one_line(tuned_run: Run, make_run: Any, tmp_path: Any) -> None:
    untrained = make_run()
    untrained.freeze()
    with pytest.raises(UserError, match=r"no tuned model yet: stage merge: has not run; run: hyperpod-ft resume"):
        models.find(str(untrained.paths.directory), Launchers())
    with pytest.raises(UserError, match="is an adapter"):
        models.find(str(tuned_run.paths.adapter), Launchers())
    with pytest.raises(UserError, match="--adapter: 'mine' is not NAME=DIR"):
        models.find(str(TINY_LLAMA), Launchers(), ["mine"])
    with pytest.raises(UserError, match="--adapter base: a model already has this name"):
        models.find(str(tuned_run.paths.directory), Launchers(), [f"base={tuned_run.paths.adapter}"])
    with pytest.raises(UserError, match=r"--adapter mine .*no such directory"):
        models.find(str(TINY_LLAMA), Launchers(), [f"mine={tmp_path / 'nothing'}"])


def test_the_models_of_a_server_are_told_apart(tuned_run: Run, serving: Serving) -> None:
    paths = tuned_run.paths
    for directory, name in ((paths.tuned_model, "tuned"), (paths.tuned_model, "mine"), (paths.adapter, "mine")):
        found = verify(directory, base=paths.base_model, served=serving.url, model=name)
        assert found.findings == () and found.served
        assert found.served.tuned == found.served.asked == 16 and found.served.base == 0
    # a server that ignores an adapter, as in vllm#41754, answers as the base under the adapter's name
    command = ["verify", paths.adapter, "--base", paths.base_model, "--served", serving.url, "--model", "base"]
    ignored = CliRunner().invoke(app, [*map(str, command)])
    assert ignored.exit_code == 1
    assert "base is the base model: 16 of 16 tokens are the base's, 0 the tuned model's" in ignored.stdout
    same = verify(paths.base_model, base=paths.base_model, served=serving.url)
    assert "cannot be told from the base" in same.findings[-1]


def test_a_server_that_cannot_be_asked(tuned_run: Run, serving: Serving) -> None:
    def refusal(served: str, model: str | None = None) -> str:
        with pytest.raises(UserError) as refused:
            verify(tuned_run.paths.tuned_model, base=tuned_run.paths.base_model, served=served, model=model)
        return str(refused.value)

    assert "is not a URL" in refusal("file:///etc/passwd")
    assert "does not answer" in refusal("http://127.0.0.1:9")
    assert "answered 404" in refusal(f"{serving.url}/v1", "nobody")
    with pytest.raises(UserError, match="add --served and --base"):
        verify(tuned_run.paths.tuned_model, served=serving.url)
