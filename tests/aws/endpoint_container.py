"""The container of an endpoint or an inference component: the kit's own server, started by SageMaker's rules.

SageMaker puts the model's objects below /opt/ml/model, runs the image with its variables, and asks GET /ping on one
port until it answers 200. AWS's vLLM image turns `SM_VLLM_X` into vLLM's `--x`, Hugging Face's `SM_ON_X` into an
argument of `optimum-cli neuron serve`, LMI `OPTION_X` into option.x. Arguments that those servers do not have, or that
do not fit the files, end the container as they would end the real one; the others the kit's server does not need. LMI
with a handler of one's own calls it, from the code among the files.
"""

import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.aws.world import Region

MODEL_DIRECTORY = "/opt/ml/model"
RECORDED_SERVER = Path(__file__).with_name("recorded_server.py")
DJL_SERVING = Path(__file__).parents[1] / "stand_ins/djl_serving"
_PING_SECONDS = 0.5
# A container ends with the stand-in: the pipe closes, for whatever reason that one ended.
_UNTIL_STDIN_ENDS = """
exec 3<&0 </dev/null
"$0" "$@" 3<&- &
child=$!
{ read -r _ <&3; kill -9 $child; } >/dev/null 2>&1 &
wait $child
kill $!
"""
# vLLM's arguments (`vllm serve --help`, 0.32), those that a deployment may set
_VLLM = {
    *("model", "served-model-name", "dtype", "tensor-parallel-size", "max-model-len", "max-num-seqs", "enable-lora"),
    *("gpu-memory-utilization", "max-lora-rank", "lora-modules", "generation-config"),
    *("enable-auto-tool-choice", "tool-call-parser", "reasoning-parser"),
}
_VLLM_LORA_RANKS = {1, 8, 16, 32, 64, 128, 256, 320, 512}
_OPTIMUM = {"model", "batch_size", "sequence_length", "tensor_parallel_size", "allow_non_cached_model"}
_LMI = {
    *("dtype", "tensor_parallel_degree", "max_model_len", "max_rolling_batch_size", "gpu_memory_utilization"),
    *("model_loading_timeout", "enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),
}
_HANDLER = {
    "engine",
    "entrypoint",
    "rolling_batch",
    "tensor_parallel_degree",
    "model_loading_timeout",
    "predict_timeout",
}


class Container:
    """A process of the kit's server, with its output in CloudWatch."""

    def __init__(self, region: "Region", definition: dict[str, Any], log_group: str, stream: str) -> None:
        self.region, self.log_group, self.stream = region, log_group, stream
        self.port = 0  # until its server, which binds a free one, answers
        self._directory = Path(tempfile.mkdtemp(prefix="endpoint-"))
        self._address = self._directory / "address.json"
        self._logs = region.client("logs")
        self._process: subprocess.Popen[str] | None = None
        try:
            _download(region, definition["ModelDataSource"]["S3DataSource"], self._directory / "model")
            program = self._program(definition)
        except _RefusedError as error:
            program = [sys.executable, "-c", f"import sys; sys.exit({f'ERROR {error}'!r})"]
        self._start(program)

    def _program(self, definition: dict[str, Any]) -> list[str]:
        scenario = self.region.world.scenario.endpoint_container
        if broken := scenario.get("broken"):
            return [sys.executable, "-c", f"import sys; print('starting'); sys.exit({broken!r})"]
        if scenario.get("hangs"):
            return ["sleep", "infinity"]
        _check(definition["Image"], definition["Environment"], self._directory / "model")
        return self._server(definition, scenario.get("answers"))

    def _server(self, definition: dict[str, Any], answers: dict[str, str] | None) -> list[str]:
        if answers is not None:
            return [sys.executable, str(RECORDED_SERVER), str(self._address), json.dumps(answers)]
        model, variables = self._directory / "model", definition["Environment"]
        if "OPTION_ENTRYPOINT" in variables:
            code = variables["PYTHONPATH"].replace(MODEL_DIRECTORY, str(model))
            given = variables | {"PYTHONPATH": f"{code}:{DJL_SERVING}"}
            program = [sys.executable, str(DJL_SERVING / "djl_front.py"), str(self._address), str(model)]
            return ["env", *(f"{key}={value}" for key, value in given.items()), *program]
        lora = variables.get("SM_VLLM_LORA_MODULES", "")
        named = [f"--model=tuned={model}"]
        if lora:
            name, _, where = lora.partition("=")
            named = [f"--model=base={model}", f"--adapter={name}={where.replace(MODEL_DIRECTORY, str(model))}"]
        listen = ["--port=0", f"--address-file={self._address}"]
        return [sys.executable, "-m", "hyperpod_ft.serving", *named, *listen, "--device", "cpu"]

    def _start(self, program: list[str]) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", _UNTIL_STDIN_ENDS, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._shipping = threading.Thread(target=self._ship, args=(self._process,), daemon=True)
        self._shipping.start()

    def _ship(self, process: "subprocess.Popen[str]") -> None:
        for create, names in (
            (self._logs.create_log_group, {"logGroupName": self.log_group}),
            (self._logs.create_log_stream, {"logGroupName": self.log_group, "logStreamName": self.stream}),
        ):
            with suppress(self._logs.exceptions.ResourceAlreadyExistsException):
                create(**names)
        assert process.stdout is not None
        for line in process.stdout:
            event = {"timestamp": int(time.time() * 1000), "message": line.rstrip("\n") or " "}
            self._logs.put_log_events(logGroupName=self.log_group, logStreamName=self.stream, logEvents=[event])

    @property
    def ended(self) -> bool:
        """By itself; its output is then in CloudWatch."""
        return not self._shipping.is_alive()

    def answers_ping(self) -> bool:
        if not self._address.exists():
            return False
        self.port = json.loads(self._address.read_text())["port"]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PING_SECONDS)
        try:
            connection.request("GET", "/ping")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._shipping.join(300)
        shutil.rmtree(self._directory, ignore_errors=True)


