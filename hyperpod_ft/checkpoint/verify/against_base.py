"""Says of a tuned model, or an adapter, what it has become of its base: one line for each kind of finding."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters import live_names
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.checkpoint.verify import forms, structure, turn_ends
from hyperpod_ft.checkpoint.verify.adapter_effects import AdapterEffects, Effect, read_effects, zero_updates
from hyperpod_ft.checkpoint.verify.base_values import BaseValues, Pair
from hyperpod_ft.checkpoint.verify.file_checks import read_tensors
from hyperpod_ft.checkpoint.verify.forms import Line, some
from hyperpod_ft.errors import UserError

Tensors = Mapping[str, LogicalTensor]


@dataclass(frozen=True)
class BaseComparison:
    """How many parts of a tuned model were compared with its base, how many differ, and how many hold the update."""

    base: str
    compared: int
    changed: int
    merged: int | None  # None without an adapter


class AgainstBase:
    """A comparison: `values` sees all values of the tuned model; `lines` are complete after `finish`."""

    def __init__(self, directory: Path, tensors: Tensors, base: Path, adapter: Path | None) -> None:
        """Reads headers, configurations and the adapter's names.

        Raises UserError when base or adapter cannot be read, or only one of the models is quantized.
        """
        configs = [model_directory.read_config(one) for one in (directory, base)]
        _refuse_quantized(directory, base, *configs)
        self._directory, self._base = directory, base
        self._stored = read_tensors(base, is_adapter=False)
        self._pairs, lines = structure.compare(tensors, configs[0], self._stored, configs[1])
        self.lines: list[Line] = [(wrong, f"{directory}: {line}") for wrong, line in lines]
        try:
            self.lines.extend(turn_ends.compare(directory, base, adapter))
        except UserError as error:
            self.lines.append((True, str(error)))
        self._effects = None
        if adapter:
            tensors_of_adapter = read_tensors(adapter, is_adapter=True)
            self._effects = effects_on(adapter, tensors_of_adapter, base, self._stored)
            self.lines += [*self._effects.lines, *zero_updates(adapter, tensors_of_adapter)]
            for pair in self._pairs:
                pair.effect = _known(self._effects.of(pair.name, pair.base), pair)
        self.values = BaseValues(self._pairs, unsloth=bool(self._effects and self._effects.unsloth))

    def finish(self) -> BaseComparison:
        """Adds what the values showed."""
        compared = [pair for pair in self._pairs if pair.is_comparable]
        if len(compared) < len(self._pairs):
            left = [pair.name for pair in self._pairs if not pair.is_comparable]
            line = f"{self._directory}: {len(left):,} tensors have dtypes that cannot be compared: {some(left)}"
            self.lines.append((False, line))
        lines = _of_merge(compared, self._effects) if self._effects else _of_training(compared)
        self.lines += [(wrong, f"{self._directory}: {line}") for wrong, line in lines]
        changed = sum(pair.tally.differs for pair in compared)
        merged = sum(pair.is_expected and pair.tally.is_merged for pair in compared) if self._effects else None
        return BaseComparison(str(self._base), len(compared), changed, merged)


def effects_on(adapter: Path, tensors: Tensors, base: Path, stored: Tensors) -> AdapterEffects:
    """What an adapter does to a base. Raises UserError when a configuration cannot be read."""
    config = model_directory.read_config(base)
    stored = model_directory.without_predictors(config, stored)
    prefix = live_names.prefix_of_headless(live_names.modules(tensors.values()), stored)
    named = {f"{prefix}{name}": tensor for name, tensor in stored.items()}
    if model_directory.is_tied(config, stored):
        named = model_directory.with_tied_output(named)
    return read_effects(adapter, tensors, named, config, prefix)


def adapter_lines(adapter: Path, tensors: Tensors, base: Path | None) -> list[Line]:
    """Lines about an adapter by itself, and with `base` whether any program would apply it.

    Raises UserError when the base, or a configuration, cannot be read.
    """
    of_base = effects_on(adapter, tensors, base, read_tensors(base, is_adapter=False)).lines if base else []
    return [*zero_updates(adapter, tensors), *of_base]


def _known(effect: Effect | None, pair: Pair) -> Effect | None:
    """The effect without values if these are not those of all elements of the tuned model's part."""
    if effect and effect.whole and effect.whole.shape != pair.tuned.shape:
        return Effect()
    return effect


