"""What of a run is put on the Hub: the files of its final model or of its adapter, and a card."""

import json
from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG as ADAPTER_CONFIG
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.finished import require_done
from hyperpod_ft.runs.assets import model_asset
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run

CARD = "README.md"


@dataclass(frozen=True)
class Upload:
    """The files of one commit by their names in the repository: paths, or content that is made for the Hub.

    `sizes`: in bytes. A path may be missing on a machine whose run is in a store.
    """

    files: dict[str, Path | bytes]
    sizes: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def stage_of(run: Run, adapter: bool) -> str:
    """The stage that makes what is uploaded. Raises UserError when the run has no adapter."""
    if adapter and run.config.training.method != "lora":
        raise UserError("--adapter: this run trains every parameter and has no adapter", "leave the option out")
    return "consolidate" if adapter else run.plan.model_stage


def model_upload(run: Run) -> Upload:
    """The final model, with the card that its stage wrote. Raises UserError when it is not finished."""
    return _recorded(run.journal, stage_of(run, False), run.paths.tuned_model)


def adapter_upload(run: Run, card: str) -> Upload:
    """The adapter with this card. Its base model is named as on the Hub, or without the path on this volume."""
    recorded = _recorded(run.journal, stage_of(run, True), run.paths.adapter)
    config = json.loads((run.paths.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = model_asset(run.config)
    config["base_model_name_or_path"] = base.source if base.kind == "hub" else Path(base.source).name
    made = {ADAPTER_CONFIG: json.dumps(config, indent=2).encode() + b"\n", CARD: card.encode()}
    sizes = {name: len(content) for name, content in made.items()}
    return Upload({**recorded.files, **made}, {**recorded.sizes, **sizes})


def _recorded(journal: Journal, stage: str, directory: Path) -> Upload:
    require_done(journal, stage, "nothing to push yet")
    record = journal.record(stage)
    assert record is not None, "a stage that is done has one"
    sizes = {journal.paths.root / output.path: output.size for output in record.outputs}
    names = {path: path.relative_to(directory).as_posix() for path in sorted(sizes) if path.is_relative_to(directory)}
    return Upload({name: path for path, name in names.items()}, {name: sizes[path] for path, name in names.items()})
