"""A language model with a score in place of its output layer, to be trained as a reward model.

transformers loads it with AutoModelForSequenceClassification: the score of a text is that of its last token that does
not pad it. Scores begin at 0, so that no text is preferred before the training.
"""

from pathlib import Path
from typing import Any

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import added_tokens, model_directory
from hyperpod_ft.checkpoint.formats.json_file import read_object
from hyperpod_ft.checkpoint.formats.model_directory import CLASSIFIER, CONFIG, OUTPUT, SCORE
from hyperpod_ft.checkpoint.formats.safetensors_file import INDEX, read_metadata, read_model
from hyperpod_ft.checkpoint.formats.safetensors_writer import Outgoing, copied, write_files
from hyperpod_ft.checkpoint.tensors.elements import Stored
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress

_SCORED = ".scored"
_CAUSAL = "ForCausalLM"
# Of transformers' classes, where their beginnings differ.
_NAMES = {"gemma3_text": "Gemma3Text", "qwen3_5_text": "Qwen3_5Text"}
_REMEDY = "choose another model for objective reward"


def scored_bytes(directory: Path) -> int:
    """What `add_score` writes beside the files that are there. Raises UserError as it does."""
    _scored_config(directory)
    return sum(tensor.nbytes for tensor in _last_file(directory))


def add_score(directory: Path) -> str:
    """Give the model in `directory` a score; what was done, in words.

    One file of weights is written again, and not in place: it may be a link. Raises UserError for a model of another
    kind, and one whose tokenizer names no token that pads a text or ends it.
    """
    config, tensors = _scored_config(directory), _last_file(directory)
    file = tensors[0].pieces[0].file
    kept = [tensor for tensor in tensors if tensor.name != OUTPUT]
    # the norm before it has the dtype and the width of what is scored
    norm = next((tensor for tensor in read_model(directory) if tensor.name.endswith("model.norm.weight")), None)
    if norm is None:
        raise UserError("model.source: none of its tensors is called model.norm.weight", _REMEDY)
    score = Outgoing(SCORE, norm.dtype, (1, *norm.shape), _zeros)
    outgoing = [*map(copied, kept), score]
    nbytes = sum(tensor.nbytes for tensor in outgoing)
    with publish.new_directory(directory / _SCORED) as target, ByteProgress("score", nbytes) as progress:
        write_files(target, {file.name: outgoing}, progress, read_metadata(file))
    (directory / _SCORED / file.name).replace(file)
    publish.remove(directory / _SCORED)
    index = directory / INDEX
    if index.is_file():
        values = read_object(index, "download the model again")
        placed = {name: held for name, held in values["weight_map"].items() if name != OUTPUT}
        publish.write_json(index, {"metadata": {}, "weight_map": placed | {SCORE: file.name}})
    publish.write_json(directory / CONFIG, config)
    return "output layer replaced by a score"


def _zeros(begin: int, end: int, out: Stored) -> None:
    out[:] = 0


def _last_file(directory: Path) -> list[LogicalTensor]:
    """The tensors of the file with the output layer; where that is the embedding, of the last one."""
    tensors = read_model(directory)
    file = next((tensor for tensor in tensors if tensor.name == OUTPUT), tensors[-1]).pieces[0].file
    return [tensor for tensor in tensors if tensor.pieces[0].file == file]


def _scored_config(directory: Path) -> dict[str, Any]:
    config = model_directory.read_config(directory)
    given = str((config.get("architectures") or ["model without architectures"])[0])
    if not given.endswith(_CAUSAL):
        raise UserError(f"model.source: config.json is of a {given}", _REMEDY)
    return {
        **config,
        "architectures": [_NAMES.get(str(config.get("model_type")), given.removesuffix(_CAUSAL)) + CLASSIFIER],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": _pad_id(directory),
    }


def _pad_id(directory: Path) -> int:
    """The token that pads texts, or else the one that ends them, as TRL takes it from the tokenizer."""
    settings = directory / model_directory.TOKENIZER_CONFIG
    if settings.is_file() and (directory / added_tokens.FILE).is_file():
        values = read_object(settings, "download the model again")
        named = [values.get(key) for key in ("pad_token", "eos_token")]
        token = next((one["content"] if isinstance(one, dict) else one for one in named if one), "")
        if token in (known := added_tokens.numbered(directory, (), (str(token),)).known):
            return known[token]
    raise UserError("model.source: its tokenizer's files name no token that pads or ends a text", _REMEDY)
