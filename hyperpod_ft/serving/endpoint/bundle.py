"""Which files of a run an endpoint is given, and what they are: read from the run's directory, never written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.checkpoint.adapters.lora_config import CONFIG as ADAPTER_CONFIG
from hyperpod_ft.checkpoint.formats.model_directory import BESIDE_WEIGHTS, TOKENIZER, is_encoder_decoder, read_config
from hyperpod_ft.config.deploy import Deploy
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.model_shape import model_shape
from hyperpod_ft.runs.run import Run
from hyperpod_ft.serving.endpoint.endpoint_request import ADAPTER_DIRECTORY, longest_lora_rank
from hyperpod_ft.serving.endpoint.fit import Served

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_MODEL_CONFIG = ("config.json", "generation_config.json")
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Part:
    """Files below one directory, and where they go in the bundle: "" is its top."""

    root: Path
    files: tuple[Path, ...]
    prefix: str = ""


@dataclass(frozen=True)
class Bundle:
    """`version` names the content: fingerprints of the stages that made it. `dtype` is vLLM's --dtype."""

    parts: tuple[Part, ...]
    version: str
    served: Served
    dtype: str
    chat: bool  # has a chat template
    lora_rank: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for part in self.parts for file in part.files)


def bundle_of(run: Run, settings: Deploy) -> Bundle:
    """The files for an endpoint. Raises UserError when they are not there, or when no container can serve them."""
    stage = "merge" if "merge" in run.plan else "consolidate"
    if why := run.why_not_done(stage):
        raise UserError(
            f"{run.directory}: stage {stage} {why}: there is no tuned model to deploy",
            f"hyperpod-ft resume {run.directory}",
        )
    config = read_config(run.tuned_model)
    if is_encoder_decoder(config):
        raise UserError(
            f"{run.tuned_model}: vLLM serves no encoder-decoder such as {config.get('model_type', 'this')}",
            "serve it with `hyperpod-ft serve`, or deploy a causal model",
        )
    version = run.plan[stage].fingerprint[:12]
    if settings.model == "adapter":
        return _with_adapter(run, config, version)
    part = _part(run.tuned_model, (*BESIDE_WEIGHTS, *_WEIGHTS))
    return Bundle((part,), version, _served(config, (part,)), _dtype(config), _has_chat_template(run.tuned_model))


def _with_adapter(run: Run, config: Mapping[str, Any], version: str) -> Bundle:
    """The base model with the tuned model's tokenizer and chat template, and the adapter."""
    _check_adapter(run)
    parts = (
        _part(run.base_model, (*_MODEL_CONFIG, *_WEIGHTS)),
        _part(run.tuned_model, TOKENIZER),
        _part(run.adapter, ("adapter_config.json", "adapter_model.safetensors"), ADAPTER_DIRECTORY),
    )
    return Bundle(
        parts,
        f"adapter-{version}",
        _served(config, parts),
        _dtype(config),
        _has_chat_template(run.tuned_model),
        run.config.lora.r,
    )


def _check_adapter(run: Run) -> None:
    if run.config.training.method != "lora":
        raise UserError("deploy.model: a run with training.method full has no adapter", "set it to merged")
    if not (run.adapter / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{run.adapter}: the adapter is not there any more", "set deploy.model to merged, or run consolidate again"
        )
    if run.config.lora.dora:
        raise UserError("deploy.model: vLLM serves no DoRA adapters beside a base model", "set it to merged")
    most = longest_lora_rank()
    if run.config.lora.r > most:
        raise UserError(
            f"deploy.model: vLLM serves adapters of rank {most} or less, this one has {run.config.lora.r}",
            "set it to merged",
        )


def _part(root: Path, patterns: tuple[str, ...], prefix: str = "") -> Part:
    files = {file for pattern in patterns for file in root.glob(pattern) if file.is_file()}
    return Part(root, tuple(sorted(files)), prefix)


def _served(config: Mapping[str, Any], parts: tuple[Part, ...]) -> Served:
    weights = sum(file.stat().st_size for part in parts for file in part.files if file.suffix == ".safetensors")
    shape = model_shape(config)
    heads = shape.heads if shape else config.get("num_attention_heads", config.get("n_head", 1))
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    return Served(
        weight_bytes=weights // 2 if _stored_dtype(config) == "float32" else weights,
        shape=shape,
        heads=heads,
        positions=positions,
        model_type=str(config.get("model_type", "")),
    )


def _dtype(config: Mapping[str, Any]) -> str:
    """fp32 weights are served in bf16: vLLM's `auto` would make fp16 of them, with a smaller range."""
    return "bfloat16" if _stored_dtype(config) == "float32" else "auto"


def _stored_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _has_chat_template(directory: Path) -> bool:
    if any((directory / name).is_file() for name in _CHAT_TEMPLATES):
        return True
    file = directory / "tokenizer_config.json"
    return file.is_file() and '"chat_template"' in file.read_text(encoding="utf-8")