def _of_merge(pairs: Iterable[Pair], effects: AdapterEffects) -> Iterator[Line]:
    """Lines about a model that should be its base with an adapter."""
    groups: dict[str, list[str]] = defaultdict(list)
    totals: Counter[bool] = Counter()
    times: Counter[str] = Counter()
    for pair in pairs:
        outcome = _outcome(pair)
        groups[outcome].append(pair.name)
        totals[forms.is_expert(pair.name)] += pair.effect is not None
        if outcome == "other" and pair.tally.times is not None:
            times[f"{pair.tally.times:.2g}"] += 1

    def grouped(group: str) -> Iterator[tuple[str, str]]:
        """For example `18,432 of 18,432 expert tensors that ...`, and names, for both sorts of tensors."""
        for expert, sort in ((True, "expert tensors"), (False, "tensors")):
            if names := [name for name in groups[group] if forms.is_expert(name) == expert]:
                yield f"{len(names):,} of {totals[expert]:,} {sort} that the adapter changes", some(names)

    for what, names in grouped("equal"):
        yield True, f"{what} equal the base: {names}"
    for what, names in grouped("other"):
        hint = f" (it was added {times.most_common(1)[0][0]} times)" if times else ""
        yield True, f"{what} hold another update than the adapter's{hint}: {names}"
    for what, names in grouped("order"):
        orders = ("PEFT's", "Unsloth's") if effects.unsloth else ("Unsloth's", "PEFT's")
        yield True, f"{what} hold it with lora_B read in {orders[0]} order of experts, not in {orders[1]}: {names}"
    if strange := groups["strange"]:
        yield (
            True,
            f"{len(strange):,} tensors differ from the base though the adapter does not change them: {some(strange)}",
        )
    if rounded := groups["rounded"]:
        yield False, f"{len(rounded):,} tensors that the adapter does not change differ from the base by rounding"
    if lost := groups["lost"]:
        everything = not groups["merged"] and not groups["other"] and not groups["order"]
        yield everything, f"the update of {len(lost):,} tensors is zero or lost in rounding: {some(lost)}"


def _outcome(pair: Pair) -> str:
    """What a merge did to a part, as one word."""
    tally, effect = pair.tally, pair.effect
    if effect is None:
        return "kept" if not tally.differs else "strange" if tally.beyond_rounding else "rounded"
    if not tally.differs:
        if not pair.is_expected or tally.moved:
            return "equal"
        return "kept" if effect.whole else "lost"  # PEFT also saves whole tensors that were not trained
    if not pair.is_expected or tally.is_merged:
        return "merged"
    return "order" if tally.is_merged_in_other_order else "other"


def _of_training(pairs: Iterable[Pair]) -> Iterator[Line]:
    """Lines about a model of which nobody says what was trained."""
    equal, total = Counter[str](), Counter[str]()
    experts = [pair for pair in pairs if forms.is_expert(pair.name)]
    for pair in pairs:
        total[forms.kind(pair.name)] += 1
        equal[forms.kind(pair.name)] += not pair.tally.differs
    if total and equal.total() == total.total():
        yield True, f"all {total.total():,} tensors equal the base: nothing was trained, or nothing was merged"
        return
    same = sum(not pair.tally.differs for pair in experts)
    if same:
        yield (
            False,
            (f"{same:,} of {len(experts):,} expert tensors equal the base; --adapter tells which should not"),
        )
    kept = [
        f"{name} ({count:,} of {total[name]:,})" for name, count in equal.items() if count and not forms.is_expert(name)
    ]
    if kept:
        yield False, f"{equal.total() - same:,} tensors equal the base: {some(kept)}"


def _refuse_quantized(directory: Path, base: Path, tuned: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    methods = [model_directory.quantization(config) for config in (tuned, other)]
    if methods[0] != methods[1]:
        one = base if methods[1] else directory
        raise UserError(
            f"{one}: is quantized ({methods[1] or methods[0]}), the other model is not",
            "compare models with the same quantization",
        )
