"""Stage `env`: the Python environment of the stages that need torch.

    python -m hyperpod_ft.stages.env RUN_DIR

Runs with the kit's own interpreter. With `env.python` it checks that interpreter; otherwise it builds a virtual
environment below `cluster.root` from the engine's pins. Host packages and drivers are never touched.
"""

import json
import subprocess
import sys
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.requirements import pins_file
from hyperpod_ft.run import Run
from hyperpod_ft.stages import stage

_IMPORTS = {"torch": ("torch", "transformers", "peft", "safetensors"), "neuron": ("torch", "optimum.neuron")}

# Runs in the environment under test: the imports are the test, the listing is for the record.
_PROBE = """
import importlib, json, platform, sys
from importlib import metadata
for name in sys.argv[1:]:
    importlib.import_module(name)
packages = {d.metadata["Name"]: d.version for d in metadata.distributions()}
print(json.dumps({"python": platform.python_version(), "packages": dict(sorted(packages.items()))}))
"""


def work(run: Run) -> stage.Result:
    outputs = []
    if run.config.env.python is None:
        build(pins_file(run.config.engine), run.environment)
        outputs = [run.environment / "pyvenv.cfg"]
    found = probe(run.python, _IMPORTS[run.config.engine])
    print(f"env: {run.python}, Python {found['python']}, {len(found['packages'])} packages", flush=True)
    return stage.Result(outputs, {"interpreter": str(run.python), **found})


def build(pins: Path, environment: Path) -> None:
    """Make a virtual environment at `environment` with the packages of the requirements file `pins`.

    Raises UserError when pip cannot install them.
    """
    print(f"env: installing {pins.name} into {environment}; this takes a few minutes", flush=True)
    with publish.new_directory(environment) as partial:
        _must([sys.executable, "-m", "venv", str(partial)], "python -m venv")
        python = str(partial / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        _must([*pip, "--requirement", str(pins)], "pip install")
        _move_scripts(partial, environment)


def probe(python: Path, imports: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Versions of Python and of every package of an interpreter, after importing `imports` in it.

    Raises UserError when the interpreter is missing, too old or cannot import them.
    """
    # the kit's code is on PYTHONPATH; -P would need Python 3.11
    try:
        done = subprocess.run([str(python), "-c", _PROBE, *imports], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"env.python: cannot run {python}: {error.strerror}", "correct it, or leave it out") from error
    if done.returncode:
        raise UserError(
            f"env.python: {python} cannot import {', '.join(imports)}: {_last_line(done.stderr)}",
            "install the `torch` extra there (pip install 'hyperpod-ft[torch]'), or leave env.python out",
        )
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _move_scripts(partial: Path, final: Path) -> None:
    # console scripts name their interpreter by absolute path, which the rename is about to change
    for script in (partial / "bin").iterdir():
        content = script.read_bytes() if script.is_file() and not script.is_symlink() else b""
        if content.startswith(b"#!") or script.name.startswith("activate"):
            script.write_bytes(content.replace(str(partial).encode(), str(final).encode()))


def _must(command: list[str], name: str) -> None:
    done = subprocess.run(command, stdout=None, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        raise UserError(
            f"{name} failed: {_last_line(done.stderr)}", "check the network and the package index, then resume"
        )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


if __name__ == "__main__":
    stage.main("env", work)
