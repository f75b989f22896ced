"""The certificate of engine trl: TRL's trainer trains a small random model of a kind on CPUs, before a large one.

Flex and flash attention compute on GPUs only: the small model has eager attention in their place, with the same masks.
"""

import contextlib
import io
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast, initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.checkpoint.formats.located import locate
from hyperpod_ft.checkpoint.formats.model_directory import of_language_model, read_config
from hyperpod_ft.checkpoint.formats.safetensors_file import has_weights
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.engines.batches import PackedSplit
from hyperpod_ft.engines.certificate.alone import TOLERANCE, Trained, alone, difference, why_not_apart
from hyperpod_ft.engines.certificate.model import LENGTHS, NotBuiltError, documents, rows, save_small
from hyperpod_ft.engines.certificate.result import check_gradients, check_result, inputs
from hyperpod_ft.engines.certificate.small import VOCABULARY
from hyperpod_ft.engines.certificate.task import small_task, write
from hyperpod_ft.engines.peft_config import lora_config
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.engines.trl.loop import train
from hyperpod_ft.engines.trl.padding import check_answers, check_padded
from hyperpod_ft.engines.trl.rows import RowCollator
from hyperpod_ft.engines.trl.saved import check_saved, why_not_sharded
from hyperpod_ft.errors import UserError, printable
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.lora import refuse_unknown, targets
from hyperpod_ft.planning.trl.settings import attention

_REMEDY = "choose a model of another type"
_COMPUTED = ("eager", "sdpa")  # on CPUs
_OTHER = "set trl: {{model_init_kwargs: {{attn_implementation: {}}}}}, or choose a model of another type"


def certify(config: RunConfig, source: Path, teacher: Path | None, scratch: Path) -> Certificate:
    """The certificate of the model in `source`, of which config.json and headers are read; `scratch`: an empty place.

    Adapters, attention and objective are the run's; but for a reward model, the small one is trained on texts, since
    all other objectives take TRL's probabilities of the same tokens. Raises UserError when the model, or the teacher,
    cannot be loaded or trained, or what is trained cannot be consolidated or loaded.
    """
    objective, lora = config.training.objective, config.lora if config.training.method == "lora" else None
    model = _check_class(config, source)
    computed = attention(config) if attention(config) in _COMPUTED else "eager"
    if teacher:
        _check_teacher(teacher, attention(config), computed, scratch / "teacher")
    small, scores = scratch / "model", objective == "reward"
    try:
        save_small(source, small)
        expected = None if scores else alone(small)
    except NotBuiltError as error:
        reason = f"no small model of this type could be tried: {error}"
        return Certificate(reason, reason)
    _save_tokenizer(small)
    not_packed = f"objective {objective} packs none"
    try:
        if objective == "sft":
            assert expected
            losses = partial(_packed_losses, scratch / "packed", "flash" in attention(config))
            not_packed = why_not_apart(
                small, expected, lambda: pretrained.load(small, torch.float32, computed).train(), losses
            )
        else:
            refused = f"training.objective: {objective} is not possible with a model of this type"
            model = _loaded(small, computed, refused).train()
            check_padded(model, "left" if config.training.samples_answers else "right", refused)
            if config.training.samples_answers:
                check_answers(model, refused)
        with contextlib.redirect_stdout(io.StringIO()):  # what training reports of a small model is of no interest
            unreached = _round_trip(config, small, computed, scratch, expected, packed=not not_packed)
    except UserError:
        raise
    except Exception as error:  # transformers' classes raise errors of any type
        reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        raise UserError(f"model.source: TRL cannot train a small model of this type: {reason}", _REMEDY) from error
    if lora:
        return Certificate(not_packed)
    of_files = (model, source) if has_weights(source) else (_built(small, "eager", ""), small)
    return Certificate(not_packed, not_sharded=why_not_sharded(*of_files), unreached=unreached)


def _check_class(config: RunConfig, source: Path) -> PreTrainedModel:
    """The run's own model on the meta device; its class has the files' tensors, and saves them, or LoRA's targets."""
    model_type = str(read_config(source).get("model_type"))
    if config.training.objective == "reward" and model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise UserError(f"model.source: transformers has no reward models of type {printable(model_type)}", _REMEDY)
    model = _built(source, attention(config), "model.source")
    if has_weights(source):
        locate(model, source)
        if config.training.method == "full":
            check_saved(model, source)
    if config.training.method == "lora":
        adapted = nn.Linear | nn.Embedding | Conv1D
        modules = [name for name, module in model.named_modules() if isinstance(module, adapted)]
        refuse_unknown(targets(config.lora, str(of_language_model(read_config(source)).get("model_type"))), modules)
    return model


def _built(directory: Path, implementation: str, key: str) -> PreTrainedModel:
    """The model on the meta device, with the run's attention; one that needs a package is not tried."""
    transformers.utils.logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        loader = pretrained.auto_class(config.to_dict())
        with torch.device("meta"), initialization.meta_device_safe_creation_ops():
            model: PreTrainedModel = loader.from_config(config)
    except Exception as error:  # transformers' classes raise errors of any type
        reason = printable(" ".join(str(error).split()))[:200]
        raise UserError(f"{key}: transformers cannot build it: {reason}", _REMEDY) from error
    has = {"eager": True, "sdpa": model._supports_sdpa, "flex_attention": model._supports_flex_attn}
    # transformers would fetch another one in place of one that the class does not name
    has_flash = model._supports_flash_attn and implementation in (
        model._compatible_flash_implementations or [implementation]
    )
    if not has.get(implementation, has_flash):
        raise UserError(
            f"{key}: transformers has no {implementation} for models of this type",
            _OTHER.format("sdpa" if has["sdpa"] else "eager"),
        )
    return model


