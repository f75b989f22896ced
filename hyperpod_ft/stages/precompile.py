"""Stage `precompile`: compile the graphs of training before training needs them (on Trainium).

    python -m hyperpod_ft.stages.precompile RUN_DIR COMMAND ARGUMENT...

Runs once, on the first node, and starts COMMAND: the training command on every node, which runs
`python -m hyperpod_ft.stages.train RUN_DIR --trial`. With engine torch, the trial compiles what it computes. With
engine neuron, each torchrun is under `neuron_parallel_compile`, for which the trial only collects graphs, and which
then compiles them in parallel. The stage succeeds when the trial did, the command's exit status is 0, and no graph is
missing from the cache, which all runs of the same shapes share.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError
from hyperpod_ft.job import neuron_cache
from hyperpod_ft.runs.job_files import shell_status
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.run_paths import RunPaths
from hyperpod_ft.stages import stage


def work(run: Run, command: Sequence[str]) -> stage.Result:
    """Repair the cache and run the command. Raises UserError when graphs are missing from the cache afterwards."""
    cache = run.paths.neuron_cache
    with neuron_cache.using(cache) as removed:
        neuron_cache.print_removed("precompile", removed)
        before = neuron_cache.finished(cache)
        facts = _trial(run.paths, command)
        done, missing = neuron_cache.finished(cache), neuron_cache.unfinished(cache)
    if missing:
        name, reason = next(iter(sorted(missing.items())))
        raise UserError(
            f"{len(missing)} of {len(done) + len(missing)} graphs were not compiled, {cache / name}: {reason}",
            "see the compiler's output above; hyperpod-ft resume compiles the missing ones",
        )
    if not done:
        raise UserError(f"{cache}: the trial left no compiled graph", "see its output above")
    print(f"precompile: {len(done)} graphs, {len(done - before)} of them compiled now", flush=True)
    return stage.Result(
        [neuron_cache.neff_of(cache / name) for name in sorted(done)],
        {"graphs": len(done), "graphs_compiled": len(done - before), "cache_entries_removed": removed, **facts},
    )


def _trial(paths: RunPaths, command: Sequence[str]) -> dict[str, object]:
    """Run the trial; returns its facts. Exits with the command's status, or 1, when the trial failed."""
    publish.remove(paths.trial_facts)
    try:
        status = subprocess.run(command, check=False).returncode
        # a compiler driver may compile what was traced, and succeed, after its trial has failed
        if status or not paths.trial_facts.exists():
            ended = f"the command ended with exit status {status}" if status else "the trial did not finish"
            print(f"error: precompile: {ended}; see above", file=sys.stderr)
            sys.exit(shell_status(status) or 1)
        facts: dict[str, object] = json.loads(paths.trial_facts.read_text(encoding="utf-8"))
        return facts
    finally:
        publish.remove(paths.trial_facts)


if __name__ == "__main__":
    stage.main("precompile", partial(work, command=sys.argv[2:]), sys.argv[1:2])
