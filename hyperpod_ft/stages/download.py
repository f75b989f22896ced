"""Stage `download`: copy the base model, an adapter, a teacher and the raw dataset to the shared volume, for all runs.

python -m hyperpod_ft.stages.download RUN_DIR

Writes `paths.fetched` and `paths.inputs`, each with a manifest. The only stage except `env` that uses the network. Runs
on the kit's own interpreter: neither torch nor transformers is imported.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hyperpod_ft.download import adapter, assets
from hyperpod_ft.download.fetch import Manifest, ensure
from hyperpod_ft.planning.model_fit import check_all_nodes
from hyperpod_ft.runs.assets import with_adapter
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.stage import Result, main


def work(run: Run) -> Result:
    fetched = {"model": ensure(assets.model(run))}
    fetched |= {wanted.key: ensure(wanted) for wanted in adapter.wanted(run)}
    adapter.check(run)
    fetched |= {wanted.key: ensure(wanted) for wanted in assets.teacher(run)}
    config, paths = with_adapter(run.config), run.paths
    check_all_nodes(config, run.plan.degrees, paths.fetched_model, None, paths.teacher)
    if made := assets.made_model(run):
        fetched["model.new_tokens" if run.config.model.added_tokens else "score"] = ensure(made)
    fetched |= {wanted.key: ensure(wanted) for wanted in assets.datasets(run)}
    return Result(
        list(dict.fromkeys(run.paths.inputs)),
        {key: _facts(manifest) for key, manifest in fetched.items()},
        xxh3=_digests(run.paths.inputs),
    )


def _digests(directories: Iterable[Path]) -> dict[Path, str]:
    """Those of the files as they were fetched: a file that has changed since is not what the run began with."""
    found = ((directory, Manifest.read(directory)) for directory in directories)
    return {directory / name: digest for directory, one in found if one for name, digest in one.xxh3.items()}


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "source": manifest.source,
        "revision": manifest.revision,
        "commit": manifest.commit,
        "content": manifest.content,
        "finished": manifest.finished,
        "files": len(manifest.files),
        "bytes": manifest.size,
    }


if __name__ == "__main__":
    main("download", work)
