"""The commands for checkpoints and models, also outside any run: consolidate, merge, verify."""

import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyperpod_ft.cli.options import Json, ModelReference
from hyperpod_ft.cli.output.tables import print_json
from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.progress import count, format_bytes

if TYPE_CHECKING:
    from hyperpod_ft.checkpoint.sharded.sharded import ShardedCheckpoint
    from hyperpod_ft.checkpoint.verify.verify import Verification
    from hyperpod_ft.runs.chain import Link

Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="New directory to write.")]
ShardSize = Annotated[
    str | None,
    typer.Option("--max-shard-size", metavar="GB", help="Maximum size of each weight file.", show_default="5"),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="`float32`, `bfloat16` or `float16`; `base` keeps each tensor's own."),
]
_DTYPES = {name: name for name in ("base", "float32", "bfloat16", "float16")}
_ALIASES = _DTYPES | {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(GB|MB)?", re.IGNORECASE)


def consolidate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Sharded checkpoint that training wrote.")],
    output: Output,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Model that it was trained from; names and shapes must match.", show_default=False
        ),
    ] = None,
    dtype: Dtype = "base",
    max_shard_size: ShardSize = None,
    as_json: Json = False,
) -> None:
    """Turn a sharded checkpoint into a PEFT adapter or a Hugging Face model.

    CKPT is a checkpoint of optimum-neuron (neuronx-distributed) or torch.distributed.checkpoint.
    """
    from hyperpod_ft.checkpoint import kinds
    from hyperpod_ft.checkpoint.consolidate import consolidate_checkpoint

    clock = time.monotonic()
    written_as = None if dtype == "base" else _dtype(dtype)
    shard_bytes = None if max_shard_size is None else _shard_bytes(max_shard_size)
    kinds.expect("", checkpoint, "sharded checkpoint")
    if base:
        kinds.expect("--base", base, "model")
    with _writing(output, [checkpoint, *([base] if base else [])]):
        opened, done = consolidate_checkpoint(
            checkpoint, output.absolute(), base=base, dtype=written_as, max_shard_bytes=shard_bytes
        )
    seconds = time.monotonic() - clock
    if as_json:
        _print_facts(output, "adapter" if opened.adapters else "model", done.tensors, done.nbytes, seconds)
    else:
        _print_consolidated(output, opened, done.nbytes, seconds)


def merge(
    base: Annotated[Path, typer.Option(metavar="DIR", help="Model that the adapter was trained on.")],
    adapter: Annotated[list[Path], typer.Option(metavar="DIR", help="PEFT adapter; may be repeated.")],
    output: Output,
    weight: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="Factor of each adapter's update, in the same order.", show_default="1 each"),
    ] = None,
    dtype: Dtype = "base",
    max_shard_size: ShardSize = None,
    as_json: Json = False,
) -> None:
    """Merge LoRA adapters into their base model."""
    from hyperpod_ft.checkpoint import kinds
    from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter
    from hyperpod_ft.checkpoint.merge.merge import merge as merge_adapters

    written_as, shard_bytes = _dtype(dtype), _shard_bytes(max_shard_size)
    weights = weight or [1.0] * len(adapter)
    if len(weights) != len(adapter):
        raise UserError(f"--weight: {len(weights)} for {count(len(adapter), 'adapter')}", "give one for each, or none")
    for one in adapter:
        kinds.expect("--adapter", one, "adapter")
    kinds.expect("--base", base, "model")
    adapters = [WeightedAdapter(path, factor) for path, factor in zip(adapter, weights, strict=True)]
    with _writing(output, [base, *adapter]):
        done = merge_adapters(base, adapters, output.absolute(), dtype=written_as, max_shard_bytes=shard_bytes)
    if as_json:
        counts = {"merged": done.merged, "lost_in_rounding": done.lost_in_rounding, "adapters": done.adapters}
        counts["unchecked"] = done.unchecked
        _print_facts(output, "model", done.tensors, done.nbytes, done.seconds, **counts)
        return
    print(
        f"{done.merged} of {count(done.tensors, 'tensor')} merged, {format_bytes(done.nbytes)} in"
        f" {count(done.shards, 'file')} -> {output}, {_pace(done.nbytes, done.seconds)}"
    )
    if done.lost_in_rounding:
        print(
            f"{done.lost_in_rounding} of these are unchanged: their update is lost in rounding to their dtype;"
            " use --dtype float32 to keep it"
        )
    if done.unchecked:
        unknown = count(done.unchecked, "adapter")
        print(f"not checked: of {unknown}, whether it was trained on {base}; the adapter's file does not say")
    print(f"next: hyperpod-ft verify {output}")


