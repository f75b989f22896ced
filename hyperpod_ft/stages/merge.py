"""Stage merge: merge the adapter into the base model, as the final Hugging Face model.

python -m hyperpod_ft.stages.merge RUN_DIR
"""

from dataclasses import asdict

from hyperpod_ft.checkpoint.formats import checksums
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
from hyperpod_ft.progress import count
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages.model_card import model_card
from hyperpod_ft.stages.stage import Result, main


def work(run: Run) -> Result:
    settings, consolidated = run.config.merge, run.journal.record("consolidate")
    done = merge(
        run.paths.base_model,
        [WeightedAdapter(run.paths.adapter)],
        run.paths.tuned_model,
        dtype=settings.dtype,
        max_shard_bytes=int(settings.max_shard_size_gb * 1e9),
        stops=run.journal.ends_of_turns(),
        card=model_card(run, str(consolidated.facts["chat_template"]) if consolidated else ""),
    )
    print(
        f"merge: {done.merged} of {done.tensors} tensors merged ({done.lost_in_rounding} lost in rounding), the others"
        f" copied; {done.nbytes / 1e6:.1f} MB in {count(done.shards, 'file')} -> {run.paths.tuned_model}",
        flush=True,
    )
    return Result((run.paths.tuned_model,), asdict(done), xxh3=checksums.by_path(run.paths.tuned_model))


if __name__ == "__main__":
    main("merge", work)
