"""A run file for a model, a dataset and an instance type."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpod_ft.authoring import dataset_format
from hyperpod_ft.authoring.dataset_format import FormatUnclearError, FoundFormat, LocalFiles
from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.authoring.fit import fit
from hyperpod_ft.checkpoint.formats.added_tokens import with_room
from hyperpod_ft.checkpoint.formats.model_directory import (
    CONFIG,
    EMBEDDINGS,
    is_encoder_decoder,
    of_language_model,
    read_config,
)
from hyperpod_ft.checkpoint.formats.safetensors_file import has_weights
from hyperpod_ft.config import run_file, sources, yaml_text
from hyperpod_ft.config.fields import shown
from hyperpod_ft.config.instances import CATALOGUE, Instance, alternatives
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.data import default_name
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.config.sections.training import last_parts
from hyperpod_ft.data import source_files
from hyperpod_ft.download.assets import look_up_source
from hyperpod_ft.download.sources import source_of
from hyperpod_ft.errors import UserError, last_line
from hyperpod_ft.planning.families import default_targets, family_of
from hyperpod_ft.planning.model_fit import check_model_directory, shape_of
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.runs.assets import config_directory

_LEARNING_RATES = {"lora": 2e-4, "full": 1e-5, "dpo": 5e-6}
_VALIDATION_SHARE, _VALIDATION_ROWS = 0.02, 20
_LISTED = 5
# AWS's Neuron packages, and PyTorch's builds without CUDA
_NEURON_REPOSITORIES = ("https://pip.repos.neuron.amazonaws.com", "https://download.pytorch.org/whl/cpu")
_NOT_IN_NAMES = re.compile(r"^example:|\.(jsonl?|ndjson|parquet)$")


@dataclass(frozen=True)
class NewRun:
    """What a run file is written for. Sources are as in a run file, or paths relative to the working directory."""

    model: str
    dataset: str
    instance_type: str
    nodes: int = 1
    method: str = "lora"
    format: str | None = None  # None: recognized
    split: str | None = None  # None: the run file's default


def new_run(wanted: NewRun, output: Path) -> Draft:
    """A run file to be written to `output`. Raises UserError when the dataset's format is unknown or nothing fits."""
    instance = instance_of(wanted.instance_type)
    described = f"{wanted.model} on {wanted.nodes} x {instance.name}"
    draft = Draft(head=[f"{described}, written by `hyperpod-ft init`; docs/run-file.md has all keys."])
    set_cluster(draft, instance, wanted.nodes)
    draft.set("model.source", written_source(wanted.model, output))
    draft.set("training.method", wanted.method)
    if wanted.split:
        draft.set("dataset.split", wanted.split)
    set_dataset(draft, wanted.dataset, wanted.format, output)
    given = draft.get("dataset.format")
    preferences = given in ("preference", "unpaired-preference")
    if given == "preference":
        draft.set("training.objective", "dpo", "prefers the chosen answers (docs/methods.md)")
    elif preferences:
        draft.set("engine", "trl", "which has objective kto")
        draft.set("training.objective", "kto", "prefers the answers labeled true (docs/engines.md)")
        draft.set("training.micro_batch_size", 2, "kto compares the rows of a forward pass")
    rate = _LEARNING_RATES["dpo" if preferences else wanted.method]
    draft.set("training.learning_rate", rate, "a usual one for this method; try others")
    draft.set("training.epochs", 1 if preferences else 3)
    name_run(draft)
    complete(draft, output)
    return draft


def instance_of(name: str) -> Instance:
    """Raises UserError for an unknown instance type."""
    known = CATALOGUE.get(name.removeprefix("ml."))
    if known is None:
        raise UserError(f"--instance {shown(name)}: unknown", alternatives(name.removeprefix("ml.")))
    return known


def check_model(source: str, output: Path) -> None:
    """Raises UserError when it is no model, as far as this machine and the Hub can tell."""
    asset = sources.resolve("--model", written_source(source, output), None, output.resolve().parent)
    if asset.kind == "local":
        read_config(Path(asset.source))
    look_up_source("--model", "model", asset)


def check_dataset(source: str, format_name: str | None, split: str | None, output: Path) -> None:
    """Raises UserError when it is no dataset, or has rows of no format; FormatUnclearError when that must be given."""
    asset = sources.resolve("--dataset", written_source(source, output), None, output.resolve().parent)
    look_up_source("--dataset", "dataset", asset)
    draft = Draft()
    if split:
        draft.set("dataset.split", split)
    set_dataset(draft, source, format_name, output)