class _RefusedError(Exception):
    """Why a container ends at once."""


def _download(region: "Region", source: dict[str, Any], target: Path) -> None:
    """The objects below the prefix as files. SageMaker refuses "folders", and names that are file and directory."""
    bucket, _, prefix = source["S3Uri"].removeprefix("s3://").partition("/")
    s3 = region.client("s3")
    target.mkdir()
    found = [
        entry["Key"]
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for entry in page.get("Contents", [])
    ]
    if not found:
        raise _RefusedError(f"no objects at {source['S3Uri']}")
    for key in found:
        if key.endswith("/") or any(part in ("", ".", "..") for part in key.removeprefix(prefix).split("/")):
            raise _RefusedError(f"{key}: not a name of a file")
        file = target / key.removeprefix(prefix)
        file.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, key, str(file))


def _check(image: str, variables: dict[str, str], model: Path) -> None:
    repository = image.rpartition("/")[2].partition(":")[0]
    if "OPTION_ENTRYPOINT" in variables:
        _check_handler(repository, variables, model)
        return
    prefix, known, path = {
        "vllm": ("SM_VLLM_", {name.replace("-", "_") for name in _VLLM}, "SM_VLLM_MODEL"),
        "djl-inference": ("OPTION_", _LMI, "HF_MODEL_ID"),
        "huggingface-vllm-inference-neuronx": ("SM_ON_", _OPTIMUM, "SM_ON_MODEL"),
    }[repository]
    given = {key.removeprefix(prefix).lower(): value for key, value in variables.items() if key.startswith(prefix)}
    if unknown := sorted(given.keys() - known):
        raise _RefusedError(f"unrecognized arguments: --{unknown[0]}")
    if variables.get(path) != MODEL_DIRECTORY:
        raise _RefusedError(f"{path} {variables.get(path)!r} is not {MODEL_DIRECTORY}")
    positions = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
    length = int(given.get("max_model_len", given.get("sequence_length", "0")))
    if positions and length > positions:
        raise _RefusedError(
            f"User-specified max_model_len ({length}) is greater than max_position_embeddings={positions}"
        )
    if given.get("enable_lora") == "true":
        name, _, where = given["lora_modules"].partition("=")
        config = model / where.removeprefix(f"{MODEL_DIRECTORY}/") / "adapter_config.json"
        if not config.is_file():
            raise _RefusedError(f"adapter {name}: no adapter_config.json in {where}")
        most, rank = int(given["max_lora_rank"]), json.loads(config.read_text())["r"]
        if most not in _VLLM_LORA_RANKS or rank > most:
            raise _RefusedError(f"LoRA rank {rank} is greater than max_lora_rank {most}, or that is not allowed")


def _check_handler(repository: str, variables: dict[str, str], model: Path) -> None:
    given = {key.removeprefix("OPTION_").lower() for key in variables if key.startswith("OPTION_")}
    if repository != "djl-inference" or given - _HANDLER:
        raise _RefusedError(f"{repository}: unknown options {sorted(given - _HANDLER)}")
    if variables.get("OPTION_ENGINE") != "Python" or variables.get("OPTION_ROLLING_BATCH") != "disable":
        architectures = json.loads((model / "config.json").read_text())["architectures"]
        raise _RefusedError(f"vLLM: Model architectures {architectures} are not supported for now")
    code = variables["PYTHONPATH"]
    if not (model / code.removeprefix(f"{MODEL_DIRECTORY}/")).is_file():
        raise _RefusedError(f"ModuleNotFoundError: No module named {variables['OPTION_ENTRYPOINT']!r}")
