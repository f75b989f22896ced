"""LoRA: which modules of a model get adapters, and the ranks of adapters that vLLM accepts.

The modules are those that the run file names, or its family's.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hyperpod_ft.checkpoint.adapters.lora_config import ends_with, in_image_tower, in_language_model
from hyperpod_ft.checkpoint.formats.model_directory import EMBEDDINGS, is_image_text, of_language_model
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.sagemaker import MAX_LORA_RANK
from hyperpod_ft.config.sections.training import Lora, last_parts
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import IMAGE_TOWERS, default_targets
from hyperpod_ft.planning.model_shape import Linear, ModelShape

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_LORA_RANK)  # of --max-lora-rank


def targets(lora: Lora, model_type: str) -> tuple[str, ...]:
    """The ends of the names of the modules that LoRA adapts. `model_type`: config.json's."""
    return default_targets(model_type) if lora.target_modules is None else lora.target_modules


def target_modules(
    lora: Lora, model_config: Mapping[str, Any], names: Sequence[str] | None = None
) -> str | tuple[str, ...]:
    """PEFT's `target_modules` for a model with this config.json: a pattern for those that read images.

    `names`: those of the language model, where they depend on more than its type.
    """
    language = of_language_model(model_config)
    wanted = targets(lora, str(language.get("model_type", ""))) if names is None else tuple(names)
    if not wanted or not is_image_text(model_config):
        return wanted
    found = in_language_model(wanted)
    tower = IMAGE_TOWERS[str(model_config.get("model_type"))] if lora.image_tower else ()
    return f"(?:{found})|(?:{in_image_tower(tower)})" if tower else found


def target_names(lora: Lora, model_type: str) -> frozenset[str]:
    """The last components of the targets' names."""
    return last_parts(targets(lora, model_type))


def adapted_linears(lora: Lora, shape: ModelShape) -> list[Linear]:
    """The linear modules of a layer that have adapters."""
    names = target_names(lora, shape.model_type)
    return [linear for linear in shape.linears if linear.name in names]


def check_targets(config: RunConfig, shape: ModelShape) -> None:
    """Raise UserError for a target that the model does not have."""
    if config.training.method == "lora":
        refuse_unknown(targets(config.lora, shape.model_type), shape.modules)
        refuse_unknown_parameters(config.lora.target_parameters, ())
        whole_modules(config.lora.modules_to_save, (shape.family.embedding, shape.family.head), tied=shape.tied)


def check_new_tokens(config: RunConfig) -> None:
    """Raise UserError where LoRA would not train the rows of new tokens: they begin equal and would stay so."""
    if not config.model.added_tokens or config.training.method != "lora":
        return
    whole = last_parts(config.lora.modules_to_save)
    trained = whole | config.lora.given_names
    # `modules_to_save` names no others than these two, whatever they are called
    if len(whole) < 2 and not ("lm_head" in trained and trained.intersection(EMBEDDINGS)):
        raise UserError(
            "model.new_tokens: LoRA trains their rows only with the embedding and the output layer",
            "add lora.modules_to_save: [embed_tokens, lm_head], or, where the two are one matrix, both names to"
            " lora.target_modules"
            if config.dataset.max_target_length is None
            else "set training.method to full",
        )


def refuse_unknown(wanted: Iterable[str], modules: Iterable[str]) -> None:
    """`modules`: paths of those that can have adapters. Raises UserError, which lists the last parts of their names."""
    paths = list(modules)
    for target in wanted:
        if not any(ends_with(path, target) for path in paths):
            raise UserError(
                f"lora.target_modules: {target!r} matches no module of the model",
                f"set it to some of those that it has: {', '.join(sorted(last_parts(paths)))}",
            )


def whole_modules(wanted: Iterable[str], ends: Iterable[str], *, tied: bool) -> tuple[str, ...]:
    """The modules that `lora.modules_to_save` names, of the embedding and the output layer, whose paths are `ends`.

    Raises UserError for others, and where the two are `tied`: PEFT would train each of them apart.
    """
    paths, found = list(ends), list[str]()
    for name in wanted:
        if tied:
            raise UserError(
                "lora.modules_to_save: the model's embedding and output layer are one matrix, which PEFT would train"
                " apart",
                "leave it out, and name both in lora.target_modules or set training.method to full",
            )
        # PEFT would take any end of a path, "s" too, which other modules also have
        of_name = [path for path in paths if ends_with(path, name)]
        if not of_name:
            raise UserError(
                f"lora.modules_to_save: {name!r} is neither the embedding nor the output layer",
                f"set it to some of: {', '.join(sorted(last_parts(paths)))}",
            )
        found += of_name
    return tuple(dict.fromkeys(found))


def refuse_unknown_parameters(wanted: Iterable[str], parameters: Iterable[str]) -> None:
    """`parameters`: paths of those that hold a matrix for each expert. Raises UserError, which lists their names."""
    paths = list(parameters)
    known = ", ".join(sorted({".".join(path.rsplit(".", 3)[1:]) for path in paths}))
    for target in wanted:
        if not any(ends_with(path, target) for path in paths):
            raise UserError(
                f"lora.target_parameters: {target!r} matches no parameter that holds a matrix for each expert",
                f"set it to some of those that the model has: {known}" if known else "leave it out: the model has none",
            )


def max_lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank for adapters of a rank, which is at most MAX_LORA_RANK."""
    return next(accepted for accepted in _LORA_RANKS if accepted >= rank)