def set_cluster(draft: Draft, instance: Instance, nodes: int) -> None:
    if instance.is_neuron:
        draft.set("engine", "neuron" if instance.name.startswith("trn1") else "torch")
    else:
        draft.set("engine", "auto", "torch, or trl for what only that has")
    if instance.name == "local":
        draft.set(
            "cluster.root", ".hyperpod-ft", "models, datasets and runs; on a cluster a directory that all nodes see"
        )
        draft.set("env.python", "current", "the interpreter that runs hyperpod-ft")
    else:
        draft.set("cluster.root", "~/hyperpod-ft", "models, datasets and runs: on the volume that all nodes mount")
        draft.set("cluster.partition", instance.name.partition(".")[0], "as `sinfo` shows it")
    draft.set("cluster.instance_type", instance.name)
    draft.set("cluster.nodes", nodes)
    if instance.is_neuron:
        draft.set(
            "env.package_repositories", list(_NEURON_REPOSITORIES), "of AWS's Neuron packages, and PyTorch for CPUs"
        )
    if not instance.has_accelerators:
        draft.set("training.precision", "fp32")


def set_dataset(draft: Draft, source: str, format_name: str | None, output: Path) -> None:
    """Section dataset, with the format given, or recognized.

    Raises UserError when it cannot be recognized, or the files that are here have no split as wanted.
    """
    written = written_source(source, output)
    draft.set("dataset.source", written)
    draft.default("dataset.max_length", 2048, "tokens of a packed row")
    local = _local_files(draft, written, output)
    if local and local.others:
        draft.default("dataset.split", Dataset.model_fields["split"].default)
        draft.notes["dataset.split"] = f"files that are not of it: {', '.join(local.others[:_LISTED])}"
    if draft.get("dataset.validation_share") is None:
        share = _validation_share(local, draft.get("dataset.split") or "")
        why = ", more of few rows" if share > _VALIDATION_SHARE else ""
        draft.set("dataset.validation_share", share, f"rows held out for the validation loss{why}")
    known = dataset_format.known_on_the_hub(written)
    if not format_name:
        found = _found_format(local, written)
    elif known and known.keys["format"] == format_name:
        found = known
    else:
        draft.set("dataset.format", format_name)
        return
    for key, value in found.keys.items():
        draft.default(f"dataset.{key}", value, "cuts examples longer than max_length" if key == "overlong" else "")
    draft.notes["dataset.format"] = found.how
    if found.prompt is not None:
        draft.set("generate.prompts", [found.prompt], "answered before and after training; this is the first row's")


