"""The commands that work on checkpoints and models by themselves, outside any run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyperpod_ft import publish
from hyperpod_ft.errors import UserError

if TYPE_CHECKING:
    from hyperpod_ft.checkpoint.verify import Verification

app = typer.Typer()

Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The new directory.")]
ShardSize = Annotated[
    float, typer.Option("--max-shard-size", metavar="GB", help="The largest file of weights.", min=1e-3)
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16, or base: each tensor's own.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_DTYPES = ("base", "float32", "bfloat16", "float16")


@app.command()
def consolidate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="What training wrote: a directory of shards.")],
    output: Output,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The model it was trained from; all has to fit it.", show_default=False),
    ] = None,
    dtype: Dtype = "base",
    max_shard_size: ShardSize = 5.0,
    as_json: Json = False,
) -> None:
    """Make a PEFT adapter, or a Hugging Face model, from a sharded checkpoint.

    CKPT is a checkpoint of optimum-neuron (neuronx-distributed) or of torch.distributed.checkpoint.
    """
    from hyperpod_ft.checkpoint.consolidate import consolidate_adapters, consolidate_model  # noqa: PLC0415
    from hyperpod_ft.checkpoint.sharded import open_checkpoint  # noqa: PLC0415

    _check_dtype(dtype)
    with publish.sole_writer(output.absolute()):
        opened = open_checkpoint(checkpoint)
        if opened.adapters:
            if dtype != "base":
                raise UserError("--dtype: an adapter is written as it is stored", "leave it out")
            done = consolidate_adapters(opened, output.absolute(), base=base)
        else:
            done = consolidate_model(
                opened, output.absolute(), base=base, dtype=dtype, max_shard_bytes=int(max_shard_size * 1e9)
            )
    _print_done(output, asdict(done), as_json)


@app.command()
def merge(
    base: Annotated[Path, typer.Option(metavar="DIR", help="The model that the adapter was trained on.")],
    adapter: Annotated[list[Path], typer.Option(metavar="DIR", help="A PEFT adapter; may be given several times.")],
    output: Output,
    weight: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="What to multiply an adapter with, in their order.", show_default="1 each"),
    ] = None,
    dtype: Dtype = "base",
    max_shard_size: ShardSize = 5.0,
    as_json: Json = False,
) -> None:
    """Merge LoRA adapters into their base model."""
    from hyperpod_ft.checkpoint.merge import WeightedAdapter  # noqa: PLC0415
    from hyperpod_ft.checkpoint.merge import merge as merge_adapters  # noqa: PLC0415

    _check_dtype(dtype)
    weights = weight or [1.0] * len(adapter)
    if len(weights) != len(adapter):
        raise UserError(f"--weight: {len(weights)} for {len(adapter)} adapters", "give one for each, or none")
    adapters = [WeightedAdapter(path, factor) for path, factor in zip(adapter, weights, strict=True)]
    with publish.sole_writer(output.absolute()):
        done = merge_adapters(base, adapters, output.absolute(), dtype=dtype, max_shard_bytes=int(max_shard_size * 1e9))
    _print_done(output, asdict(done), as_json)


def _check_dtype(dtype: str) -> None:
    if dtype not in _DTYPES:
        raise UserError(f"--dtype {dtype}: unknown", f"known: {', '.join(_DTYPES)}")


def _print_done(output: Path, facts: dict[str, Any], as_json: bool) -> None:
    facts = {"output": str(output)} | facts
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(f"{name.replace('_', ' '):<16} {value}" for name, value in facts.items()))


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face model, or a PEFT adapter.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="What it should hold, sharded in any way.", show_default=False),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="How far a value may be from that of --against; 0: the same bits.")
    ] = 0.0,
    adapter: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compare logits: the adapter that was merged.", show_default=False),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compare logits: the model it was merged into.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a model or adapter is whole, finite, and what it should be; exit code 1 when it is not."""
    from hyperpod_ft.checkpoint.verify import verify as verify_directory  # noqa: PLC0415 - keeps --help quick

    found = verify_directory(directory, against=against, tolerance=tolerance, adapter=adapter, base=base)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _print_verification(found)
    raise typer.Exit(0 if found.ok else 1)


def _print_verification(found: "Verification") -> None:
    rate = found.nbytes / max(found.seconds, 1e-3) / 1e6
    files = f"{found.files} file{'s' * (found.files != 1)}"
    print(
        f"{found.directory}: {found.kind}, {files}, {found.tensors} tensors, {found.nbytes / 1e9:.2f} GB"
        f" in {found.seconds:.1f} s ({rate:.0f} MB/s)"
    )
    print(f"checksums  {found.checksums}")
    if compared := found.comparison:
        print(
            f"against    {compared.against}: {compared.equal} tensors equal, {compared.different} different;"
            f" largest difference {compared.largest_difference:.3g}"
        )
    if logits := found.logits:
        print(
            f"logits     root mean square {logits.scale:.3g}; differences: {logits.rms_difference:.3g}"
            f" (tolerance {logits.tolerance:.3g}), {logits.mean_difference:.3g} mean, {logits.largest_difference:.3g}"
            f" largest; the same most likely token at {logits.top1_agreement:.1%} of {logits.tokens} positions;"
            f" {logits.seconds:.1f} s"
        )
    for line in found.findings:
        # names of tensors may hold anything, sequences that control a terminal included
        print("wrong: " + "".join(character if character.isprintable() else "?" for character in line))
    if found.ok:
        print("all is well")
