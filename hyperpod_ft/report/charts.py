"""What the page's script draws: charts as plain data, few enough points to open at once."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hyperpod_ft.report.numbers import finite
from hyperpod_ft.report.run_report import RunReport
from hyperpod_ft.runs.results.expert_load import DEAD, LARGEST
from hyperpod_ft.runs.results.metrics import OF_SOURCE, ROUGE
from hyperpod_ft.runs.results.slowest_rank import SlowestRank

POINTS = 24_000  # of all curves of a page together: about half a megabyte
_MOST_POINTS = 2_000  # of one curve: more than a screen has pixels
_FEWEST_POINTS = 40
_SMOOTHED_FROM = 40  # rows
_COLORS = 8  # of the page's style

Style = Literal["pale", "line", "dots", "level"]


@dataclass(frozen=True)
class Series:
    """A curve: y over each kind of x, of one length."""

    label: str
    color: int  # number of a color of the page's style, from 1
    style: Style
    x: Mapping[str, Sequence[float | None]]  # by the name of an axis
    y: Sequence[float | None]
    of: int = 0  # how many values y was chosen from


@dataclass(frozen=True)
class Mark:
    """A vertical line: where training resumed, or went on elsewhere."""

    label: str
    x: Mapping[str, float]


@dataclass(frozen=True)
class Chart:
    """A chart with curves (`lines`), columns (`bars`) or spans of time (`spans`)."""

    name: str
    kind: Literal["lines", "bars", "spans"]
    label: str  # of the y axis, with its unit
    axes: Mapping[str, str]  # the kinds of x, each with its label; one is shown at a time
    series: Sequence[Series] = ()
    marks: Sequence[Mark] = ()
    rows: Sequence[str] = ()  # of spans: the names of the lines
    spans: Sequence[Mapping[str, Any]] = ()
    bin_width: int = 0  # of bars
    from_zero: bool = True  # the y axis
    note: str = ""


@dataclass(frozen=True)
class _Quantity:
    """A quantity of metrics.jsonl, and its unit on the chart."""

    name: str
    label: str
    factor: float = 1.0


_QUANTITIES = (
    _Quantity("tokens_per_second", "Speed, tokens/s"),
    _Quantity("mfu", "Model FLOPs utilization (MFU), %", 100),
    _Quantity("memory_mb", "Peak memory of rank 0, GB", 1e-3),
    _Quantity("learning_rate", "Learning rate"),
    _Quantity("grad_norm", "Gradient norm, before clipping"),
    _Quantity("aux_loss", "Load-balancing loss of routers, without its coefficient"),
    _Quantity(LARGEST, "Largest load of an expert, times the mean of its layer"),
    _Quantity(DEAD, "Experts without a token, of all layers"),
    _Quantity("reward", "Reward of an answer, mean of the step"),
    _Quantity("completions/mean_length", "Tokens of an answer, mean of the step"),
    _Quantity("kl", "KL divergence from the model before training, nats per token; of KTO, per completion"),
    _Quantity("rewards/margins", "Reward margin, chosen minus rejected"),
    _Quantity("margin", "Score margin, chosen minus rejected"),
    _Quantity("accuracy", "Pairs whose chosen completion has the higher score, %", 100),
    _Quantity("rewards/accuracies", "DPO pairs whose chosen completion has the higher reward, %", 100),
)
_REWARD = ("rewards/", "/mean")  # begin and end the names of metrics of a function
_AXES = {"step": "Optimizer step", "seconds": "Time in training", "epoch": "Epochs"}


def charts(reports: Sequence[RunReport]) -> list[Chart]:
    """The charts of one run, or of several with one color each."""
    if len(reports) == 1:
        (report,) = reports
        found = [_loss(report), _losses_of_sources(report), _rouge(report), _rewards(report)]
        found += [*_quantities(reports), _slowest_ranks(report)]
        return [chart for chart in (*found, _timeline(report), _lengths(report)) if chart]
    return [chart for chart in (_losses(reports), _validation_losses(reports), *_quantities(reports)) if chart]


def _loss(report: RunReport) -> Chart | None:
    budget = _budget([report])
    smooth, window = _smooth_loss(report)
    series = [_series(report, "loss", "Training loss, each step", 1, "pale" if window > 1 else "line", budget)]
    if window > 1:
        label = f"Training loss, moving average over about {window} rows"
        series.append(_curve(report, smooth, label, 1, "line", budget))
    if any(value is not None for value in report.metrics.get("validation_loss", ())):
        series.append(_series(report, "validation_loss", "Validation loss", 2, "dots", budget))
    if report.base_validation_loss is not None and report.metrics:
        series.append(_level(report, report.base_validation_loss, "Validation loss of the base model", 3))
    return _lines("loss", f"Loss, {_unit(report)}", [report], series)


def _losses_of_sources(report: RunReport) -> Chart | None:
    series = _several(report, {key: key.removeprefix(OF_SOURCE) for key in _of_sources(report)}, "dots")
    return _lines("validation_loss_of_sources", f"Validation loss by source, {_unit(report)}", [report], series)


def _rouge(report: RunReport) -> Chart | None:
    label = "ROUGE of answers to validation samples, F1"
    return _lines("validation_rouge", label, [report], _several(report, ROUGE, "dots"))


def _rewards(report: RunReport) -> Chart | None:
    """The reward of each function, where there are several."""
    begin, end = _REWARD
    keys = [key for key in report.metrics if key.startswith(begin) and key.endswith(end)]
    if len(keys) < 2:
        return None
    series = _several(report, {key: key.removeprefix(begin).removesuffix(end) for key in keys}, "line")
    return _lines("rewards", "Reward by function, without its weight", [report], series)


def _several(report: RunReport, labels: Mapping[str, str], style: Style) -> list[Series]:
    """A curve for each of these keys of metrics.jsonl, with its label."""
    budget = _budget([report])
    return [
        _series(report, key, label, 1 + number % _COLORS, style, budget)
        for number, (key, label) in enumerate(labels.items())
    ]


def _slowest_ranks(report: RunReport) -> Chart | None:
    """How much longer than others the slowest rank worked; the places that were it most often have their colors."""
    by_step = {row.step: row for row in report.slowest_ranks}  # the last one, after a restart
    named = [place for place, _ in Counter(row.place for row in by_step.values()).most_common(_COLORS - 1)]
    rows: dict[str, list[SlowestRank]] = {}
    for _, row in sorted(by_step.items()):
        rows.setdefault(row.place if row.place in named else "any other", []).append(row)
    series = []
    for color, (label, found) in enumerate(rows.items(), 1):
        excess = [finite(100 * row.excess) for row in found]
        kept = thinned(excess, _budget([report]))
        x = {"step": [float(found[index].step) for index in kept]}
        series.append(Series(label, color, "dots", x, [_rounded(excess[index]) for index in kept], len(excess)))
    label = "Work of the slowest rank in a step, % above that of others (slow: 15 or more, twice in a row)"
    return _lines("slowest_rank", label, [report], series)


def _of_sources(report: RunReport) -> list[str]:
    return sorted(key for key in report.metrics if key.startswith(OF_SOURCE))


def _losses(reports: Sequence[RunReport]) -> Chart | None:
    series = [
        _curve(report, _smooth_loss(report)[0], report.name, color, "line", _budget(reports))
        for color, report in enumerate(reports, 1)
    ]
    return _lines("loss", f"Training loss (moving average), {_unit(reports[0])}", reports, series)


def _validation_losses(reports: Sequence[RunReport]) -> Chart | None:
    series = [
        _series(report, "validation_loss", report.name, color, "dots", _budget(reports))
        for color, report in enumerate(reports, 1)
    ]
    return _lines("validation_loss", f"Validation loss, {_unit(reports[0])}", reports, series)


def _quantities(reports: Sequence[RunReport]) -> Iterator[Chart | None]:
    for quantity in _QUANTITIES:
        several = len(reports) > 1
        series = [
            _series(
                report,
                quantity.name,
                report.name if several else quantity.label.split(",")[0],
                color,
                "line",
                _budget(reports),
                quantity.factor,
            )
            for color, report in enumerate(reports, 1)
        ]
        yield _lines(quantity.name.replace("/", "_"), quantity.label, reports, series)


def _lines(name: str, label: str, reports: Sequence[RunReport], series: Sequence[Series]) -> Chart | None:
    drawn = [curve for curve in series if curve.y]
    if not drawn:
        return None
    most = max(drawn, key=lambda curve: curve.of - len(curve.y))
    note = ""
    if most.of > len(most.y):
        note = (
            f"{len(most.y):,} of {most.of:,} logged values of a curve are drawn, the lowest and the highest of every"
            " few: each point was measured, and no spike is left out."
        )
    return Chart(name, "lines", label, _AXES, drawn, _marks(reports), note=note, from_zero="loss" not in name)


def _unit(report: RunReport) -> str:
    return {
        **dict.fromkeys(("dpo", "reward"), "nats per pair"),
        "kto": "per completion",
        **dict.fromkeys(("grpo", "rloo"), "of the policy"),
        "distillation": "nats per token",
    }.get(str(report.settings["training.objective"]), "nats per label token")


def _smooth_loss(report: RunReport) -> tuple[Sequence[float | None], int]:
    """The training loss as a smooth curve, and over how many rows it averages: 1 where there are few."""
    losses = report.metrics.get("loss", ())
    if len(losses) < _SMOOTHED_FROM:
        return losses, 1
    window = max(5, len(losses) // 50)
    return smoothed(losses, window), window


def _marks(reports: Sequence[RunReport]) -> list[Mark]:
    several = len(reports) > 1
    marks = []
    for report in reports:
        steps = report.metrics.get("step", ())
        epochs, seconds = (dict(zip(steps, report.metrics.get(key, ()), strict=False)) for key in ("epoch", "seconds"))
        found = [
            (point.step, point.seconds, f"resumed from step {point.step} ({point.reason})")
            for point in report.resume_points
        ]
        found += [(place.step, seconds.get(place.step), place.change) for place in report.places[1:]]
        for step, at, label in found:
            x = {"step": float(step), "seconds": at, "epoch": epochs.get(step)}
            marks.append(
                Mark(
                    f"{report.name} {label}" if several else label,
                    {axis: value for axis, value in x.items() if value is not None},
                )
            )
    return marks


def _budget(reports: Sequence[RunReport]) -> int:
    """How many points a curve may have."""
    curves = sum(
        sum(quantity.name in report.metrics for quantity in _QUANTITIES) + 3 + len(_of_sources(report))
        for report in reports
        if report.metrics
    )
    return max(_FEWEST_POINTS, min(_MOST_POINTS, POINTS // max(1, curves)))


def _series(
    report: RunReport, name: str, label: str, color: int, style: Style, budget: int, factor: float = 1.0
) -> Series:
    values = report.metrics.get(name, ())
    scaled = [None if value is None else finite(value * factor) for value in values] if factor != 1.0 else values
    return _curve(report, scaled, label, color, style, budget)


def _curve(
    report: RunReport, values: Sequence[float | None], label: str, color: int, style: Style, budget: int
) -> Series:
    kept, known = thinned(values, budget), sum(value is not None for value in values)
    x = {axis: [column[index] for index in kept] for axis in _AXES if (column := report.metrics.get(axis))}
    return Series(label, color, style, x, [_rounded(values[index]) for index in kept], known)


def _level(report: RunReport, value: float, label: str, color: int) -> Series:
    ends = (0, -1)
    return Series(
        label,
        color,
        "level",
        {axis: [column[end] for end in ends] for axis in _AXES if (column := report.metrics.get(axis))},
        [_rounded(value)] * 2,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _timeline(report: RunReport) -> Chart | None:
    if not report.timeline:
        return None
    rows = list(dict.fromkeys(span.stage for span in report.timeline))
    spans = [
        {
            "row": rows.index(span.stage),
            "activity": span.activity,
            "start": span.start,
            "end": span.end,
            "text": span.why,
        }
        for span in report.timeline
    ]
    return Chart("timeline", "spans", "Stage", {"seconds": "Time since submission"}, rows=rows, spans=spans)


def _lengths(report: RunReport) -> Chart | None:
    lengths = report.dataset.get("lengths")
    if not lengths:
        return None
    width, counts = lengths["bin_width"], lengths["counts"]
    x = {"tokens": [width * (number + 0.5) for number in range(len(counts))]}
    series = Series("Examples", 1, "line", x, counts)
    return Chart("lengths", "bars", "Examples", {"tokens": "Length, tokens"}, [series], bin_width=width)


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """Indices of at most `most` values (at least 4), in order: all that are not None if they are few enough.

    Otherwise the first, the last, and of each of equally long stretches its lowest and its highest value: the curve
    through them covers, at the resolution of these stretches, what the curve through all values does.
    """
    known = [index for index, value in enumerate(values) if value is not None]
    if len(known) <= most:
        return known
    stretches = (most - 2) // 2
    kept = {known[0], known[-1]}
    for number in range(stretches):
        stretch = known[number * len(known) // stretches : (number + 1) * len(known) // stretches]
        kept.add(min(stretch, key=values.__getitem__))  # type: ignore[arg-type]
        kept.add(max(stretch, key=values.__getitem__))  # type: ignore[arg-type]
    return sorted(kept)


def smoothed(values: Sequence[float | None], window: int) -> list[float | None]:
    """The exponential moving average with the weight 2 / (window + 1) for the newest value.

    The average of the first values is not drawn towards zero: it is divided by the sum of its weights. None stays None.
    """
    keep = 1 - 2 / (window + 1)
    total = weight = 0.0
    found: list[float | None] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight)
    return found
