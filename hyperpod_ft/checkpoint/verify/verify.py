"""Verifies that a model or adapter is complete, has the expected tensors, and computes the expected logits.

Its files are read once, by several threads, in bounded memory. Only the comparison of logits needs torch.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from hyperpod_ft.checkpoint import kinds
from hyperpod_ft.checkpoint.adapters import origin
from hyperpod_ft.checkpoint.formats.checksums import CHECKSUMS, recorded
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.checkpoint.tensors.blocks import Inspect, Scanner
from hyperpod_ft.checkpoint.tensors.elements import Stored
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.checkpoint.verify import against_base
from hyperpod_ft.checkpoint.verify.against_base import AgainstBase, BaseComparison
from hyperpod_ft.checkpoint.verify.file_checks import Contents, collect_error, read_contents, read_tensors
from hyperpod_ft.checkpoint.verify.forms import Line, some
from hyperpod_ft.checkpoint.verify.value_checks import Difference, ValueChecks
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress, activity
from hyperpod_ft.shipped import installing

if TYPE_CHECKING:
    from hyperpod_ft.checkpoint.verify.logits import Logits
    from hyperpod_ft.checkpoint.verify.served import Served

# `compare(merged, adapter, base)`
Compare = Callable[[Path, Path, Path], "Logits"]
# `served.ask`
Ask = Callable[..., "Served"]

_DIFFERENCES_SHOWN = 10

Tensors = Mapping[str, LogicalTensor]


@dataclass(frozen=True)
class TensorComparison:
    """How many tensors equal the expected ones in name, dtype, shape and values, and how many do not."""

    against: str
    tolerance: float
    equal: int
    different: int
    largest_difference: float  # over all values, within the tolerance or not; NaN if one is NaN


@dataclass(frozen=True)
class Verification:
    """The result. `findings`: a line for each kind of fault; `notes`: for each difference that is none."""

    directory: str
    kind: str  # `model` or `adapter`
    files: int
    tensors: int
    nbytes: int
    checksums: str  # `match`, `differ` or `none recorded`
    comparison: TensorComparison | None
    base: BaseComparison | None
    logits: "Logits | None"
    served: "Served | None"
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float  # for the files; `logits` has its own

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """The findings as JSON values, with null for NaN and infinity."""
        return {"ok": self.ok} | asdict(self, dict_factory=_finite)


def _finite(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in items}


def verify(
    directory: Path,
    *,
    against: Path | None = None,
    tolerance: float = 0.0,
    adapter: Path | None = None,
    base: Path | None = None,
    logits: bool = False,
    served: str | None = None,
    model: str | None = None,
) -> Verification:
    """Check a Hugging Face model or a PEFT adapter: its files, recorded checksums, values and configuration.

    With `against`, also check that it has that directory's tensors, with values within `tolerance` (absolute; 0: the
    same bits). With `base`, also say how the model differs from it: with `adapter` too, whether it is their merge, and
    with `logits`, whether it computes what PEFT computes with the adapter on the base.
    With `served`, the URL of a server, ask which of the two it serves, under the name `model`.

    Raises UserError, before any weights are read, when the directory has neither a model nor an adapter, another
    directory is of the wrong kind or cannot be read, or the logits need a package that is not installed.
    """
    _check_tolerance(tolerance, against)
    kind = kinds.expect("", directory, "model", "adapter")
    if against:
        kinds.expect("--against", against, kind)
    _check_base(kind, directory, adapter, base, logits=logits)
    if (served or model) and not (served and base):
        raise UserError("--served and --model: ask a server for the tuned model or its base", "add --served and --base")
    compare, ask = _with_torch() if logits or served else (None, None)
    clock = time.monotonic()
    is_adapter = kind == "adapter"
    contents = read_contents(directory, is_adapter=is_adapter)
    expected = read_tensors(against, is_adapter=is_adapter) if against else {}

    findings = list(contents.findings)
    digests = collect_error(findings, partial(recorded, directory)) or {}
    values = ValueChecks(_of_same_shape(contents.tensors, expected), tolerance)
    is_described = collect_error([], partial(read_config, directory)) is not None  # else a finding says so
    comparable = base and not is_adapter and contents.is_whole and is_described
    changes = AgainstBase(directory, contents.tensors, base, adapter) if base and comparable else None
    unequal = list(
        _scan(directory, contents, digests, [values.inspect, *([changes.values.inspect] if changes else [])])
    )
    findings += unequal
    findings += _nonfinite(directory, values.nonfinite)
    lines: list[Line] = []
    compared = changes.finish() if changes else None
    if changes:
        lines = changes.lines
    elif is_adapter and contents.is_whole:
        lines = collect_error(findings, partial(against_base.adapter_lines, directory, contents.tensors, base)) or []
    findings += [line for wrong, line in lines if wrong]
    comparison = measured = None
    if against:
        differences = list(_differences(contents.tensors, expected, values.differences))
        comparison = _comparison(against, tolerance, contents.tensors, expected, values, len(differences))
        dtypes = _dtypes_only(contents.tensors, expected, values.differences)
        findings += _shortened(f"{directory}, against {against}", dtypes or differences)
    seconds = time.monotonic() - clock
    if compare and logits and adapter and base and contents.is_whole:
        measured = collect_error(findings, partial(compare, directory, adapter, base))
        findings += measured.findings(directory) if measured else ()
    asked = None
    if ask and served and base and contents.is_whole:
        asked = ask(directory, base, served, model, is_adapter=is_adapter)
        findings += asked.findings
    return Verification(
        directory=str(directory),
        kind=kind,
        files=len(contents.files),
        tensors=len(contents.tensors),
        nbytes=sum(tensor.nbytes for tensor in contents.tensors.values()),
        checksums="none recorded" if not digests else "differ" if unequal else "match",
        comparison=comparison,
        base=compared,
        logits=measured,
        served=asked,
        findings=tuple(findings),
        notes=tuple(line for wrong, line in lines if not wrong),
        seconds=round(seconds, 3),
    )


def _of_same_shape(tensors: Tensors, expected: Tensors) -> Tensors:
    return {
        name: tensor for name, tensor in expected.items() if name in tensors and tensors[name].shape == tensor.shape
    }


def _nonfinite(directory: Path, found: Mapping[str, str]) -> Iterator[str]:
    """A line for each kind of tensors with values that are no numbers."""
    for kind in sorted(set(found.values())):
        names = [name for name in found if found[name] == kind]
        yield (
            f"{directory}: {f'tensor {names[0]} holds' if len(names) == 1 else f'{len(names):,} tensors hold'} {kind}"
            + (f": {some(names)}" if len(names) > 1 else "")
        )


def _scan(
    directory: Path, contents: Contents, digests: Mapping[str, str], inspectors: Sequence[Inspect]
) -> Iterator[str]:
    """Let all `inspectors` see all tensors. Yields a line for each file that differs from its recorded checksum."""

    def inspect(tensor: LogicalTensor, first: int, stored: Stored) -> None:
        for one in inspectors:
            one(tensor, first, stored)

    present = [name for name in sorted({*contents.files, *digests}) if (directory / name).is_file()]
    total = sum((directory / name).stat().st_size for name in present)
    # threads already use all CPUs; BLAS threads would only compete with them
    with threadpool_limits(1, "blas"), ByteProgress("verify", total) as progress, Scanner(progress) as scanner:
        for name in present:
            failed: list[str] = []
            scan = partial(scanner.scan, directory / name, contents.files.get(name, ()), inspect)
            digest = collect_error(failed, scan)
            yield from failed
            if digests and name not in digests:
                yield f"{directory / CHECKSUMS}: has no checksum of {name}"
            elif digests and digest is not None and digest != digests[name]:
                yield f"{directory / name}: is damaged: its checksum differs from {CHECKSUMS}"
    for name in sorted(digests.keys() - set(present)):
        yield f"{directory / CHECKSUMS}: names {name}, which is missing"


def _differences(tensors: Tensors, expected: Tensors, found: Mapping[str, Difference]) -> Iterator[str]:
    """A line for each tensor that differs from the expected one."""
    for name in sorted(tensors.keys() | expected.keys()):
        if name not in tensors or name not in expected:
            yield f"tensor {name} is missing" if name in expected else f"tensor {name} is not expected"
            continue
        left, right = tensors[name], expected[name]
        if left.shape != right.shape:
            yield f"tensor {name} is {list(left.shape)}, should be {list(right.shape)}"
            continue
        parts = []
        if left.dtype != right.dtype:
            parts.append(f"is {left.dtype}, should be {right.dtype}")
        if name in found and found[name].elements:
            count, largest = found[name].elements, found[name].largest
            parts.append(f"{count} of {left.elements} values differ, by {largest:.6g} at most")
        if parts:
            yield f"tensor {name}: {'; '.join(parts)}"


def _dtypes_only(tensors: Tensors, expected: Tensors, found: Mapping[str, Difference]) -> list[str]:
    """A single line if all tensors have the same wrong dtype and nothing else differs; otherwise an empty list."""
    pairs = {(tensors[name].dtype, expected[name].dtype) for name in tensors.keys() & expected.keys()}
    same_names = tensors.keys() == expected.keys()
    if len(pairs) != 1 or not same_names or any(found[name].elements for name in tensors if name in found):
        return []
    if any(tensor.shape != expected[name].shape for name, tensor in tensors.items()):
        return []
    is_now, should_be = pairs.pop()
    return [] if is_now == should_be else [f"all {len(tensors)} tensors are {is_now}, should be {should_be}"]


def _comparison(
    against: Path, tolerance: float, tensors: Tensors, expected: Tensors, values: ValueChecks, different: int
) -> TensorComparison:
    largest = reduce(add, values.differences.values(), Difference()).largest
    equal = len(tensors.keys() | expected.keys()) - different
    return TensorComparison(str(against), tolerance, equal, different, largest)


def _shortened(where: str, lines: Sequence[str]) -> Iterator[str]:
    yield from (f"{where}: {line}" for line in lines[:_DIFFERENCES_SHOWN])
    if len(lines) > _DIFFERENCES_SHOWN:
        yield f"{where}: {len(lines) - _DIFFERENCES_SHOWN} more tensors differ"


def _check_tolerance(tolerance: float, against: Path | None) -> None:
    if not 0 <= tolerance < math.inf:
        raise UserError(f"--tolerance {tolerance}: must be a finite number, 0 or more", "give another tolerance")
    if tolerance and against is None:
        raise UserError("--tolerance: applies to --against only", "add --against, or leave --tolerance out")


def _check_base(kind: kinds.Kind, directory: Path, adapter: Path | None, base: Path | None, *, logits: bool) -> None:
    """Raise UserError for directories of the wrong kinds, and for a base on which the adapter was not trained."""
    if base is None and adapter is not None:
        raise UserError("--adapter: without the model that it was trained on", "add --base")
    if logits and (adapter is None or kind == "adapter"):
        raise UserError("--logits: compares a merged model with --adapter on --base", "give all three, or leave it out")
    if adapter and kind == "adapter":
        raise UserError(f"{directory}: is an adapter", "--adapter is for a merged model")
    if adapter and base:
        if (kinds.kind_of(adapter), kinds.kind_of(base)) == ("model", "adapter"):
            raise UserError("--adapter is a model and --base an adapter", "swap them")
        kinds.expect("--adapter", adapter, "adapter")
    if base:
        kinds.expect("--base", base, "model")
    if adapter and base:
        origin.check_base(base, adapter)
    elif base and kind == "adapter":
        origin.check_base(base, directory)


def _with_torch() -> tuple[Compare, Ask]:
    """What compares logits, and what asks a server. Raises UserError if a package that they need is not installed."""
    try:
        with activity("loading torch and peft"):
            # the other checks need no torch
            from hyperpod_ft.checkpoint.verify.logits import compare  # noqa: PLC0415
            from hyperpod_ft.checkpoint.verify.served import ask  # noqa: PLC0415
    except ImportError as error:
        raise UserError(f"--logits and --served: {error.name} is not installed", installing("torch")) from error
    return compare, ask
