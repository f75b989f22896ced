"""In the place of lm-evaluation-harness: the parts of its interface that the kit uses, and nothing behind them.

A model's accuracy is in its directory, in accuracy.txt. The results have the shape that the harness 0.4.13 gave for
the tasks in tests/data/lm-eval (results.json). A task's YAML file may say that it `fails`, or that it `kills` the
process, once, when the model's directory has that name. Evaluations are appended to the file that $STAND_IN_LOG names.
"""

import json
import math
import os
import signal
from pathlib import Path


def simple_evaluate(model, tasks, task_manager, **settings):
    (name,) = tasks
    config = task_manager.task_index[name].config
    with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
        told = {"model": Path(model.arguments["pretrained"]).name, "task": name, "directory": str(Path.cwd())}
        log.write(json.dumps(told | {"settings": settings, "arguments": model.arguments}) + "\n")
    killed = Path(os.environ["STAND_IN_LOG"]).with_suffix(".killed")
    if config.get("kills") == told["model"] and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "fails" in config:
        raise RuntimeError(config["fails"])
    accuracy = float(Path(model.arguments["pretrained"], "accuracy.txt").read_text())
    members = config.get("members", [])
    count = settings["limit"] or 100
    values = {"acc,none": accuracy, "acc_stderr,none": math.sqrt(accuracy * (1 - accuracy) / count)}
    named = {one: {"alias": one, "name": one, "sample_len": count} | values for one in [name, *members]}
    tested = members or [name]
    return {
        "results": named,
        "group_subtasks": {name: members} if members else {},
        "versions": dict.fromkeys(named, 1.0),
        "n-shot": dict.fromkeys(tested, settings["num_fewshot"] or 0),
        "higher_is_better": {one: {"acc": True} for one in named},
        "n-samples": {one: {"original": 100, "effective": count} for one in tested},
    }
