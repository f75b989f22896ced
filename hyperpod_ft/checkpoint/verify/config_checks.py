"""Checks a configuration against its tensors' names and shapes: one line per fault.

On a mismatch, transformers and PEFT may raise an error, or only warn and use random weights.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters import experts, lora_config
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.tensors.logical_tensor import DTYPE_OF_TORCH_NAME, FLOATING, LogicalTensor
from hyperpod_ft.checkpoint.tensors.reading import same_values

Tensors = Mapping[str, LogicalTensor]

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?P<rest>\.weight)?")


def model_faults(directory: Path, tensors: Tensors) -> Iterator[str]:
    """The faults of a Hugging Face model; of an image-text model, its language model's.

    Raises UserError when config.json cannot be read.
    """
    config = model_directory.read_config(directory)
    described = model_directory.of_language_model(config)
    where = directory / model_directory.CONFIG
    embedding, output = model_directory.embedding(tensors), model_directory.OUTPUT
    wanted: tuple[Any, Any] = (described.get("vocab_size"), described.get("hidden_size"))
    for name in (embedding, output):
        if name and name in tensors and None not in wanted and (found := tensors[name].shape) != wanted:
            # mllama and molmo2 have rows for images' tokens there
            if described is not config and name == embedding and found[1:] == wanted[1:] and found[0] > wanted[0]:
                continue
            yield f"{where}: vocab_size and hidden_size are {list(wanted)}, {name} is {list(found)}"
    stated = config.get("tie_word_embeddings")  # its default depends on the architecture
    if stated and model_directory.is_encoder_decoder(config):
        stated = model_directory.is_tied(config, tensors)
    if embedding and stated is False and _is_causal(config) and not _has_output(tensors, embedding):
        yield f"{where}: tie_word_embeddings is false, but there is no {output}"
    if embedding and output in tensors and stated and not _equal(tensors[embedding], tensors[output]):
        yield f"{where}: tie_word_embeddings is true, but {output} differs from {embedding}, which replaces it"
    yield from _dtype_faults(config, where, tensors)
    count = described.get("num_hidden_layers")
    layers = {layer for name in tensors if (layer := model_directory.layer_of(name)) is not None}
    # extra layers are valid: some models use them to predict several tokens
    if layers and type(count) is int and (present := sum(layer < count for layer in layers)) < count:
        yield f"{where}: num_hidden_layers is {count}, but only {present} layers have weights"


def _has_output(tensors: Tensors, embedding: str) -> bool:
    """Whether there is lm_head or, as GPT-NeoX's embed_out, another matrix outside the layers with a row a token."""
    if model_directory.OUTPUT in tensors:
        return True
    rows = tensors[embedding].shape[:1]
    others = (name for name, tensor in tensors.items() if len(tensor.shape) == 2 and tensor.shape[:1] == rows)
    return any(name != embedding and model_directory.layer_of(name) is None for name in others)


def _is_causal(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)


def _equal(left: LogicalTensor, right: LogicalTensor) -> bool:
    return left.dtype == right.dtype and same_values(left, right)


def _dtype_faults(config: Mapping[str, Any], where: Path, tensors: Tensors) -> Iterator[str]:
    # an image-text model states it at the top, or only of its parts
    given = (config, model_directory.of_language_model(config))
    stated = next((one[key] for one in given for key in ("dtype", "torch_dtype") if one.get(key)), None)
    held = sorted({tensor.dtype for tensor in tensors.values()} & FLOATING)
    # norms and gates often have a wider dtype than the rest; quantized weights have their own dtypes
    wanted = None if "quantization_config" in config else DTYPE_OF_TORCH_NAME.get(str(stated))
    if wanted and held and wanted not in held:
        yield f"{where}: dtype is {stated}, the tensors are {', '.join(held)}"


def adapter_faults(directory: Path, tensors: Tensors) -> Iterator[str]:
    """The faults of a PEFT adapter: LoRA factors without a partner or of the wrong rank. Raises as `model_faults`."""
    where = directory / lora_config.CONFIG
    values = read_object(where, "save the adapter again")
    if values.get("peft_type") != "LORA":
        return  # for other adapter types, only the files are checked
    config = lora_config.parse_config(where, values)
    for name, tensor in tensors.items():
        if factor := _FACTOR.fullmatch(name):
            other = "B" if factor["side"] == "A" else "A"
            partner = f"{factor['module']}.lora_{factor['kind'] or ''}{other}{factor['rest'] or ''}"
            if partner not in tensors:
                yield f"{directory / lora_config.WEIGHTS}: {name} has no lora_{other}"
            module, depth = experts.module_of(factor["module"])
            parameters = experts.parameters_of(module.removeprefix(lora_config.PREFIX), config.target_parameters)
            joined = depth < len(parameters)  # of all experts: each has the rank
            rank = config.rank(f"{module}.{parameters[-1 - depth]}" if joined else module)
            found = tensor.shape["AB".index(factor["side"]) :][:1]
            if not found or (found[0] % rank if joined else found != (rank,)):
                yield f"{where}: the rank is {rank}, but {name} is {list(tensor.shape)}"