def set_datasets(draft: Draft, listed: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Section dataset with several sources, whose formats are known; those of one name are numbered."""
    draft.default("dataset.max_length", 2048, "tokens of a packed row")
    draft.default("dataset.validation_share", _VALIDATION_SHARE, "rows of each held out for the validation loss")
    written: list[dict[str, Any]] = []
    names: set[str] = set()
    for number, one in enumerate(listed, 1):
        source = {**one, "source": written_source(one["source"], output)}
        name = default_name(source["source"], str(one.get("split", "train")).partition("[")[0])
        if name in names:
            source["name"] = name = f"{name}-{number}"
        names.add(name)
        written.append(source)
    draft.set("dataset.sources", written)


def _local_files(draft: Draft, source: str, output: Path) -> LocalFiles | None:
    """The dataset's files that a run would read; None if they are not on this machine."""
    if not source.startswith("example:") and sources.kind_of(source) != "local":
        return None
    path = Path(sources.resolve("dataset.source", source, None, output.resolve().parent).source)
    chosen = {key: draft.get(f"dataset.{key}") or Dataset.model_fields[key].default for key in ("files", "split")}
    return LocalFiles.of(path, **chosen)


def _validation_share(local: LocalFiles | None, split: str) -> float:
    """A loss over a row or two says little: of a small dataset that is here, `_VALIDATION_ROWS` or a fifth."""
    enough = round(_VALIDATION_ROWS / _VALIDATION_SHARE)
    # a share of the rows is a share of all of them
    rows = len(source_files.rows_of(split, local.count(None if "[" in split else enough))) if local else enough
    return max(_VALIDATION_SHARE, round(min(_VALIDATION_ROWS / rows, 0.2), 2)) if rows else _VALIDATION_SHARE


def _found_format(local: LocalFiles | None, source: str) -> FoundFormat:
    if local:
        return local.format()
    if found := dataset_format.known_on_the_hub(source):
        return found
    raise FormatUnclearError(
        f"--dataset {source}: its format cannot be detected, since its rows are not on this machine", "pass --format"
    )


def written_source(source: str, output: Path) -> str:
    """The source as the run file names it: a path relative to it if it is below its directory, else absolute."""
    path = Path(source).expanduser()
    if source.startswith(("s3://", "example:")) or not sources.exists(path):
        return source
    relative = os.path.relpath(path.resolve(), output.resolve().parent)
    return str(path.resolve()) if relative.startswith("..") else f"./{relative}"


def name_run(draft: Draft) -> None:
    """A name made of model, dataset and method."""
    trained = (draft.get("model.source"), draft.get("dataset.source") or "mixture")
    parts = [Path(str(source).rstrip("/")).name for source in trained]
    words = "-".join([*(_NOT_IN_NAMES.sub("", part) for part in parts), str(draft.get("training.method") or "lora")])
    draft.set("name", re.sub(r"[^a-z0-9._-]+", "-", words.lower()).strip("-._")[:64])


def complete(draft: Draft, output: Path, *, keep_batch: bool = False) -> None:
    """Make the draft fit, and check it as `plan` would. What could not be looked at is said at its top.

    Raises UserError.
    """
    base = output.resolve().parent
    with tempfile.TemporaryDirectory() as scratch:
        config = run_file.resolve(run_file.validate(draft.values, str(output)), base)
        for dataset in (part.dataset for part in config.dataset.parts):
            if dataset.asset.kind == "local":
                local = LocalFiles.of(Path(dataset.source), dataset.files, dataset.split)
                draft.head += local.unused_columns(dataset)
        directory = _model_directory(config, Path(scratch), draft)
        tokens = (config.model.new_tokens, config.model.new_special_tokens)
        model_config = with_room(read_config(directory), directory, *tokens) if directory else None
        if model_config is not None:
            described = of_language_model(model_config)
            _set_lengths(draft, described, config.sampling.max_completion_length if config.reward else 0)
            family = str(described.get("model_type", ""))
            if directory and config.engine == "torch" and not (family_of(family) or is_encoder_decoder(model_config)):
                _set_targets(draft, directory)
        if any(tokens) and config.training.method == "lora" and not is_encoder_decoder(model_config or {}):
            _train_rows(draft, model_config or {})
        fit(draft, model_config, keep_batch=keep_batch)
        # the text is what `plan` will read
        values = yaml_text.read(draft.text(), str(output))
        config = run_file.resolve(run_file.validate(values, str(output)), base)
        degrees = degrees_of(config)
        if directory:
            check_model_directory(config, degrees, directory)


def _set_lengths(draft: Draft, model_config: Mapping[str, Any], answer: int) -> None:
    """`answer`: tokens that are sampled after a row."""
    positions = model_config.get("max_position_embeddings")
    if isinstance(positions, int) and answer < positions < draft.get("dataset.max_length") + answer:
        less = ", less those of an answer" if answer else ""
        draft.set("dataset.max_length", positions - answer, f"all positions that the model has{less}")
    if is_encoder_decoder(model_config):
        draft.default("dataset.max_target_length", 512, "tokens of the decoder's part")


def _set_targets(draft: Draft, model: Path) -> None:
    """Of a model of which not every linear layer can have an adapter; a line in the file if this machine cannot tell.

    It takes torch, and the headers of the model's files.
    """
    if draft.get("training.method") == "full" or draft.get("lora.target_modules"):
        return
    command = (sys.executable, "-m", "hyperpod_ft.engines.torch.consolidable", str(model), "targets")
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode == 0 and (targets := json.loads(last_line(answer.stdout))):
        draft.set("lora.target_modules", targets, "the layers of this model that can have adapters")
    elif answer.returncode or not has_weights(model):
        draft.head.append(
            "Whether LoRA needs lora.target_modules for this model was not checked: that takes torch and the model's"
            " files on this machine. If it does, stage certify lists the modules before accelerators are held."
        )


def _train_rows(draft: Draft, model_config: Mapping[str, Any]) -> None:
    """Let LoRA train the rows of new tokens, unless the draft says how: other tools do, or need a key for it."""
    targets = draft.get("lora.target_modules") or ()
    named = last_parts(targets)
    if draft.get("lora.modules_to_save") or ("lm_head" in named and named.intersection(EMBEDDINGS)):
        return
    model_type, shape = str(of_language_model(model_config).get("model_type", "")), shape_of(model_config)
    family, note = family_of(model_type), "with the rows of new tokens"
    paths = (family.embedding, family.head) if family else ("embed_tokens", "lm_head")
    ends = [path.rpartition(".")[2] for path in paths]
    if shape.tied if shape else model_config.get("tie_word_embeddings"):
        draft.set("lora.target_modules", list(dict.fromkeys([*(targets or default_targets(model_type)), *ends])), note)
    else:
        draft.set("lora.modules_to_save", ends, note)


def _model_directory(config: RunConfig, scratch: Path, draft: Draft) -> Path | None:
    """A directory with the model's config.json, fetched if needed; None, and a line in the file, if it cannot be."""
    if here := config_directory(config):
        return here
    try:
        source = source_of("model", "model.source", config.model.asset)
        wanted = source.listing().only(CONFIG)
        source.fetch(wanted, scratch)
        if wanted.files:
            return scratch
        reason = f"it has no {CONFIG}"
    except UserError as error:
        reason = error.problem
    draft.head.append(
        f"The model was not looked at ({reason}): whether this fits its memory is unknown. `hyperpod-ft plan` checks it"
        " once stage download has run; `parallelism.degrees: auto` chooses degrees when the Hub can be reached."
    )
    return None
