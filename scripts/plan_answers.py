"""What the kit's checks say of a small run file, by what is asked: the answers in docs/engines.md."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.config import run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import ConfigError, UserError
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import preview
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.images import image
from hyperpod_ft.upload.push import stage_of

Settings = Mapping[str, Any]  # of a run file, by `section.key`

_BASE: Settings = {
    "name": "asked",
    "dataset.source": "any/data",
    "dataset.format": "prompt-completion",
    "dataset.max_length": 2048,
    "training.micro_batch_size": 2,
    "training.gradient_accumulation_steps": 8,
}
_ONE_A_ROW = "asked"
_KEY = re.compile(r"([a-z_]+(?:\.[a-z0-9_]+)*|--[a-z]+): ")


@dataclass(frozen=True)
class Model:
    """A model's config.json, and whether stage certify has found that each example needs a row of its own."""

    config: Mapping[str, Any]
    one_a_row: bool = False


@dataclass(frozen=True)
class Asked:
    """Settings of a run file, and what is asked of the run beside what `plan` checks."""

    settings: Settings = field(default_factory=dict)
    model: Model | None = None
    stage: str = ""  # that the plan must have
    sources: int = 1  # of its data
    pushes_adapter: bool = False

    def __or__(self, other: "Asked") -> "Asked":
        """Both; where they differ, what `other` asks."""
        return Asked(
            {**self.settings, **other.settings},
            other.model or self.model,
            other.stage or self.stage,
            max(self.sources, other.sources),
            self.pushes_adapter or other.pushes_adapter,
        )


def refusal(asked: Asked, model: Model, root: Path) -> str:
    """Why the kit refuses such a run, without key and remedy; empty where it takes it.

    `model`: where none is asked for; `root`: a directory for runs and models.
    """
    model = asked.model or model
    directory = root / text_sha256(json.dumps(model.config))[:12]
    if not directory.exists():
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    settings = {**_BASE, "cluster.root": str(root), "model.source": str(directory), **asked.settings}
    try:
        config = run_file.validate(_values(settings, asked.sources), "")
        _check(run_file.resolve(config, root), asked, one_a_row=model.one_a_row)
    except ConfigError as error:
        problem = error.problems[0].removeprefix(": ").partition(";")[0]
    except UserError as error:
        problem = error.problem
    else:
        return ""
    return _short(problem, settings, str(model.config["model_type"]))


def _values(settings: Settings, sources: int) -> dict[str, Any]:
    """The values of a run file, its data in one source or several."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    if sources > 1:
        one = {key: values["dataset"].pop(key) for key in ("source", "format")}
        values["dataset"]["sources"] = [{**one, "name": f"part-{number}"} for number in range(sources)]
    return values


def _check(config: RunConfig, asked: Asked, *, one_a_row: bool) -> None:
    """What the commands would check. Raises UserError."""
    run = Run.of(config)
    if one_a_row and "certify" in run.plan:
        facts = asdict(Certificate(not_packed=_ONE_A_ROW))
        path = run.paths.record_path("certify")
        path.parent.mkdir(parents=True, exist_ok=True)
        Record("certify", run.plan["certify"].fingerprint, {}, (), facts, utc_now(), 0.0, "", "").write(path)
    preview(run, Launchers())
    if config.sagemaker:  # `plan` shows this refusal, and `submit` ends with it
        image(config, config.cluster.instance_type)
    if asked.stage:
        run.plan.require(asked.stage)
    if asked.pushes_adapter:
        stage_of(run, True)


def _short(problem: str, settings: Settings, model_type: str) -> str:
    """A refusal without what row or column say: the key and its value, the engine, the model's type, the objective.

    Where the key or its value was the subject, the sentence gets another.
    """
    key = _KEY.match(problem)
    said = (problem[key.end() :] if key else problem).removesuffix(f": {_ONE_A_ROW}")
    if key and isinstance(value := settings.get(key[1]), str):
        said = re.sub(rf"^{value}:? ", "", said)
    said = said.replace(f"engine {settings['engine']}", "this engine")
    said = re.sub(rf"of type '?{model_type}'?", "of this type", said)
    said = re.sub(rf"\b{model_type} models", "models of this type", said).replace(f"'{model_type}' ", "")
    said = re.sub(rf"objective {settings.get('training.objective')}\b", "this objective", said)
    return re.sub(r"^(?=(has|is|trains|would) )", "this setting ", said)