def _dtype(name: str) -> str:
    if name not in _ALIASES:
        raise UserError(f"--dtype {name}: unknown", f"known: {', '.join(_DTYPES)}")
    return _ALIASES[name]


def _shard_bytes(size: str | None) -> int:
    match = _SIZE.fullmatch(size or "5")
    shard_bytes = int(float(match[1]) * (1e6 if (match[2] or "").upper() == "MB" else 1e9)) if match else 0
    if shard_bytes < 1_000_000:
        raise UserError(f"--max-shard-size {size}: is not a size", "give at least 0.001 GB, for example 5 or 5GB")
    return shard_bytes


@contextlib.contextmanager
def _writing(output: Path, inputs: Sequence[Path]) -> Iterator[None]:
    """Lock `output` while it is written; after an interruption, print where the finished files are.

    Raises UserError, before anything is written, when it cannot be created or overlaps an input.
    """
    from hyperpod_ft import publish
    from hyperpod_ft.checkpoint import kinds

    kinds.refuse_overlap(output, inputs)
    kinds.refuse_unwritable(output)
    final = output.absolute()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with publish.sole_writer(final):
            yield
    except (KeyboardInterrupt, SystemExit):
        partial = publish.partial_of(final)
        if partial.is_dir():
            print(
                f"stopped; finished files are in {output.with_name(partial.name)}: run the same command to resume, or"
                " remove them",
                file=sys.stderr,
            )
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _: object) -> None:
    sys.exit(128 + number)


def _print_facts(output: Path, kind: str, tensors: int, nbytes: int, seconds: float, **more: int) -> None:
    facts: dict[str, Any] = {
        "output": str(output), "kind": kind, "tensors": tensors, "nbytes": nbytes, "files": _files(output),
        "seconds": round(seconds, 3),
    }  # fmt: skip
    print_json(facts | more)


def _print_consolidated(output: Path, opened: "ShardedCheckpoint", nbytes: int, seconds: float) -> None:
    for adapter in opened.adapters:
        below = output / adapter.name
        directory = below if len(opened.adapters) > 1 and below.is_dir() else output
        size = sum(tensor.nbytes for tensor in adapter.tensors)
        print(
            f"adapter {adapter.name}: rank {adapter.config['r']}, {count(len(adapter.tensors), 'tensor')},"
            f" {format_bytes(size)} in 1 file -> {directory}, {seconds:.1f} s"
        )
    if opened.adapters:
        print(f"next: hyperpod-ft merge --base BASE --adapter {output} -o merged")
    else:
        files = count(_files(output), "file")
        print(
            f"model: {count(len(opened.model), 'tensor')}, {format_bytes(nbytes)} in {files} -> {output},"
            f" {_pace(nbytes, seconds)}"
        )
        print(f"next: hyperpod-ft verify {output}")


def _files(output: Path) -> int:
    return len(list(output.glob("**/*.safetensors")))


def _pace(nbytes: int, seconds: float) -> str:
    return f"{seconds:.1f} s ({nbytes / max(seconds, 1e-3) / 1e6:.0f} MB/s)"


