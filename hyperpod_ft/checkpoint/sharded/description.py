"""`checkpoint.json`: an engine's description of a checkpoint that it wrote. Written last, read first.

The names in capitals are the remedies of all readers of sharded checkpoints.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats.json_file import read_object, validate
from hyperpod_ft.digests import file_sha256, text_sha256
from hyperpod_ft.errors import UserError

INCOMPLETE = "the checkpoint is incomplete: use an earlier one"
DAMAGED = "the checkpoint is damaged: use an earlier one"
DAMAGED_FILE = "the file is damaged: use an earlier checkpoint"
MIXED = "files of different checkpoints are mixed: use an earlier checkpoint"


NAME = "checkpoint.json"
HELD = "held.json"  # HeldParts, if there are any: megabytes, for a model with thousands of experts
FORMAT: Literal[4] = 4
_REMEDY = "use an earlier checkpoint"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class LoraDescription(_Part):
    """What adapter_config.json needs of the run file's section `lora`."""

    r: int
    alpha: float
    dropout: float
    target_modules: str | tuple[str, ...]  # PEFT's: a string is a regular expression of whole names
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    rslora: bool
    dora: bool
    task: Literal["CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS"] = "CAUSAL_LM"  # PEFT's task_type
    fan_in_fan_out: bool = False  # linear weights are stored as (in, out), as GPT-2's


class BaseModelSource(_Part):
    """The run file's section `model`."""

    source: str
    revision: str | None


class RankDegrees(_Part):
    """The number of ranks in total and along each axis."""

    world_size: int
    data_parallel: int
    pipeline_parallel: int
    context_parallel: int = 1
    expert_parallel: int = 1
    tensor_parallel: int


class HeldPart(_Part):
    """A box of a checkpoint's tensor that is one of the model files' too: an expert, of a tensor of all experts."""

    tensor: str  # the checkpoint's
    start: tuple[int, ...]  # in the checkpoint's tensor, as is the shape
    shape: tuple[int, ...]
    axes: tuple[int, ...]  # for each axis of the files' tensor, the checkpoint's
    at: tuple[int, ...]  # where the box begins in the files' tensor


HeldParts = Mapping[str, tuple[HeldPart, ...]]
"""What each tensor of the base model's files consists of that transformers arranges otherwise, by its name there.

Nothing, for one that training leaves as it is.
"""


class _Held(_Part):
    tensors: dict[str, tuple[HeldPart, ...]]


class Description(_Part):
    """`fingerprint`: of the run's stage `train`. `files`: sizes in bytes; `sha256`: hex digests of the same files.

    `lora` is None with method `full`. `progress` belongs to the engine: the counters that a restart continues from.
    """

    format: Literal[4] = FORMAT
    engine: str
    step: int
    fingerprint: str
    method: Literal["lora", "full"]
    base_model: BaseModelSource
    lora: LoraDescription | None
    degrees: RankDegrees
    progress: dict[str, Any]
    files: dict[str, int]
    sha256: dict[str, str]

    @model_validator(mode="after")
    def _consistent(self) -> "Description":
        if (self.lora is None) != (self.method == "full"):
            raise ValueError(f"lora does not fit method {self.method}")
        if self.files.keys() != self.sha256.keys():
            raise ValueError("files and sha256 name different files")
        return self

    @property
    def digest(self) -> str:
        """A hex digest of all files, by their names and digests."""
        return text_sha256(json.dumps(self.sha256, sort_keys=True))


def read(directory: Path) -> Description:
    """Raises UserError when the file is missing, damaged, or of another format."""
    file = directory / NAME
    values = read_object(file, _REMEDY)
    if values.get("format") != FORMAT:
        raise UserError(f"{file}: its format is {values.get('format')}, this version reads {FORMAT}", _REMEDY)
    return validate(file, values, Description, _REMEDY)


def digests(directory: Path) -> dict[Path, str]:
    """The SHA-256 of a checkpoint's files, as recorded in its description. Raises as `read` does."""
    return {directory / name: digest for name, digest in read(directory).sha256.items()}


def write(directory: Path, description: Description) -> None:
    publish.write_json(directory / NAME, description.model_dump(mode="json"))


def read_held(directory: Path) -> HeldParts:
    """Raises UserError when the file is missing or damaged."""
    return validate(directory / HELD, read_object(directory / HELD, _REMEDY), _Held, _REMEDY).tensors


def write_held(directory: Path, held: HeldParts) -> None:
    publish.write_text(directory / HELD, _Held(tensors=dict(held)).model_dump_json())


def why_damaged(directory: Path, sha256: Mapping[str, str]) -> str:
    """Why files of a checkpoint are damaged, by their hex digests; empty when they are intact. Reads all of them."""
    with ThreadPoolExecutor() as pool:
        reading = {name: pool.submit(file_sha256, directory / name) for name in sorted(sha256)}
    for name, digest in reading.items():
        try:
            if digest.result() != sha256[name]:
                return f"{name} is damaged: its digest differs from the recorded one"
        except OSError as error:  # a failing disk
            return f"{name} is damaged: {error.strerror}"
    return ""
