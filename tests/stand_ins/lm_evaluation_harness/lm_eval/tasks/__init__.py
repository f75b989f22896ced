from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import yaml


@dataclass
class Entry:
    name: str
    yaml_path: Path
    config: dict


class TaskManager:
    def __init__(self, include_path=None):
        files = sorted(Path(include_path).glob("*.yaml")) if include_path else []
        configs = [(file, yaml.safe_load(file.read_text())) for file in files]
        self.task_index = {config["task"]: Entry(config["task"], file, config) for file, config in configs}
        self.all_tasks = sorted(self.task_index)

    def load(self, names):
        (config,) = (self.task_index[name].config for name in names)
        if "damaged" in config:
            raise FileNotFoundError(config["damaged"])
        unsafe = bool(config.get("unsafe_member"))
        members = config.get("members", names)
        return {"tasks": {name: SimpleNamespace(UNSAFE_CODE=unsafe) for name in members}}
