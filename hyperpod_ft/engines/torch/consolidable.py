"""Whether a model can be loaded, adapted and consolidated, by its headers and the module tree: before anything runs.

    python -m hyperpod_ft.engines.torch.consolidable MODEL_DIR [LORA | targets]

LORA: section `lora` of the run file as JSON; without it, all parameters are trained. Takes no memory for weights. Where
only config.json is there yet, names of files are not compared. Exit status 2, with the error on stdout, when not.
`targets`: print what `lora.target_modules` must be, as JSON; `null` when it may be left out, or nothing is known.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hyperpod_ft.checkpoint.formats.located import locate, names_in_checkpoints
from hyperpod_ft.checkpoint.formats.model_directory import quantization, read_config, without_predictors
from hyperpod_ft.checkpoint.formats.safetensors_file import has_weights, read_model
from hyperpod_ft.checkpoint.sharded.description import LoraDescription
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.checkpoint_directory import check_consolidable
from hyperpod_ft.engines.torch.build import adapted, trained_shapes, whole_model
from hyperpod_ft.engines.torch.loading.held import check_experts, held_parts
from hyperpod_ft.errors import EXIT_USER_ERROR, UserError


def check(directory: Path, lora: Lora | None) -> LoraDescription | None:
    """The adapters that training gives the model.

    Raises UserError when it cannot be trained, or what is trained cannot be consolidated.
    """
    model = whole_model(directory, torch.float32)
    located = locate(model, directory) if _has_weights(directory) else {}
    stored = _stored(directory) if located else {}
    joined = next((tensor.name for tensor in located.values() if tensor.name not in stored), None)
    targets = ", ".join(_targets(model, located, stored))
    try:
        described = adapted(model, lora, 0, directory) if lora else None
        if located and described:
            check_experts(located, directory, described.target_parameters)
        if located:
            held = {} if lora else held_parts(model, located, directory)
            names = names_in_checkpoints(model, located, directory)
            check_consolidable(trained_shapes(model, names), described, directory, held)
        return described
    except UserError as error:
        if lora is None or joined is None or not targets or error.problem.startswith("lora."):
            raise
        raise UserError(
            f"model.source: transformers keeps several tensors of this model's files in one, {joined}, which LoRA"
            " cannot adapt",
            f"set lora.target_modules to the other layers, [{targets}], or training.method to full",
        ) from error


def needed_targets(directory: Path) -> list[str] | None:
    """What `lora.target_modules` must be; None when it may be left out, or there is nothing that it could be."""
    try:
        check(directory, Lora())
    except UserError:
        model = whole_model(directory, torch.float32)
        if _has_weights(directory):
            return _targets(model, locate(model, directory), _stored(directory)) or None
    return None


def _has_weights(directory: Path) -> bool:
    """Whether there are files whose tensors are those that will be trained."""
    return has_weights(directory) and not quantization(read_config(directory))


def _stored(directory: Path) -> dict[str, LogicalTensor]:
    """The tensors in the files of which the module tree may have some."""
    return without_predictors(read_config(directory), {tensor.name: tensor for tensor in read_model(directory)})


def _targets(
    model: PreTrainedModel, located: Mapping[str, LogicalTensor], stored: Mapping[str, LogicalTensor]
) -> list[str]:
    """Last names of the linear modules whose matrices, all of that name, files and module tree both have.

    The output layer is not one of them. `located`, `stored`: the files' tensors by their names in the model and there.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weights = [
        located[f"{name}.weight"].name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output and f"{name}.weight" in located
    ]
    others = {name for name, tensor in stored.items() if len(tensor.shape) == 2}.difference(weights)
    own, elsewhere = (
        dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in names if name in stored)
        for names in (weights, others)
    )
    return [name for name in own if name not in elsewhere]


def main() -> int:
    """The exit status."""
    directory, *lora = sys.argv[1:]
    try:
        if lora == ["targets"]:
            print(json.dumps(needed_targets(Path(directory))))
        else:
            check(Path(directory), Lora.model_validate_json(lora[0]) if lora else None)
    except UserError as error:
        print(error)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
