"""Put a run's model or adapter on the Hugging Face Hub, with a card: large files first, then one commit that names all.

The Hub keeps what was uploaded before a commit, so that a push that was killed continues with the files it lacks, and
an incomplete model is never visible. huggingface_hub reads the token, from HF_TOKEN or the file that `hf auth login`
writes.
"""

import fnmatch
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG as ADAPTER_CONFIG
from hyperpod_ft.config.fields import shortened
from hyperpod_ft.errors import UserError, hub_http_error, hub_status
from hyperpod_ft.progress import format_bytes
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run import Run

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PARALLEL_FILES = 4
# Of an earlier push: with another number of files, its weights would be loaded beside the new ones.
_REPLACED = ("*.safetensors", "*.safetensors.index.json")
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
    """The stage that makes what is uploaded. Raises UserError when the run has no adapter, or one that needs more."""
    if adapter and run.config.training.method != "lora":
        raise UserError("--adapter: this run trains every parameter and has no adapter", "leave the option out")
    if adapter and run.config.model.added_tokens:
        raise UserError(
            "--adapter: an adapter is pushed without the tokenizer that has the run's model.new_tokens",
            "push the whole model",
        )
    return "consolidate" if adapter else run.plan.model_stage


def model_upload(run: Run) -> Upload:
    """The final model, with the card that its stage wrote. Raises UserError when it is not finished."""
    return _recorded(run.journal, stage_of(run, False), run.paths.tuned_model)


def adapter_upload(run: Run, card: str) -> Upload:
    """The adapter with this card. Its base model is named as on the Hub, or without the path on this volume."""
    recorded = _recorded(run.journal, stage_of(run, True), run.paths.adapter)
    config = json.loads((run.paths.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = run.config.model.asset
    config["base_model_name_or_path"] = base.source if base.kind == "hub" else Path(base.source).name
    made = {ADAPTER_CONFIG: json.dumps(config, indent=2).encode() + b"\n", CARD: card.encode()}
    sizes = {name: len(content) for name, content in made.items()}
    return Upload({**recorded.files, **made}, {**recorded.sizes, **sizes})


def _recorded(journal: Journal, stage: str, directory: Path) -> Upload:
    journal.require_done(stage, "nothing to push yet")
    record = journal.record(stage)
    assert record is not None, "a stage that is done has one"
    sizes = {journal.paths.root / output.path: output.size for output in record.outputs}
    names = {path: path.relative_to(directory).as_posix() for path in sorted(sizes) if path.is_relative_to(directory)}
    return Upload({name: path for path, name in names.items()}, {name: sizes[path] for path, name in names.items()})


def push(upload: Upload, repository: str, message: str, *, public: bool = False) -> str:
    """Upload what the repository lacks, and commit; returns the URL of the commit.

    Creates the repository if there is none, private unless `public`. May be killed at any moment and called again; a
    repository that has all files already gets no commit. Raises UserError.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise UserError(f"push: {shortened(repository)}: must be ORG/NAME or USER/NAME", "for example my-org/my-model")
    disable_progress_bars()  # lines are printed instead
    if get_token() is None:
        raise UserError("push: there is no Hugging Face token", "export HF_TOKEN with a token that may write")
    api = HfApi()
    with _explained(repository):
        before = _prepare(api, repository, public)
        additions = [CommitOperationAdd(name, file) for name, file in upload.files.items()]
        _upload(api, repository, upload, additions)
        old = {name for name in before if any(fnmatch.fnmatch(name, pattern) for pattern in _REPLACED)}
        deletions = [CommitOperationDelete(name) for name in sorted(old - upload.files.keys())]
        commit = api.create_commit(repository, [*additions, *deletions], commit_message=message)
        _check(api, repository, commit.oid, upload)
    return f"{constants.ENDPOINT}/{repository}/commit/{commit.oid}"


def _prepare(api: HfApi, repository: str, public: bool) -> set[str]:
    """Create the repository if needed; returns the names of its files."""
    try:
        found = api.model_info(repository)
    except RepositoryNotFoundError:
        api.create_repo(repository, private=not public, exist_ok=True)
        print(f"push: created {repository}, {'public' if public else 'private'}", flush=True)
        return set()
    if not found.private and not public:
        raise UserError(
            f"push: {repository} exists and is public", "add --public, or make it private in its settings on the Hub"
        )
    return {sibling.rfilename for sibling in found.siblings or []}


def _upload(api: HfApi, repository: str, upload: Upload, additions: list[CommitOperationAdd]) -> None:
    """Upload the files that the Hub stores as large ones, unless it has their content; the commit has the others."""

    def one(addition: CommitOperationAdd) -> CommitOperationAdd:
        api.preupload_lfs_files(repository, [addition], free_memory=False)
        return addition

    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        for number, addition in enumerate(pool.map(one, additions), start=1):
            size = format_bytes(upload.sizes[addition.path_in_repo])
            print(f"push: {addition.path_in_repo}, {size} ({number} of {len(additions)})", flush=True)


def _check(api: HfApi, repository: str, commit: str, upload: Upload) -> None:
    """Raise UserError unless the commit has every file with its size."""
    found = api.model_info(repository, revision=commit, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size for sibling in found.siblings or []}
    for name in upload.files:
        if sizes.get(name) != upload.sizes[name]:
            found_size = f"{sizes.get(name) or 0} bytes instead of {upload.sizes[name]}"
            raise UserError(f"push: {repository} has {name} with {found_size}", "push again")


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    try:
        yield
    except (OfflineModeIsEnabled, hub_http_error(), RuntimeError) as error:
        # of an upload, the cause is the Hub's answer
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, (OfflineModeIsEnabled, hub_http_error())):
            raise
        raise _explain(repository, cause) from error


def _explain(repository: str, error: Exception) -> UserError:
    status = hub_status(error)
    if isinstance(error, OfflineModeIsEnabled):
        return UserError("push: HF_HUB_OFFLINE is set", "unset it for this command")
    if status in (401, 403, 404):
        return UserError(
            f"push: the Hub refuses to write to {repository} (HTTP {status})",
            "use an HF_TOKEN of an account that may create and write repositories there",
        )
    if status:
        return UserError(f"push: the Hub returned HTTP {status} for {repository}", "push again later: it continues")
    return UserError(
        f"push: cannot reach {constants.ENDPOINT} ({type(error).__name__})",
        "check network and proxy (HTTPS_PROXY), then push again: it continues",
    )
