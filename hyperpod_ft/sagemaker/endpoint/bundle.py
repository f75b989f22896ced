"""Which files of a run an endpoint is given, and what they are: read from the run's directory, never written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters import lora_config
from hyperpod_ft.checkpoint.formats.model_directory import (
    BESIDE_WEIGHTS,
    TOKENIZER,
    has_chat_template,
    is_encoder_decoder,
    of_language_model,
    read_config,
)
from hyperpod_ft.config.sections.sagemaker import Deploy
from hyperpod_ft.data.text import answer_format
from hyperpod_ft.data.text.answer_format import AnswerFormat
from hyperpod_ft.digests import text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import snapshot
from hyperpod_ft.planning.model_shape import attention_heads, model_shape
from hyperpod_ft.runs.records import Record
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.endpoint.fit import ServedModel
from hyperpod_ft.sagemaker.section import store_of, store_url
from hyperpod_ft.sagemaker.store.sync import is_here

ADAPTER_DIRECTORY = "adapters/tuned"  # in a bundle with the base model
CODE = "hyperpod_ft.zip"  # in a bundle for container `kit`
_SAFETENSORS = ".safetensors"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_MODEL_CONFIG = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class BundleFiles:
    """Files below one directory, and where they go in the bundle: "" is its top."""

    root: Path
    files: tuple[Path, ...]
    prefix: str = ""


@dataclass(frozen=True)
class Bundle:
    """`version` names the content: fingerprint and record of the stage that made it, since a run's store has the newest
    model at the same place. `dtype` is vLLM's --dtype. `lora_rank`: if the base model is served with the adapter.

    `stored`: the S3 prefix of a model that is in the run's store and not here; then there are no parts to upload.
    `code`: the kit's own is beside the model, as `CODE`.
    """

    parts: tuple[BundleFiles, ...]
    nbytes: int
    version: str
    served: ServedModel
    dtype: str
    chat: bool  # has a chat template
    answers: AnswerFormat
    lora_rank: int | None = None
    stored: str | None = None
    code: bool = False


def small_files_in_store(run: Run) -> list[str]:
    """The outputs, relative to `cluster.root`, that deciding needs of a model that only the run's store has."""
    record = run.journal.record(run.plan.model_stage)
    if record is None or store_of(run.config) is None:
        return []
    wanted = [output.path for output in record.outputs if not output.path.endswith(".safetensors")]
    wanted.append(run.paths.relative(run.paths.samples_path))
    return [path for path in wanted if not (run.paths.root / path).exists()]


def bundle_of(run: Run, settings: Deploy) -> Bundle:
    """The files for an endpoint. Raises UserError if they are missing."""
    run.journal.require_done(run.plan.model_stage, "no tuned model yet")
    config = read_config(run.paths.tuned_model)
    record = run.journal.record(run.plan.model_stage)
    assert record is not None, "a stage that is done has one"
    weights = [output for output in record.outputs if output.path.endswith(_SAFETENSORS)]
    here = all(is_here(run.paths, record, output) for output in weights)
    adapter, kit = settings.model == "adapter", settings.container_kind == "kit"
    if adapter and not here:
        raise UserError("deploy.model: base model and adapter are in the run's store only", "set it to merged")
    parts: tuple[BundleFiles, ...] = ()
    if here:
        parts = _with_adapter(run) if adapter else (_part(run.paths.tuned_model, (*BESIDE_WEIGHTS, *_WEIGHTS)),)
    files = [(file.name, file.stat().st_size) for part in parts for file in part.files]
    sizes = files or [(output.path, output.size) for output in record.outputs]
    kind = "adapter-" if adapter else f"kit-{snapshot.digest()[:6]}-" if kit else ""
    return Bundle(
        parts=parts,
        nbytes=sum(size for _, size in sizes),
        version=f"{kind}{_version(record)}",
        served=_served(config, sum(size for name, size in sizes if name.endswith(_SAFETENSORS)), kit=kit),
        dtype=_dtype(config),
        chat=has_chat_template(run.paths.tuned_model),
        answers=answer_format.of_model(run.paths.tuned_model),
        lora_rank=run.config.lora.r if adapter else None,
        stored=None if here else store_url(run, run.paths.tuned_model),
        code=kit,
    )


def _version(record: Record) -> str:
    """The model's version: it differs for a model that was made again (`submit --force`) with the same fingerprint."""
    made = [record.started, *([output.path, output.size] for output in record.outputs)]
    return f"{record.fingerprint[:12]}-{text_sha256(json.dumps(made))[:6]}"


def _with_adapter(run: Run) -> tuple[BundleFiles, ...]:
    """The base model with the tuned model's tokenizer and chat template, and the adapter."""
    if not (run.paths.adapter / lora_config.CONFIG).is_file():
        raise UserError(
            f"{run.paths.adapter}: the adapter no longer exists", "set deploy.model to merged, or run consolidate again"
        )
    if lora_config.read_config(run.paths.adapter / lora_config.CONFIG).target_parameters:
        raise UserError(
            f"{run.paths.adapter}: vLLM is not known to serve adapters with target_parameters",
            "set deploy.model to merged",
        )
    return (
        _part(run.paths.base_model, (*_MODEL_CONFIG, *_WEIGHTS)),
        _part(run.paths.tuned_model, TOKENIZER),
        _part(run.paths.adapter, ("adapter_config.json", "adapter_model.safetensors"), ADAPTER_DIRECTORY),
    )


def _part(root: Path, patterns: tuple[str, ...], prefix: str = "") -> BundleFiles:
    files = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
    return BundleFiles(root, tuple(sorted(files)), prefix)


def _served(config: Mapping[str, Any], weights: int, *, kit: bool = False) -> ServedModel:
    """`kit`: its server keeps the dtype, and uses one device."""
    shape, language = model_shape(config), of_language_model(config)
    heads = shape.heads if shape else attention_heads(language) or 1
    # T5's n_positions limits nothing: its positions are relative
    positions = (
        None if is_encoder_decoder(config) else language.get("max_position_embeddings", language.get("n_positions"))
    )
    return ServedModel(
        weight_bytes=weights // 2 if _stored_dtype(config) == "float32" and not kit else weights,
        shape=shape,
        heads=1 if kit else heads,
        positions=positions,
        model_type=str(config.get("model_type", "")),
    )


def _dtype(config: Mapping[str, Any]) -> str:
    """fp32 weights are served in bf16: vLLM's `auto` would convert them to fp16, which has a smaller range."""
    return "bfloat16" if _stored_dtype(config) == "float32" else "auto"


def _stored_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
