"""An interpreter that does each stage of a run in milliseconds: it writes the stage's record and nothing else.

For tests of what starts the stages. Training notes when it began and ended in the file `trained` of the root, and takes
as its validation loss the learning rate of the run. A file `fail-STAGE` in the root makes the stage fail, with the exit
status in it or 1.
"""

import json
import os
import sys
import time
from pathlib import Path

import yaml

_PROBED = {"python": "3.11.0", "cuda": None, "packages": {"torch": "2.13.0"}}


def interpreter(directory: Path) -> Path:
    """Write the interpreter; a run file names it as `env.python`."""
    path = directory / "quick-python"
    repository = Path(__file__).resolve().parents[1]
    path.write_text(
        f"#!/bin/bash\nif [[ $1 == -c ]]; then echo '{json.dumps(_PROBED)}'; exit; fi\n"
        f'exec {sys.executable} -c "import sys; sys.path[0] = {str(repository)!r};'
        f' from tests.quick_stages import main; main()" "$@"\n'
    )
    path.chmod(0o755)
    return path


def main() -> None:
    """`-m hyperpod_ft.stages.STAGE RUN_DIR`, or `-m hyperpod_ft.job.supervisor STAGE RUN_DIR ...`."""
    module, *arguments = sys.argv[2:]
    stage = arguments[0] if module.endswith("supervisor") else module.rpartition(".")[2]
    directory = Path(next(argument for argument in arguments if argument.startswith("/")))
    root = directory.parents[2]
    facts: dict[str, object] = {"train_rows": 3} if stage == "dataset" else {}
    if stage == "train":
        facts = _train(directory, root)
    fail = root / f"fail-{stage}"
    status = int(fail.read_text() or 1) if fail.exists() else 0
    if not status:
        _record(directory, root, stage, facts)
    if stage == "train":  # the supervisor leaves the exit status
        marker = directory / "exits" / f"train_{os.environ['HYPERPOD_FT_JOB_ID']}"
        marker.parent.mkdir(exist_ok=True)
        marker.write_text(f"{status}\n")
    sys.exit(status)


def _train(directory: Path, root: Path) -> dict[str, object]:
    config = yaml.safe_load((directory / "run.yaml").read_text())
    with (root / "trained").open("a") as events:
        events.write(f"begin {directory.name}\n")
        events.flush()
        time.sleep(0.3)
        events.write(f"end {directory.name}\n")
    loss = float(config["training"]["learning_rate"])
    return {"steps": 3, "final_loss": loss, "validation_loss": loss}


def _record(directory: Path, root: Path, stage: str, facts: dict[str, object]) -> None:
    plan = next(one for one in json.loads((directory / "plan.json").read_text())["stages"] if one["name"] == stage)
    name = f"records/{stage}-{plan['fingerprint']}.json" if plan["shared"] else "records/" + stage + ".json"
    path = (root if plan["shared"] else directory) / name
    path.parent.mkdir(exist_ok=True)
    values = {"stage": stage, "fingerprint": plan["fingerprint"], "inputs": {}, "outputs": [], "facts": facts}
    values |= {"started": "2026-01-01T00:00:00Z", "seconds": 0.1, "host": "test", "job_id": "1"}
    path.write_text(json.dumps(values))


def most_at_a_time(root: Path) -> int:
    """How many runs below the root have trained at once, at most."""
    now = most = 0
    for line in (root / "trained").read_text().splitlines():
        now += 1 if line.startswith("begin") else -1
        most = max(most, now)
    return most
