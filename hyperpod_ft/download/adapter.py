"""The adapter that training continues, as stage download fetches it, and whether training can continue it."""

from collections.abc import Iterable
from pathlib import Path

from hyperpod_ft.checkpoint.adapters.lora_config import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    is_frozen_base,
    is_second_copy,
    read_config,
)
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.formats.safetensors_file import read_file, read_model
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.download.fetch import Wanted
from hyperpod_ft.download.listing import adapter_files
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run

_KEY = "model.adapter"
_REMEDY = "save the adapter again"


def wanted(run: Run) -> list[Wanted]:
    """The run's adapter; nothing when it trains a new one."""
    given, directory = run.config.model.adapter, run.paths.starting_adapter
    if given is None or directory is None:
        return []
    files = adapter_files(f"{_KEY}.source", given.source)
    return [Wanted(_KEY, "adapter", given.asset, files, directory, _finish)]


def check(run: Run) -> None:
    """Raise UserError unless the adapter that was fetched is one of the model that was."""
    directory = run.paths.starting_adapter
    if directory is None:
        return
    from hyperpod_ft.checkpoint import consolidate  # noqa: PLC0415 - imports numpy
    from hyperpod_ft.checkpoint.adapters import origin  # noqa: PLC0415
    from hyperpod_ft.checkpoint.sharded.sharded import ShardedAdapter, ShardedCheckpoint  # noqa: PLC0415

    config = read_object(directory / CONFIG, _REMEDY)
    found = ShardedAdapter("default", config, tuple(read_file(directory / WEIGHTS)))
    _refuse_others(directory, found.tensors, run.paths.base_model)
    try:
        consolidate.check_fit(ShardedCheckpoint(directory, (found,), (), None), run.paths.base_model)
        origin.check_base(run.paths.base_model, directory)
    except UserError as error:
        raise UserError(f"{_KEY}.source: {error.problem}", error.remedy) from error


def _refuse_others(directory: Path, tensors: Iterable[LogicalTensor], base: Path) -> None:
    """Raise UserError for whole tensors that are no module's in `modules_to_save`, or of a resized vocabulary."""
    config = read_config(directory / CONFIG)
    shapes = {tensor.name: tensor.shape for tensor in read_model(base)}
    for tensor in tensors:
        # PEFT saves the base's weight beside the factors of an embedding
        if ".lora_" in tensor.name or is_frozen_base(tensor.name) or is_second_copy(tensor.name):
            continue
        name = tensor.name.removeprefix(PREFIX)
        if not config.saves(name.rpartition(".")[0]) or shapes.get(name, tensor.shape) != tensor.shape:
            raise UserError(
                f"{_KEY}.source: {directory / WEIGHTS}: training does not continue {name} {list(tensor.shape)}",
                "merge the adapter into its base (hyperpod-ft merge), and train that model",
            )


def _finish(directory: Path) -> str:
    """Reject an adapter that is a pickle, damaged, or of an unknown kind. Reads all of it, and leaves it as it is."""
    from hyperpod_ft.checkpoint.adapters.files import read_adapter  # noqa: PLC0415 - imports numpy

    try:
        read_adapter(directory)
    except UserError as error:
        raise UserError(f"{_KEY}.source: {error.problem}", error.remedy) from error
    return ""