def verify(
    reference: ModelReference = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory with the expected tensors, in any sharding.", show_default=False),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="Largest allowed difference from --against; 0: the same bits.")
    ] = 0.0,
    adapter: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Adapter that was merged into --base.", show_default=False),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Model that was trained; says how the tuned one differs.", show_default=False),
    ] = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="Also compare logits with those of --adapter on --base, by PEFT.")
    ] = False,
    served: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask a server with the OpenAI API whether it has the tuned model or its base.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model on that server.", show_default="its first")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Of a run, instead: are all files from the data to the answers as recorded?")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that a model or adapter is complete, finite and as expected; exit code 1 if it is not.

    Of a run, its tuned model.
    """
    if run:
        if against or adapter or base or logits or served or model:
            raise UserError("--run: checks the files of a run, and takes no option but --json", "leave the others out")
        raise typer.Exit(0 if _verify_run(reference, as_json) else 1)
    from hyperpod_ft.checkpoint.verify.verify import verify as verify_directory
    from hyperpod_ft.launch.finished import tuned_directory
    from hyperpod_ft.launch.launchers import Launchers

    directory = tuned_directory(reference, Launchers())
    verified = verify_directory(
        directory,
        against=against,
        tolerance=tolerance,
        adapter=adapter,
        base=base,
        logits=logits,
        served=served,
        model=model,
    )
    if as_json:
        print_json(verified.as_dict())
    else:
        _print_verification(verified)
    raise typer.Exit(0 if verified.ok else 1)


def _verify_run(reference: str | None, as_json: bool) -> bool:
    """Print each link of a run's chain of digests; whether none is broken."""
    from hyperpod_ft.launch.launchers import Launchers
    from hyperpod_ft.runs import chain, references
    from hyperpod_ft.runs.run import Run

    run = Run.open(references.find(reference).paths.directory)  # what it has recorded, of a run file too
    Launchers().bring_small_files(run)
    found = []
    for link in chain.links(run):
        found.append(link)
        if not as_json:
            print(f"wrong: {link.name}: {printable(link.broken)}" if link.broken else f"{link.name:<12} {_link(link)}")
    ok = not found[-1].broken
    if as_json:
        print_json({"run": run.paths.full_name, "ok": ok, "links": [asdict(link) for link in found]})
    return ok


def _link(link: "Link") -> str:
    counts = ((link.files, "as recorded"), (link.gone, "removed since"))
    return link.waits or ", ".join(f"{count(files, 'file')} {how}" for files, how in counts if files) or "as recorded"


def _print_verification(verified: "Verification") -> None:
    faults = count(len(verified.findings), "fault")
    print(f"{verified.directory}: {'sound, no faults found' if verified.ok else f'wrong, {faults}'}")
    for line in verified.findings:
        print(f"wrong: {printable(line)}")
    for line in verified.notes:
        print(f"note: {printable(line)}")
    print(
        f"{verified.kind:<10} {count(verified.files, 'file')}, {count(verified.tensors, 'tensor')},"
        f" {format_bytes(verified.nbytes)} in {_pace(verified.nbytes, verified.seconds)}"
    )
    print(f"checksums  {verified.checksums}")
    if base := verified.base:
        merged = "" if base.merged is None else f", {base.merged:,} as the adapter changes them"
        print(f"base       {base.changed:,} of {base.compared:,} tensors differ from {base.base}{merged}")
    if compared := verified.comparison:
        print(
            f"against    {compared.against}: {compared.equal} tensors equal, {compared.different} different;"
            f" largest difference {compared.largest_difference:.3g}"
        )
    if logits := verified.logits:
        effect = "" if logits.effect is None else f", the adapter makes {logits.effect:.3g}"
        print(
            f"logits     root mean square {logits.scale:.3g}; differences: {logits.rms_difference:.3g}"
            f" (tolerance {logits.tolerance:.3g}{effect}), {logits.mean_difference:.3g} mean,"
            f" {logits.largest_difference:.3g} largest;"
            f" the same most likely token at {logits.top1_agreement:.1%} of {logits.tokens} positions;"
            f" {logits.seconds:.1f} s"
        )
    if served := verified.served:
        print(
            f"served     {served.model} at {served.url}: {served.tuned} of {served.asked} tokens are the tuned model's,"
            f" {served.base} the base's"
        )
