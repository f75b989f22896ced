"""Separate environments for the peers, so that their packages are not installed with the kit.

`peers/NAME.txt` lists the packages of environment NAME. Those in `peers/NAME-alone.txt` are installed without their
dependencies: they pin far more than the compared part needs.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import CommandError

PEERS = Path(__file__).resolve().parent / "peers"


def python_of(name: str, directory: Path) -> Path:
    """The interpreter of environment `name` below `directory`, which is created if it is missing or out of date.

    Raises CommandError when something cannot be installed.
    """
    requirements = [file for file in (PEERS / f"{name}.txt", PEERS / f"{name}-alone.txt") if file.exists()]
    wanted = "".join(file.read_text(encoding="utf-8") for file in requirements)
    environment = directory.resolve() / name
    python, stamp = environment / "bin" / "python", environment / "installed.txt"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"installing {', '.join(file.name for file in requirements)} into {environment}", flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(environment))
        for file in requirements:
            alone = ["--no-deps"] if file.stem.endswith("-alone") else []
            _run(str(python), "-m", "pip", "install", "--quiet", *alone, "-r", str(file))
        stamp.write_text(wanted, encoding="utf-8")
    return python


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """The installed versions of packages in an interpreter."""
    program = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    found: dict[str, str] = json.loads(_run(str(python), "-c", program, *packages))
    return found


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise CommandError(
            f"{Path(command[0]).name} {' '.join(command[1:4])}: {errors[-1] if errors else done.returncode}"
        )
    return done.stdout
