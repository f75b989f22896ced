"""A run's sharded checkpoints in its store (stored_checkpoints.py), of one node, or of several that share no volume.

Every node has the checkpoint's description (checkpoint/sharded/description.py), which names the files of all nodes and
their digests. The first node pushes it when every node has voted for the same digests. Checkpoints are removed by the
names in their descriptions alone, beginning with the description itself.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.aws.s3 import objects, trees
from hyperpod_ft.checkpoint.sharded import description
from hyperpod_ft.checkpoint.sharded.description import Description
from hyperpod_ft.digests import files_below
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.groups import number_of
from hyperpod_ft.sagemaker.store.stored_checkpoints import (
    is_best,
    is_checkpoint,
    is_later,
    is_vote,
    stored_name,
    superseded,
    vote_of,
    votes,
)

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 1800.0  # longer than nodes differ in the time that a push takes
_HELD = ".pushing"
_REMEDY = "run the stage again: it continues from the newest checkpoint that is complete"


class CheckpointStore:
    """The checkpoints of one run below the store's `url`. `client` is boto3's for s3."""

    def __init__(self, run: Run, client: Any, url: str) -> None:
        self._run, self._client = run, client
        self._url = f"{url}/{run.paths.relative(run.paths.checkpoints)}"

    def push(self, directory: Path, node: int = 0, nodes: int = 1) -> bool:
        """Push a published checkpoint: each node its own files, then the first one the description that completes it.

        Returns whether this node has done its part; False when a file here is damaged, and when training has removed
        the checkpoint, here or on another node. Afterwards removes older ones from the store, as training does on the
        volume. Raises UserError when another node does not push its files.
        """
        with self._held(directory) as (held, described):
            if described is None:
                return False
            name = stored_name(directory, described.step)
            url, what = f"{self._url}/{name}", f"push checkpoint {name}"
            if self._is_complete(name, described):
                return True
            here = {file: digest for file, digest in described.sha256.items() if (held / file).exists()}
            if reason := description.why_damaged(held, here):
                print(f"train: not pushing checkpoint {name}: {reason}", flush=True)
                return False
            self._forget_others(name, described)
            marker = held / description.NAME
            trees.push(self._client, url, held, [file for file in files_below(held) if file != marker], what)
            if nodes > 1:
                objects.write(self._client, self._url, f"{votes(name, described)}/{node}", b"")
            if node:
                return True
            if not self._wait_for_all(name, described, nodes, directory):
                return False
            trees.push(self._client, url, held, [marker], what)
        self._remove_votes(name)
        self._remove_old(name, described)
        return True

    def pull(self, step: int | None = None) -> Path | None:
        """Pull the newest complete, undamaged checkpoint, with the files of all nodes, unless it is here.

        Also the best weights as of its step. `step`: of the checkpoint that another node has pulled, which goes before
        newer ones. Returns its directory; None when the store has no complete checkpoint of this training. Raises
        UserError when it has some, and all are damaged.
        """
        damaged: list[str] = []
        while True:
            stored = self._complete()
            names = [name for name in stored if not is_best(name) and name not in damaged]
            name = max(names, key=lambda name: (number_of(name) == step, number_of(name)), default=None)
            if name is None:
                break
            try:
                self._pull_best(number_of(name), stored)
                if self._pull(name, stored[name], self._run.paths.checkpoint(number_of(name))):
                    return self._run.paths.checkpoint(number_of(name))
                damaged.append(name)
            except UserError:
                if self._is_complete(name, stored[name]):
                    raise
                # training has since removed it and pushed another
        if damaged:
            raise UserError(
                f"{self._url}: every complete checkpoint is damaged: {', '.join(damaged)}",
                "to train from step 0, move them away (aws s3 mv --recursive)",
            )
        return None

    def pull_named(self, name: str, directory: Path) -> None:
        """Pull a checkpoint, with the files of all nodes. Raises UserError when the store has no complete one."""
        described = self._described(name)
        if described is None:
            raise UserError(f"{self._url}/{name}: is not complete", _REMEDY)
        self._pull_files(name, directory, described.files)
        self._pull_files(name, directory, [description.NAME])

    def _pull_best(self, step: int, stored: Mapping[str, Description]) -> None:
        """Pull the best weights as of a step, if the store has them."""
        best = max((name for name in stored if is_best(name) and number_of(name) <= step), key=number_of, default=None)
        if best is not None:
            self._pull(best, stored[best], self._run.paths.best_checkpoint)

    def _pull(self, name: str, described: Description, directory: Path) -> bool:
        """Pull what is missing or damaged here; returns whether the checkpoint is then complete and undamaged."""
        if _is_here(directory, described) and not description.why_damaged(directory, described.sha256):
            return True
        # what is there may be another checkpoint of this step, or this node's part of it
        (directory / description.NAME).unlink(missing_ok=True)
        self._pull_files(name, directory, described.files)
        # the store has the files that were pushed, which need not be those that training wrote
        if reason := description.why_damaged(directory, described.sha256):
            print(f"train: ignoring checkpoint {name} of the store: {reason}", flush=True)
            return False
        self._pull_files(name, directory, [description.NAME])
        return True

    def _pull_files(self, name: str, directory: Path, files: Iterable[str]) -> None:
        url, what = f"{self._url}/{name}", f"pull checkpoint {name}"
        trees.pull_named(self._client, url, directory, files, what, flush=False)

    def _complete(self) -> dict[str, Description]:
        """The complete checkpoints of this training in the store, by name."""
        sizes = {entry.name: entry.size for entry in trees.listing(self._client, self._url)}
        found = {}
        for name in {name.partition("/")[0] for name in sizes if name.endswith(f"/{description.NAME}")}:
            described = self._described(name) if is_checkpoint(name) else None
            if described is None or described.fingerprint != self._run.plan["train"].fingerprint:
                continue
            if all(sizes.get(f"{name}/{file}") == size for file, size in described.files.items()):
                found[name] = described
        return found

    def _described(self, name: str) -> Description | None:
        """The description of a checkpoint in the store; None when it is missing or damaged."""
        content = objects.read(self._client, self._url, f"{name}/{description.NAME}")
        try:
            return None if content is None else Description.model_validate_json(content)
        except ValueError:
            return None

    def _is_complete(self, name: str, described: Description) -> bool:
        found = self._described(name)
        return found is not None and found.sha256 == described.sha256

    def _forget_others(self, name: str, described: Description) -> None:
        """Before files of this name are replaced, remove the description and the votes of the earlier ones."""
        own = f"{votes(name, described)}/"
        stale = [vote for vote in self._votes() if vote_of(vote)[0] == name and not vote.startswith(own)]
        objects.remove(self._client, self._url, [f"{name}/{description.NAME}", *stale])

    def _wait_for_all(self, name: str, described: Description, nodes: int, directory: Path) -> bool:
        """Wait until every node has voted; False when one has moved on to a later checkpoint without voting.

        Also when training has written another checkpoint of this step here, since the last attempt crashed: then the
        other nodes vote for that one. Raises UserError when one does neither, or a file is missing nevertheless.
        """
        own, deadline = votes(name, described), time.monotonic() + PATIENCE_SECONDS
        while nodes > 1:
            listed = self._votes()
            missing = [node for node in range(nodes) if f"{own}/{node}" not in listed]
            if not missing:
                break
            if any(node in missing and is_later(voted, name) for voted, node in map(vote_of, listed)):
                return False
            now = _read(directory)
            # not of another step: the directory of the best weights is always the same
            if now is not None and now != described and stored_name(directory, now.step) == name:
                return False
            if time.monotonic() > deadline:
                problem = f"node {missing[0]} has not pushed its files within {PATIENCE_SECONDS:.0f} s"
                raise UserError(f"checkpoint {name}: {problem}", _REMEDY)
            time.sleep(POLL_SECONDS)
        sizes = {entry.name: entry.size for entry in trees.listing(self._client, f"{self._url}/{name}")}
        for file, size in described.files.items():
            if sizes.get(file) != size:
                raise UserError(f"{self._url}/{name}/{file}: no node has pushed it", _REMEDY)
        return True

    def _remove_votes(self, name: str) -> None:
        """Remove the votes for a checkpoint and for earlier ones, which are complete or never will be."""
        voted = {vote: vote_of(vote)[0] for vote in self._votes()}
        over = [vote for vote, of in voted.items() if is_best(of) == is_best(name) and not is_later(of, name)]
        objects.remove(self._client, self._url, over)

    def _votes(self) -> list[str]:
        listed = trees.listing(self._client, self._url, "votes")
        return [entry.name for entry in listed if is_vote(entry.name)]

    def _remove_old(self, newest: str, described: Description) -> None:
        """Remove superseded checkpoints, and what interrupted pushes of earlier ones left behind."""
        complete = self._complete()
        for name in superseded(complete, newest, self._run.config.training.keep_checkpoints):
            self._remove(name, complete[name])
        listed = {entry.name.partition("/")[0] for entry in trees.listing(self._client, self._url)}
        for name in listed - complete.keys():
            if is_checkpoint(name) and is_best(name) == is_best(newest) and number_of(name) < number_of(newest):
                self._remove(name, described)  # of the same run: its files have the same names

    def _remove(self, name: str, described: Description) -> None:
        for files in ([description.NAME], described.files):
            objects.remove(self._client, self._url, [f"{name}/{file}" for file in files])

    @contextlib.contextmanager
    def _held(self, directory: Path) -> Iterator[tuple[Path, Description | None]]:
        """Hard links to this node's files of a checkpoint, because training may delete the originals; its description.

        The description is None when the checkpoint is gone, or has been replaced.
        """
        held = self._run.paths.checkpoints / _HELD / directory.name
        publish.remove(held)
        try:
            described = _read(directory)
            if described is not None:
                for name in (*described.files, description.NAME):
                    (held / name).parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):
                        os.link(directory / name, held / name)
            yield held, described if described == _read(held) == _read(directory) else None
        finally:
            publish.remove(held)


def _read(directory: Path) -> Description | None:
    """The description; None when the directory has been removed."""
    try:
        return description.read(directory)
    except UserError:
        if (directory / description.NAME).exists():
            raise
        return None


def _is_here(directory: Path, described: Description) -> bool:
    if _read(directory) != described:
        return False
    sizes = {name: (directory / name).stat().st_size for name in described.files if (directory / name).is_file()}
    return sizes == described.files
