"""What makes a training run fit its instances, by estimates: degrees, batch and activation checkpointing.

On GPUs, engine torch gets the layout with the highest estimated tokens per second (planning/automatic). Other engines,
and Trainium, get the usual tensor parallelism and the shortest pipeline that fits. On CPUs nothing is estimated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.config import engine_choice, run_file
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.automatic.choice import propose, timed_shape
from hyperpod_ft.planning.layout import Degrees
from hyperpod_ft.planning.memory import GIB, Memory, available
from hyperpod_ft.planning.model_fit import check_memory, check_trainable
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.planning.trl.settings import least_rows

TOKENS_PER_STEP = 1 << 16  # usual for fine-tuning: 32 rows of 2,048 tokens
_MICRO_BATCHES = (8, 4, 2, 1)
_CHECKPOINTING = ("none", "selective", "full")
_PIPELINES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class _Layout:
    """A run file that fits."""

    config: RunConfig
    degrees: Degrees
    memory: Memory | None  # on the fullest rank; None on CPUs
    tokens_per_second: float  # estimated; 0 where it is not


def fit(draft: Draft, model_config: Mapping[str, Any] | None, *, keep_batch: bool = False) -> None:
    """Set what makes the draft fit its instances. Without config.json (None), nothing is estimated.

    With `keep_batch`, the rows of a step are those of the draft; micro batches become smaller only if they must.

    Raises UserError when the engine cannot train the model, or nothing fits.
    """
    config = _config(draft, {})
    if not config.instance.has_accelerators:
        draft.default("parallelism.ranks_per_node", 1, "processes of a node; each trains on its own rows")
        draft.default("training.micro_batch_size", 1)
    elif model_config is None:
        draft.default("training.activation_checkpointing", "full", "the safe choice: the model was not looked at")
    if model_config is None or not config.instance.has_accelerators:
        draft.default("training.gradient_accumulation_steps", 1)
        return
    layouts = list(_layouts(draft, model_config, keep_batch))
    _set_layout(draft, max(layouts, key=lambda layout: layout.tokens_per_second), keep_batch)


def _layouts(draft: Draft, model_config: Mapping[str, Any], keep_batch: bool) -> Iterator[_Layout]:
    """Run files that fit, of each kind of activation checkpointing; with `keep_batch` the first alone.

    Raises UserError when there is none.
    """
    error: UserError | None = None
    found = False
    for checkpointing in _CHECKPOINTING[
        _CHECKPOINTING.index(draft.get("training.activation_checkpointing") or "none") :
    ]:
        for micro, accumulated in _batches(draft, keep_batch):
            change = {
                "training.activation_checkpointing": checkpointing,
                "training.micro_batch_size": micro,
                "training.gradient_accumulation_steps": accumulated,
            }
            try:
                layout = _layout(_config(draft, change), model_config, keep_batch)
            except UserError as refused:
                error = refused
                continue
            yield layout
            found = True
            if keep_batch:
                return
            break  # smaller micro batches are slower
    if not found and error:
        raise error


def _batches(draft: Draft, keep_batch: bool) -> Iterator[tuple[int, int]]:
    """Micro batch sizes, the largest first, each with gradient accumulation steps."""
    config = _config(draft, {})
    least = least_rows(config.training.objective, config.trl)
    if not keep_batch:
        ranks = config.cluster.nodes * (config.instance.ranks or 1)
        # Trainium's graphs are compiled for one row, as in AWS's examples
        for micro in (1,) if config.instance.is_neuron else _MICRO_BATCHES:
            if micro >= least:
                yield micro, max(1, _usual_rows(config) // (micro * ranks))
        return
    micro, accumulated = draft.get("training.micro_batch_size"), draft.get("training.gradient_accumulation_steps")
    while True:
        yield micro, accumulated
        if micro % 2 or micro // 2 < least:
            return
        micro, accumulated = micro // 2, accumulated * 2


def _layout(config: RunConfig, model_config: Mapping[str, Any], keep_batch: bool) -> _Layout:
    """Raises UserError when this micro batch does not fit with any degrees, or a step would have too many rows."""
    shape = timed_shape(model_config)
    speed = 0.0
    if shape is not None and config.engine == "torch" and not config.instance.is_neuron:
        automatic = config.parallelism.model_copy(update={"degrees": "auto", "tensor_parallel": None})
        chosen = propose(config.model_copy(update={"parallelism": automatic}), model_config).chosen
        config, degrees, speed = chosen.config, chosen.degrees, chosen.tokens_per_second
    else:
        config, degrees, shape = _least_divided(config, model_config)
    if not keep_batch:
        config = _with_usual_rows(config, degrees)
    return _Layout(config, degrees, check_memory(config, degrees, shape) if shape else None, speed)


def _with_usual_rows(config: RunConfig, degrees: Degrees) -> RunConfig:
    """The config with gradient accumulation that gives a step about TOKENS_PER_STEP."""
    rows, at_once = _usual_rows(config), config.training.micro_batch_size * degrees.data_parallel
    if at_once > rows and config.training.micro_batch_size > 1:
        raise UserError("training.micro_batch_size: too many rows in a step", "make it smaller")
    accumulated = max(degrees.pipeline_parallel if config.engine == "torch" else 1, round(rows / at_once))
    training = config.training.model_copy(update={"gradient_accumulation_steps": accumulated})
    return config.model_copy(update={"training": training})


def _usual_rows(config: RunConfig) -> int:
    return max(1, TOKENS_PER_STEP // config.dataset.row_tokens)


def _least_divided(config: RunConfig, model_config: Mapping[str, Any]) -> tuple[RunConfig, Degrees, ModelShape | None]:
    """With the default tensor parallelism, and the shortest pipeline that fits. Raises UserError without one."""
    first_error: UserError | None = None
    for stages in _PIPELINES:
        parallelism = config.parallelism.model_copy(update={"pipeline_parallel": stages})
        candidate = config.model_copy(update={"parallelism": parallelism})
        try:
            degrees = degrees_of(candidate)
            shape = check_trainable(candidate, degrees, model_config)
            if shape is not None:
                check_memory(candidate, degrees, shape)
            return candidate, degrees, shape
        except UserError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _set_layout(draft: Draft, layout: _Layout, keep_batch: bool) -> None:
    training, degrees, config = layout.config.training, layout.degrees, layout.config
    estimated = ""
    if layout.memory:
        estimated = f"{layout.memory.total / GIB:.1f} of {available(config) / GIB:.1f} GiB of each rank (estimated)"
    draft.set("parallelism.tensor_parallel", degrees.tensor_parallel, "ranks that share each layer's matrices")
    for key, meaning in (("pipeline_parallel", "share the layers"), ("context_parallel", "share each row's tokens")):
        if (degree := getattr(degrees, key)) > 1:
            draft.set(f"parallelism.{key}", degree, f"ranks that {meaning}")
    if estimated:
        draft.notes["parallelism.tensor_parallel"] += f"; a step takes {estimated}"
    micro, accumulated = training.micro_batch_size, training.gradient_accumulation_steps
    rows = micro * accumulated * degrees.data_parallel
    smaller = keep_batch and micro != draft.get("training.micro_batch_size")
    draft.set("training.micro_batch_size", micro, "halved until it fits" if smaller else "")
    draft.set(
        "training.gradient_accumulation_steps",
        accumulated,
        f"x {micro} x {degrees.data_parallel} data-parallel ranks = {rows} rows per step",
    )
    given = draft.get("training.activation_checkpointing")
    if training.activation_checkpointing != (given or "none"):
        note = "recomputes what does not fit" if training.activation_checkpointing == "full" else "takes less memory"
        draft.set("training.activation_checkpointing", training.activation_checkpointing, note)


def _config(draft: Draft, change: Mapping[str, Any]) -> RunConfig:
    """The draft's config after a change, with its engine. Raises ConfigError."""
    changed = Draft({key: dict(value) if isinstance(value, dict) else value for key, value in draft.values.items()})
    for key, value in change.items():
        changed.set(key, value)
    return engine_choice.with_engine(run_file.validate(changed.values, "run file"))
