"""config.json of a model that is not on the shared volume yet, for the degrees of a run to be chosen by."""

from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats.model_directory import CONFIG
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.download.file_source import source_of
from hyperpod_ft.download.listing import FileSource, Listing
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.assets import config_directory, early_config, model_asset

_WHERE = "model.source"


def ensure_model_config(config: RunConfig) -> None:
    """Fetch config.json alone, if the degrees of a run are to be chosen and nothing of its model is here.

    Raises UserError as stage download does.
    """
    if config.parallelism.degrees == "manual" or config_directory(config):
        return
    asset, final = model_asset(config), early_config(config)
    source = source_of("model", _WHERE, asset)
    listing = source.listing()
    wanted = tuple(file for file in listing.files if file.name == CONFIG)
    if not wanted:
        raise UserError(f"{_WHERE}: {asset.source} has no {CONFIG}", "choose a transformers model")
    with publish.lock(final.with_name(f".{final.name}.lock")):
        if config_directory(config):  # by another command
            return
        _fetch(source, Listing(wanted, listing.commit), final)


def _fetch(source: FileSource, listing: Listing, final: Path) -> None:
    with publish.new_directory(final) as partial:
        source.fetch(listing, partial)
        for path in partial.iterdir():
            if path.name != CONFIG:  # huggingface_hub's own notes
                publish.remove(path)
