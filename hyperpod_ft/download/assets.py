"""What a run begins with, as stage download fetches it, and what a submission does about that before."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import added_tokens
from hyperpod_ft.checkpoint.formats.model_directory import CONFIG, decoded_bytes, quantization, read_config
from hyperpod_ft.checkpoint.formats.safetensors_file import read_model
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sources import Asset
from hyperpod_ft.download import adapter
from hyperpod_ft.download.fetch import MANIFEST, Wanted, ensure
from hyperpod_ft.download.listing import Choice, File, FileSource, Listing, dataset_files, model_files
from hyperpod_ft.download.sources import source_of
from hyperpod_ft.errors import ConfigError, UserError
from hyperpod_ft.planning.engine_rules import limits_of
from hyperpod_ft.runs.assets import Kind, assets, config_directory, early_config
from hyperpod_ft.runs.run import Run

_MODEL = "model.source"
_TRUE = ("1", "ON", "YES", "TRUE")  # to huggingface_hub
_AT_A_TIME = 8


def model(run: Run) -> Wanted:
    asset, extended = run.config.model.asset, bool(run.config.model.added_tokens)
    files = model_files(_MODEL, asset.source)

    def choose(offered: Sequence[File]) -> Sequence[File]:
        if extended and not any(file.name == added_tokens.FILE for file in offered):
            raise added_tokens.lacking(asset.source)
        return files(offered)

    return _model("model", asset, choose, run.paths.fetched_model)


def teacher(run: Run) -> list[Wanted]:
    """The model that training learns from; nothing without one."""
    given, directory = run.config.teacher, run.paths.teacher
    if given is None or directory is None:
        return []
    return [_model("teacher", given.asset, model_files("teacher.source", given.source), directory)]


def _model(key: str, asset: Asset, choose: Choice, directory: Path) -> Wanted:
    where = f"{key}.source"
    return Wanted(key, "model", asset, choose, directory, partial(_finish_model, where), partial(_decoded_bytes, where))


def made_model(run: Run) -> Wanted | None:
    """The base model that is made of the one that was fetched: with new tokens, or a score; None if they are one."""
    given, fetched = run.config.model, run.paths.fetched_model
    if run.paths.base_model == fetched:
        return None
    from hyperpod_ft.checkpoint import new_tokens, score_head  # noqa: PLC0415 - import numpy

    tokens = (given.new_tokens, given.new_special_tokens)

    def finish(directory: Path) -> str:
        return new_tokens.add_tokens(directory, *tokens) if given.added_tokens else score_head.add_score(directory)

    def added() -> int:
        return new_tokens.added_bytes(fetched, *tokens) if given.added_tokens else score_head.scored_bytes(fetched)

    return Wanted(
        "model",
        "model",
        Asset(str(fetched), ""),
        _all_but_manifest,
        run.paths.base_model,
        finish=finish,
        added=lambda *_: added(),
        name=fetched.name,
    )


def _all_but_manifest(files: Sequence[File]) -> Sequence[File]:
    return [file for file in files if file.name != MANIFEST]


def datasets(run: Run) -> list[Wanted]:
    """Each source of the run's data."""
    return [
        Wanted(part.key, "dataset", part.dataset.asset, dataset_files(part.dataset), directory)
        for part, directory in zip(run.config.dataset.parts, run.paths.raw_datasets, strict=True)
    ]


def copy_local_sources(run: Run) -> None:
    """Put files of this machine below `cluster.root`, for jobs on other machines, which see only that or its copy."""
    for wanted in _all(run):
        if wanted.asset.kind == "local":
            ensure(wanted)


def downloads(runs: Iterable[Run]) -> Collection[Run]:
    """One of these runs for each stage download: the points of a sweep share most."""
    return {run.paths.record_path("download"): run for run in runs}.values()


def refuse_changes(runs: Iterable[Run]) -> None:
    """Raise UserError when the objects at an S3 URI are not those that stage download has fetched."""
    for run in downloads(runs):
        if record := run.journal.valid_record("download"):
            for wanted in _all(run):
                wanted.refuse_changes(record.facts.get(wanted.key, {}).get("content", ""))


def _all(run: Run) -> list[Wanted]:
    return [model(run), *adapter.wanted(run), *teacher(run), *datasets(run)]


def _decoded_bytes(where: str, source: FileSource, listing: Listing, directory: Path) -> int:
    """What the decoded weights take while the quantized ones are there too; fetches config.json, which tells."""
    source.fetch(listing.only(CONFIG), directory)
    with _damage_explained(where):
        return decoded_bytes(read_config(directory), listing.size)


@contextlib.contextmanager
def _damage_explained(where: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: the model is damaged: {error}") from error


def _finish_model(where: str, directory: Path) -> str:
    """Decode a quantized model, and reject a damaged one by its headers, before accelerators are requested."""
    with _damage_explained(where):
        config = read_config(directory)
        read_model(directory)
    if not (method := quantization(config)):
        return ""
    from hyperpod_ft.checkpoint import quantized  # noqa: PLC0415 - imports numpy

    quantized.decode(directory)
    return f"decoded from {method}"


def look_up(runs: Iterable[Run]) -> None:
    """Ask for what stage download will fetch from the Hub, in a short request for each source of these runs.

    Prints to stderr why the Hub could not be asked. Raises ConfigError for what it does not have, or not for this
    account.
    """
    waiting = (run for run in downloads(runs) if run.journal.why_not_done("download"))
    wanted = dict.fromkeys(one for run in waiting for one in assets(run.config))
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        answers = list(threads.map(lambda one: _answer(*one), wanted))
    if problems := [str(answer) for answer in answers if isinstance(answer, UserError)]:
        raise ConfigError(problems)
    for reason in filter(None, answers):
        print(f"not looked up: {reason}", file=sys.stderr)


def look_up_source(where: str, kind: Kind, asset: Asset) -> str:
    """The same for one source, named `where` in errors; nothing is asked for one that is not on the Hub."""
    if asset.kind != "hub":
        return ""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        return f"{where}: HF_HUB_OFFLINE is set"  # without the time that importing the client takes
    from hyperpod_ft.download.hub import Hub  # noqa: PLC0415 - takes half a second, needed for the Hub only

    return Hub(where, kind, asset).look_up()


def _answer(key: str, kind: Kind, asset: Asset) -> str | UserError:
    try:
        return look_up_source(f"{key}.source", kind, asset)
    except UserError as error:
        return error


def ensure_model_config(config: RunConfig) -> None:
    """Fetch config.json alone, if the degrees of a run are to be chosen and nothing of its model is here.

    Raises UserError as stage download does.
    """
    if config.parallelism.degrees == "manual" or config_directory(config):
        return
    limits_of(config.engine).check_settings(config)  # before anything is fetched
    asset, final = config.model.asset, early_config(config)
    source = source_of("model", _MODEL, asset)
    listing = source.listing()
    wanted = listing.only(CONFIG)
    if not wanted.files:
        raise UserError(f"{_MODEL}: {asset.source} has no {CONFIG}", "choose a transformers model")
    with publish.lock(final.with_name(f".{final.name}.lock")):
        if config_directory(config):  # by another command
            return
        _fetch(source, wanted, final)


def _fetch(source: FileSource, listing: Listing, final: Path) -> None:
    with publish.new_directory(final) as partial:
        source.fetch(listing, partial)
        for path in partial.iterdir():
            if path.name != CONFIG:  # huggingface_hub's own notes
                publish.remove(path)
