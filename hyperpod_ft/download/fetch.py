"""The shared directory of an asset: complete and with a manifest, or missing."""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hyperpod_ft import digests, publish
from hyperpod_ft.config.sources import Asset, beside
from hyperpod_ft.download.listing import Choice, FileSource, Listing, refuse_unsafe
from hyperpod_ft.download.sources import Local, source_of
from hyperpod_ft.errors import VOLUME_FULL, UserError
from hyperpod_ft.progress import GB, bytes_below, format_bytes, report_growth
from hyperpod_ft.runs.assets import Kind

MANIFEST = ".hyperpod-ft.json"
_HUB_STATE = ".cache"  # where huggingface_hub keeps partial files and etags in local_dir mode
# A partial file of huggingface_hub 2.x, which no other process resumes (file_download._download_to_tmp_and_move). 0.x
# resumes its own, <name>.<etag>.incomplete.
_NOT_RESUMED = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Wanted:
    """A model, an adapter or a dataset, which of its files, and the directory that is to have them.

    `finish` changes what was fetched to what the directory is to have, and says how, in words; most stay as they are.
    It raises UserError for one that is complete but unusable. `added`: the bytes that it needs beside the files, which
    may take fetching some of a listing into the directory. `name`: what the manifest calls a source whose path may be
    written in several ways, as through a link.
    """

    key: str  # where the run file has it
    kind: Kind
    asset: Asset
    choose: Choice
    directory: Path
    finish: Callable[[Path], str] = lambda _: ""
    added: Callable[[FileSource, Listing, Path], int] = lambda *_: 0
    name: str = ""

    @property
    def where(self) -> str:
        """The run file's key, for errors."""
        return f"{self.key}.source"

    @cached_property
    def source(self) -> FileSource:
        return source_of(self.kind, self.where, self.asset)

    def listing(self) -> Listing:
        """The files that it chooses, of those that are there now. Raises UserError."""
        offered = self.source.listing()
        return Listing(tuple(self.choose(offered.files)), offered.commit)

    def refuse_changes(self, content: str) -> None:
        """Raise UserError when the objects at an S3 URI are not those that were fetched, which had this content.

        A URI has no revision: what was made of the earlier objects has the same fingerprints as what these would give.
        """
        if self.asset.kind != "s3":
            return
        try:
            now = self.listing().content
        except UserError as error:
            print(f"warning: {self.key}: not compared with what was fetched: {error}", flush=True)
            return
        if now != content:
            raise UserError(
                f"{self.where}: the objects at {self.asset.source} have changed since they were fetched",
                "copy them to another prefix, and name that: it is another source",
            )


@dataclass(frozen=True)
class Manifest:
    """The content of an asset's directory. `files`: name to size in bytes."""

    source: str
    revision: str
    commit: str  # the Hub's; empty for other sources
    files: dict[str, int]
    content: str = ""  # of the objects of an S3 URI: Listing.content
    finished: str = ""  # what was made of the files: Wanted.finish
    xxh3: dict[str, str] = field(default_factory=dict)  # name to XXH3 (128 bits) as hex

    @classmethod
    def of(cls, wanted: Wanted, listing: Listing) -> "Manifest":
        files = {file.name: file.size for file in listing.files}
        source = wanted.name or wanted.asset.source
        return cls(source, wanted.asset.revision, listing.commit, files, listing.content)

    def of_finished(self, directory: Path, how: str) -> "Manifest":
        files = {path.relative_to(directory).as_posix(): path.stat().st_size for path in digests.files_below(directory)}
        return replace(self, files=files, finished=how)

    def with_digests(self, directory: Path) -> "Manifest":
        """Reads all files."""
        with ThreadPoolExecutor() as pool:
            found = pool.map(digests.file_xxh3, (directory / name for name in self.files))
            return replace(self, xxh3=dict(zip(self.files, found, strict=True)))

    @classmethod
    def read(cls, directory: Path) -> "Manifest | None":
        """The manifest of a directory; None if it is missing or not valid."""
        try:
            return TypeAdapter(Manifest).validate_json((directory / MANIFEST).read_bytes())
        except (OSError, ValidationError):
            return None

    def matches(self, directory: Path) -> bool:
        """Whether every file exists and has its expected size."""
        try:
            return all((directory / name).stat().st_size == size for name, size in self.files.items())
        except OSError:
            return False

    @property
    def size(self) -> int:
        return sum(self.files.values())