def _check_teacher(teacher: Path, implementation: str, computed: str, small: Path) -> None:
    """Raise UserError for a teacher whose small model computes something else with the run's attention, or padded."""
    _built(teacher, implementation, "teacher.source")
    refused = "teacher.source: distillation is not possible with a teacher of this type"
    try:
        save_small(teacher, small)
        check_padded(_loaded(small, computed, refused), "left", refused)
    except UserError:
        raise
    except Exception as error:  # transformers' classes raise errors of any type
        reason = error if isinstance(error, NotBuiltError) else NotBuiltError.of(error)
        raise UserError(f"{refused}: {reason}", _REMEDY) from error


@torch.no_grad()
def _loaded(small: Path, computed: str, refused: str) -> PreTrainedModel:
    """The small model, whose attention makes of texts what eager attention does; otherwise raises UserError."""
    model, eager = (pretrained.load(small, torch.float32, name) for name in (computed, "eager"))
    for ids in documents():
        found, expected = (each(input_ids=ids, use_cache=False).logits for each in (model, eager))
        if (off := difference(found, expected)) > TOLERANCE:
            raise UserError(
                f"{refused}: attention {computed} does not compute what eager attention does, by {off:.0e}",
                _OTHER.format("eager"),
            )
    return model


def _save_tokenizer(directory: Path) -> None:
    """A word for each id of the small model."""
    words = [f"w{number}" for number in range(VOCABULARY)]
    padding, _, end, unknown, *_ = words
    library = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unknown))
    PreTrainedTokenizerFast(
        tokenizer_object=library, unk_token=unknown, pad_token=padding, eos_token=end
    ).save_pretrained(directory)


def _packed_losses(directory: Path, flat: bool, model: PreTrainedModel, first_seed: int) -> torch.Tensor:
    """Of each document of a packed row, as engine trl batches it; or of `flat` ones, each with padding after it."""
    write(directory, [rows(documents(first_seed), packed=not flat)])
    split = PackedSplit(directory)
    batch = RowCollator(split, flat=flat, pad=0)([{"row": row} for row in range(len(split))])
    labels = batch.pop("labels")[0]
    logits = model(**batch, use_cache=False).logits[0]
    losses = nn.functional.cross_entropy(logits[:-1].float(), labels[1:], reduction="none")
    lengths = [split.max_length] * len(split) if flat else LENGTHS
    return torch.stack([part.sum() for part in nn.functional.pad(losses, (1, 0)).split(lengths)])


def _round_trip(
    config: RunConfig, small: Path, computed: str, scratch: Path, expected: Trained | None, *, packed: bool
) -> str:
    """Train the small model, and load the result; gives a trained parameter that gets no gradient, or nothing.

    `expected`: None for a reward model. Raises UserError when TRL's loss is another one, an adapter gets no gradient,
    or what transformers or PEFT load is not what was trained.
    """
    lora = config.lora if config.training.method == "lora" else None
    settings: dict[str, Any] = {"engine": "trl"}
    if computed != "eager":  # which is the default on CPUs
        settings |= {"trl": {"model_init_kwargs": {"attn_implementation": computed}}}
    if not expected:
        settings |= {"training": {"objective": "reward"}, "dataset": {"format": "preference"}}
    task = small_task(small, lora, scratch / "run", packed=packed or not expected, settings=settings)
    if lora:
        _check_adapters(small, lora_config(task.config, read_config(small)))
    watched = _Watched()
    trained = train(task, Ranks(0, 1, 0, dist.HashStore()), watched.look)
    if expected:
        first = json.loads(task.metrics_path.read_text(encoding="utf-8").partition("\n")[0])["loss"]
        wanted = float(expected.losses.sum()) / (sum(LENGTHS) - len(LENGTHS))
        if not abs(first - wanted) <= TOLERANCE * abs(wanted):
            raise UserError(
                f"model.source: TRL does not compute the loss of a small model of this type: {first:.4f} instead of"
                f" {wanted:.4f}",
                _OTHER.format("eager") if computed == "sdpa" else _REMEDY,
            )
    if lora:
        check_gradients(watched.start, watched.trained)
    check_result(small, trained.checkpoint, scratch, *watched.logits, adapters=lora is not None)
    return min(watched.start.keys() - watched.reached, default="")


class _Watched:
    """The small model in training: its logits before and after, and which parameters get a gradient."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.start: dict[str, torch.Tensor] = {}
        self.reached: set[str] = set()

    @torch.no_grad()
    def look(self, model: nn.Module) -> None:
        self.logits.append(model(**inputs(), use_cache=False).logits[0].clone())
        self.trained = model
        if len(self.logits) > 1:
            return
        for name, value in model.named_parameters():
            if value.requires_grad:
                self.start[name] = value.clone()
                value.register_post_accumulate_grad_hook(partial(self._reach, name))

    def _reach(self, name: str, _: torch.Tensor) -> None:
        self.reached.add(name)


def _check_adapters(small: Path, asked: LoraConfig) -> None:
    """Raise UserError for targets that PEFT refuses, or takes for the matrices of all experts."""
    given = {*asked.target_modules} if isinstance(asked.target_modules, list | set) else set[str]()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = get_peft_model(_built(small, "eager", ""), asked).peft_config["default"]
    except ValueError as error:
        reason = printable(" ".join(str(error).split()))[:200]
        names = ", ".join(sorted(name for name in given if f"'{name}'" in str(error)))
        raise UserError(f"lora.target_modules: {reason}", f"set it to modules without {names or 'some'}") from error
    if isinstance(made, LoraConfig) and made.target_parameters:
        names = ", ".join(sorted(given - set(made.target_modules or ())))
        raise UserError(
            f"lora.target_modules: PEFT would adapt all experts with {names}, which engine trl does not train",
            f"set it to modules without {names}",
        )
