"""Stage `download`: copy the base model and the raw dataset to the shared volume, once for all runs.

python -m hyperpod_ft.stages.download RUN_DIR

Writes `run.base_model` and `run.raw_dataset`, each with a manifest. The only stage except `env` that uses the
network. Runs on the kit's own interpreter: neither torch nor transformers is imported.
"""

from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.download.fetch import Manifest, ensure
from hyperpod_ft.download.file_source import source_of
from hyperpod_ft.download.listing import dataset_files, model_files
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.model_fit import check_model_directory
from hyperpod_ft.runs.assets import dataset_asset, model_asset
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main

_MODEL, _DATASET = "model.source", "dataset.source"


def work(run: Run) -> Result:
    model, dataset = model_asset(run.config), dataset_asset(run.config)
    fetched_model = ensure(
        "model",
        _MODEL,
        model,
        source_of("model", _MODEL, model),
        model_files(_MODEL, model.source),
        run.base_model,
        _check_model,
    )
    check_model_directory(run.config, run.plan.degrees, run.base_model)
    fetched_dataset = ensure(
        "dataset",
        _DATASET,
        dataset,
        source_of("dataset", _DATASET, dataset),
        dataset_files(_DATASET, dataset.source, run.config.dataset.files),
        run.raw_dataset,
    )
    return Result(
        [run.base_model, run.raw_dataset], {"model": _facts(fetched_model), "dataset": _facts(fetched_dataset)}
    )


def _check_model(directory: Path) -> None:
    """Reject a damaged model by its headers, which takes a second, before accelerators are requested."""
    try:
        read_config(directory)
        read_model(directory)
    except UserError as error:
        raise UserError(f"{_MODEL}: the model is damaged: {error}") from error


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "source": manifest.source,
        "revision": manifest.revision,
        "commit": manifest.commit,
        "files": len(manifest.files),
        "bytes": manifest.size,
    }


if __name__ == "__main__":
    main("download", work)
