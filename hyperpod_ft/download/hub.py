"""The Hugging Face Hub: resolves a revision to its commit, and fetches the files that are still missing.

The token comes from HF_TOKEN or the file that `hf auth login` writes; huggingface_hub reads it, and this module only
checks whether there is one.
"""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from hyperpod_ft.checkpoint.adapters import lora_config
from hyperpod_ft.checkpoint.formats.model_directory import CONFIG
from hyperpod_ft.config.sources import Asset, beside
from hyperpod_ft.download.listing import File, Listing
from hyperpod_ft.errors import UserError, hub_http_error, hub_status
from hyperpod_ft.runs.assets import Kind

_PARALLEL_FILES = 8
_LOOK_UP_SECONDS = 3.0
# The file that every repository of the kind has, and what to choose where one lacks it.
_LOOKED_FOR = {
    "model": (CONFIG, "choose a transformers model"),
    "adapter": (lora_config.CONFIG, "choose a LoRA adapter that PEFT has saved"),
}


@dataclass(frozen=True)
class Hub:
    """A repository of a model, an adapter or a dataset at `asset.revision`."""

    where: str  # the run file's key, for errors
    kind: Kind
    asset: Asset

    @property
    def _repository(self) -> str:
        """The Hub's kind of repository."""
        return "dataset" if self.kind == "dataset" else "model"

    def listing(self) -> Listing:
        with self._explained():
            information = HfApi().dataset_info if self.kind == "dataset" else HfApi().model_info
            found = information(self.asset.source, revision=self.asset.revision, files_metadata=True)
        files = [File(sibling.rfilename, sibling.size or 0) for sibling in found.siblings or []]
        return Listing(tuple(sorted(files, key=lambda file: file.name)), found.sha or "")

    def look_up(self) -> str:
        """Ask whether it is there for this account, in one short request: of a model or an adapter, for one file.

        Returns why that could not be asked, or nothing. Raises UserError when the Hub says no.
        """
        name, revision = self.asset.source, self.asset.revision
        try:
            if self.kind == "dataset":
                HfApi().dataset_info(name, revision=revision, timeout=_LOOK_UP_SECONDS)
            else:
                file, _ = _LOOKED_FOR[self.kind]
                get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=_LOOK_UP_SECONDS)
        except (OfflineModeIsEnabled, hub_http_error()) as error:
            refusal = self._explain(error)
            if hub_status(error) in (401, 403, 404):
                raise refusal from error
            return refusal.problem
        return ""

    def fetch(self, listing: Listing, directory: Path) -> None:
        disable_progress_bars()  # logs are not terminals; progress.py prints lines
        _drop_torn_metadata(directory)
        with self._explained():
            snapshot_download(
                self.asset.source,
                revision=listing.commit,
                repo_type=self._repository,
                local_dir=directory,
                allow_patterns=[glob.escape(file.name) for file in listing.files],
                max_workers=_PARALLEL_FILES,
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except LocalEntryNotFoundError as error:
            # raised when the Hub could not be reached; its cause says why
            cause = error.__cause__
            raise self._explain(cause if isinstance(cause, Exception) else error) from error
        except (OfflineModeIsEnabled, hub_http_error()) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> UserError:
        name, where, token = self.asset.source, self.where, get_token()
        status = hub_status(error)
        match error:
            case GatedRepoError():
                page = f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{name}"
                if token:
                    return UserError(
                        f"{where}: {name} is gated and your token has no access to it",
                        f"accept its terms at {page} with the token's account, and wait until access is granted",
                    )
                return UserError(
                    f"{where}: {name} is gated and there is no Hugging Face token",
                    f"accept its terms at {page}, then export HF_TOKEN in the shell that submits",
                )
            case RevisionNotFoundError():
                return UserError(
                    f"{beside(where, 'revision')}: {name} has no revision {self.asset.revision!r}",
                    "use a commit, tag or branch from its page on the Hub",
                )
            case RepositoryNotFoundError():
                private = (
                    "or use a token that can read it"
                    if token
                    else "or, if it is private, export HF_TOKEN in the shell that submits"
                )
                return UserError(
                    f"{where}: the Hub has no {self.kind} {name!r} that you can access", f"correct the id, {private}"
                )
            case EntryNotFoundError():
                file, remedy = _LOOKED_FOR.get(self.kind, _LOOKED_FOR["model"])
                return UserError(f"{where}: {name} has no {file}", remedy)
            case OfflineModeIsEnabled():
                return UserError(f"{where}: HF_HUB_OFFLINE is set", "unset it for the download")
            case HfHubHTTPError() if status in (401, 403):
                return UserError(
                    f"{where}: the Hub rejected your token for {name} (HTTP {status})",
                    "export a valid HF_TOKEN that can read it",
                )
            case HfHubHTTPError():
                return UserError(
                    f"{where}: the Hub returned HTTP {status} for {name}",
                    "run the stage again later: it resumes",
                )
        return UserError(
            f"{where}: cannot reach {constants.ENDPOINT} ({type(error).__name__})",
            "check network and proxy (HTTPS_PROXY), then run the stage again: it resumes; without network access, use a"
            " local path or an s3:// URI",
        )


def _drop_torn_metadata(directory: Path) -> None:
    # If huggingface_hub is killed while it writes one of these (a line each for commit, etag, time), it is incomplete,
    # and 0.36 then fails with an UnboundLocalError (_local_folder.read_download_metadata). Without it, the file is
    # fetched again.
    for file in directory.glob(".cache/huggingface/download/**/*.metadata"):
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        if len(lines) < 4 or not all(lines[:3]):
            file.unlink()
