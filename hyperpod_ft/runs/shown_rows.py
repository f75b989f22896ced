"""The rows of a run file as they would be trained, from what this machine has: nothing is fetched or submitted."""

from dataclasses import dataclass
from pathlib import Path

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.config.sources import Asset
from hyperpod_ft.data import reading, source_files
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.inspection.examples import ShownRow, inspect
from hyperpod_ft.data.inspection.raw_rows import RawRows
from hyperpod_ft.data.reading import BadRow, RawRow
from hyperpod_ft.digests import names_below
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs import assets


@dataclass(frozen=True)
class Inspection:
    """A run file's dataset with its model's tokenizer."""

    dataset: Dataset
    rows: RawRows
    encoder: Encoder
    seed: int

    @classmethod
    def of(cls, config: RunConfig, run_file: str, source: str | None = None) -> "Inspection":
        """Of the source of that name, or the first one; `run_file`: as the user named it.

        Raises UserError when the rows or the tokenizer are not on this machine, or no source has the name.
        """
        dataset = _dataset(config, source)
        rows = RawRows(*_files(config, dataset, run_file))
        model = _model(config, run_file)
        return cls(
            dataset, rows, Encoder.load(model, chat=dataset.may_have_messages, images=dataset.images), config.seed
        )

    def numbered(self, number: int) -> ShownRow:
        """Raises UserError when there are fewer rows."""
        return self._inspect(self.rows.numbered(number))

    def first(self) -> ShownRow:
        """The first usable row. Raises UserError if there is none."""
        unused = None
        for found in map(self._inspect, self.rows):
            if found.is_used:
                return found
            unused = unused or found.bad
        raise UserError(f"no row can be used{f': {unused}' if unused else ''}", "correct dataset.format or the rows")

    def sampled(self, rows: int) -> list[ShownRow]:
        """So many rows, drawn by chance."""
        return list(map(self._inspect, self.rows.sampled(rows, self.seed)))

    def _inspect(self, row: RawRow | BadRow) -> ShownRow:
        return inspect(row, self.rows.directory, self.dataset, self.encoder)


def _dataset(config: RunConfig, source: str | None) -> Dataset:
    """The source whose rows are shown."""
    found = {part.name: part.dataset for part in config.dataset.parts}
    if source is not None and source not in found:
        raise UserError(f"--source: no source is named {source}", f"choose one of {', '.join(found)}")
    return found[source] if source is not None else config.dataset.parts[0].dataset


def _files(config: RunConfig, dataset: Dataset, run_file: str) -> tuple[Path, list[reading.Chunk]]:
    """The directory of a dataset's files, and the parts of them that the run reads."""
    directory, asset = assets.raw_dataset(config, dataset), dataset.asset
    if directory.is_dir():
        return directory, reading.sliced(directory, reading.chunks(directory), dataset.split)
    if asset.kind != "local":
        raise _missing("dataset", asset, run_file)
    source = Path(asset.source)
    chosen = source_files.chosen(names_below(source), asset.source, dataset.files, dataset.split)
    names = [name for name in chosen if not source_files.is_image(name)]
    directory = source if source.is_dir() else source.parent
    chunks = [chunk for name in names for chunk in reading.chunks_of(directory, name)]
    return directory, reading.sliced(directory, chunks, dataset.split)


def _model(config: RunConfig, run_file: str) -> Path:
    directory, asset = assets.base_model(config), config.model.asset
    if directory.is_dir():
        return directory
    if config.model.added_tokens:
        raise UserError("model.new_tokens: are not in a tokenizer on this machine", _download(run_file))
    if asset.kind != "local":
        raise _missing("model", asset, run_file)
    return Path(asset.source)


def _missing(kind: assets.Kind, asset: Asset, run_file: str) -> UserError:
    return UserError(f"{kind}.source: {asset.source} is not on this machine", _download(run_file))


def _download(run_file: str) -> str:
    return f"run: hyperpod-ft submit {run_file} --launcher process --only download --watch"