def ensure(wanted: Wanted) -> Manifest:
    """Fetch the asset into its directory, unless it is already complete there.

    Raises UserError, also for what `wanted.finish` refuses, which is then not published. Of several
    processes that need the same asset, one fetches it and the others wait.
    """
    what, asset, directory = wanted.key, wanted.asset, wanted.directory
    with publish.lock(
        directory.with_name(f".{directory.name}.lock"), waiting=f"{what}: another job is fetching it; waiting"
    ):
        present = Manifest.read(directory)
        if present and (present.source, present.revision) == (wanted.name or asset.source, asset.revision):
            if present.matches(directory):
                wanted.refuse_changes(present.content)
                print(f"{what}: already there: {directory}", flush=True)
                return present
            print(f"{what}: incomplete, fetching it again: {directory}", flush=True)
        if asset.kind == "hub" and not _COMMIT.fullmatch(asset.revision):
            key = beside(wanted.where, "revision")
            print(f"warning: {what}: {key} {asset.revision!r} may change; pin it to a commit", flush=True)
        return _fetch(wanted)


def _fetch(wanted: Wanted) -> Manifest:
    what, where, listing = wanted.key, wanted.where, wanted.listing()
    refuse_unsafe(where, listing.files)
    manifest = Manifest.of(wanted, listing)
    with publish.new_directory(wanted.directory, keep_partial=True) as partial:
        _prune(partial, manifest.files)
        _check_free_disk(wanted, listing, partial)
        at = f" at {listing.commit}" if listing.commit else ""
        print(
            f"{what}: fetching {wanted.asset.source}{at}: {len(listing.files)} files, {format_bytes(listing.size)}; if"
            " interrupted, the stage resumes when it is run again",
            flush=True,
        )
        with _disk_full_explained(where, partial):
            with report_growth(what, partial, listing.size):
                wanted.source.fetch(listing, partial)
            publish.remove(partial / _HUB_STATE)
            _check_complete(where, manifest, partial)
            how = wanted.finish(partial)
        if how:
            manifest = manifest.of_finished(partial, how)
        publish.write_json(partial / MANIFEST, asdict(manifest.with_digests(partial)))
    return manifest


def _prune(partial: Path, wanted: Mapping[str, int]) -> None:
    # files of an earlier attempt that are not wanted, or have another size, and partial ones that cannot be resumed
    for path in digests.files_below(partial):
        name = path.relative_to(partial).as_posix()
        if wanted.get(name) != path.stat().st_size and (
            not name.startswith(f"{_HUB_STATE}/") or _NOT_RESUMED.search(name)
        ):
            path.unlink()


def _check_free_disk(wanted: Wanted, listing: Listing, partial: Path) -> None:
    source, needed = wanted.source, wanted.added(wanted.source, listing, partial)
    if not isinstance(source, Local) or source.needs_space(partial):
        needed += listing.size - bytes_below(partial)
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise _disk_full(wanted.where, f"{needed / GB:.1f} GB more are needed, {free / GB:.1f} GB are free")


def _disk_full(where: str, how_full: str) -> UserError:
    return UserError(f"{where}: {how_full} on the volume of cluster.root", "free space there, or move cluster.root")


@contextlib.contextmanager
def _disk_full_explained(where: str, partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in VOLUME_FULL:
            raise
        free = shutil.disk_usage(partial).free
        raise _disk_full(where, f"the download needs more space, {free / GB:.1f} GB are free") from error


def _check_complete(where: str, manifest: Manifest, partial: Path) -> None:
    for name, size in manifest.files.items():
        path = partial / name
        arrived = path.stat().st_size if path.is_file() else 0
        if arrived != size:
            publish.remove(path)
            raise UserError(
                f"{where}: {name} arrived with {arrived} bytes instead of {size}",
                "run the stage again: it fetches that file again",
            )
