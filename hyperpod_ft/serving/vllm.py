"""vLLM as the server, from an interpreter that has it: its command line, and its life as a child process.

vLLM holds one model. For a LoRA run that is the base model, which answers as `base`, with the run's adapter as `tuned`;
else the tuned model alone.
"""

import os
import shlex
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG, AdapterConfig, read_config
from hyperpod_ft.checkpoint.formats.model_directory import CHAT_TEMPLATE
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.sagemaker import MAX_LORA_RANK
from hyperpod_ft.data.text import answer_format
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.finished import BASE, TUNED
from hyperpod_ft.planning.lora import max_lora_rank
from hyperpod_ft.processes import die_with_parent, end
from hyperpod_ft.progress import polls
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.serving.http.connection import url
from hyperpod_ft.serving.models import Models

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 30.0


def vllm_setup(
    models: Models, python: Path, arguments: str, *, base: bool, on_node: bool
) -> tuple[Models, tuple[str, ...], dict[str, str]]:
    """What vLLM is to serve: the models, options of `python -m hyperpod_ft.serving`, and its environment.

    `arguments`: the user's own. `base`: the base model is wanted too. `on_node`: on a node of the run's cluster.
    Raises UserError where vLLM cannot serve what is wanted.
    """
    run = models.run
    if on_node and run is not None and run.config.instance.is_neuron:
        one = replace(models, directories={TUNED: run.paths.tuned_model})
        if models.adapters:
            raise UserError("--adapter: not supported with vLLM for Neuron", "merge it, and serve the merged model")
        options = _options(python, f"{_neuron_arguments(run.config)} {arguments}")
        return one, options, _neuron_environment(run.paths)
    return _one_model(models, base=base), _options(python, arguments), {}


def _problem(adapter: AdapterConfig) -> str:
    """Why vLLM cannot add such an adapter to its base, or is not known to; empty if it can."""
    if adapter.use_dora:
        return "vLLM does not serve DoRA"
    unknown = [key for key in ("target_parameters", "modules_to_save") if getattr(adapter, key)]
    return f"vLLM is not known to serve adapters with {unknown[0]}" if unknown else ""


def _options(python: Path, arguments: str) -> tuple[str, ...]:
    return ("--with", str(python.absolute()), f"--vllm-args={arguments.strip()}")


def _one_model(models: Models, *, base: bool) -> Models:
    """A run's adapter on its base, or its tuned model alone."""
    run = models.run
    if run is None:
        return models
    file = run.paths.adapter / CONFIG
    adapted = base and run.config.training.method == "lora" and not run.config.model.added_tokens
    if adapted and file.is_file() and not _problem(read_config(file)):
        return replace(
            models, directories={BASE: run.paths.base_model}, adapters={TUNED: run.paths.adapter, **models.adapters}
        )
    if models.adapters:
        raise UserError("--adapter: vLLM adds adapters to the base model only", "omit --no-base")
    return replace(models, directories={TUNED: run.paths.tuned_model})


def _neuron_arguments(config: RunConfig) -> str:
    sequences = 4
    return (
        f"--tensor-parallel-size {config.instance.tensor_parallel}"
        # one block a sequence, which it requires without prefix caching
        f" --max-num-seqs {sequences} --num-gpu-blocks-override {sequences} --no-enable-prefix-caching"
    )


def _neuron_environment(paths: RunPaths) -> dict[str, str]:
    """The first start compiles the model and keeps the result with the run; later ones load it."""
    return {
        "VLLM_NEURON_FRAMEWORK": "neuronx-distributed-inference",
        "NEURON_COMPILED_ARTIFACTS": str(paths.serving / "neuron-artifacts"),
    }


def command(
    python: Path,
    model: tuple[str, Path],
    adapters: Mapping[str, Path],
    tokenizer: Path,
    host: str,
    port: int,
    more: str,
) -> list[str]:
    """vLLM's command line. `more`: the user's arguments, which come last and win.

    Raises UserError for an adapter that vLLM cannot serve.
    """
    name, directory = model
    # not `vllm serve`: this also runs where the program is not on PATH, and is what AWS's container runs
    line = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    line += ["--served-model-name", name, "--tokenizer", str(tokenizer), "--host", host, "--port", str(port)]
    # JSON; without it, vLLM lets every page in the user's browser read answers
    line += ["--allowed-origins", "[]"]
    if (tokenizer / CHAT_TEMPLATE).is_file():
        line += ["--chat-template", str(tokenizer / CHAT_TEMPLATE)]
    for option, value in answer_format.of_model(tokenizer).vllm_options.items():
        line += [f"--{option}"] if value == "true" else [f"--{option}", value]
    if adapters:
        line += ["--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", str(_rank(adapters))]
        line += ["--lora-modules", *(f"{name}={directory}" for name, directory in adapters.items())]
    return [*line, *shlex.split(more)]


def _rank(adapters: Mapping[str, Path]) -> int:
    largest = 0
    for name, directory in adapters.items():
        config = read_config(directory / CONFIG)
        if problem := _problem(config):
            raise UserError(f"adapter {name}: {problem}", "serve the merged model (--no-base)")
        largest = max(largest, config.r, *config.rank_pattern.values())
    if largest > MAX_LORA_RANK:
        raise UserError(
            f"the adapters have rank {largest}, vLLM serves at most {MAX_LORA_RANK}",
            "serve the merged model (--no-base)",
        )
    return max_lora_rank(largest)


def check(python: Path) -> None:
    """Raise UserError unless it is an interpreter with vLLM."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([str(python), "-c", program], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--with {python}: cannot run it: {error}", "give the path of a Python interpreter") from error
    if done.returncode:
        raise UserError(f"--with {python}: has no vLLM", "pip install vllm in its environment")


class Vllm:
    """A running vLLM server. Ends with this process."""

    def __init__(self, command: Sequence[str], host: str, port: int, api_key: str | None) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_API_KEY")}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if api_key:
            environment["VLLM_API_KEY"] = api_key
        self._health = f"{url(host, port)}/health"
        self._process = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - before any thread
        )

    def wait_until_ready(self) -> None:
        """Raises UserError when it ends before it answers."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # HTTP_PROXY is for other machines
        for _ in polls(_POLL_SECONDS):
            if (status := self._process.poll()) is not None:
                raise UserError(f"vLLM ended with status {status} before it answered", "see its messages above")
            with suppress(urllib.error.URLError, OSError), direct.open(self._health, timeout=5):
                return

    def wait(self) -> int:
        return self._process.wait()

    def stop(self) -> None:
        end(self._process, _GRACE_SECONDS)


def free_port(host: str) -> int:
    """A port that was free just now."""
    with socket.create_server((host, 0)) as listening:
        return int(listening.getsockname()[1])
