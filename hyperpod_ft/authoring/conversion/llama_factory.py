"""LLaMA-Factory's configuration, the file of `llamafactory-cli train`, and its dataset_info.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperpod_ft.authoring.conversion import images, objectives, training_arguments
from hyperpod_ft.authoring.conversion.foreign_file import (
    GIVE_DATASET,
    Conversion,
    Rule,
    changes,
    is_unset,
    number,
    only,
    switch,
    text,
    used,
    whole_modules,
)
from hyperpod_ft.authoring.dataset_format import template, text_of
from hyperpod_ft.errors import UserError

# what a file is for when a key is on, beside `stage`
OTHERS = {
    "use_asft_loss": "with anchored fine-tuning",
    "use_eaft_loss": "with entropy-adaptive fine-tuning",
}
_STAGES = {"pt": "sft", "rm": "reward"}  # by the objective's name, where the tool has another
# TRL's names for the settings of its trainers
_NAMES = {
    "pref_beta": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
}
_PAIR_LOSSES = (None, "sigmoid", "hinge", "ipo")  # by TRL's names
_MIXED = "an epoch has every example once; parts of it are the weights of dataset.sources"


# what changes training on images, which the datasets tell
_OF_IMAGES = {
    **dict.fromkeys(("image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches"), images.SIZE),
    "freeze_language_model": "adapters are in the language model (lora.image_tower adds the part that reads images)",
    "media_dir": "images are looked for beside the rows: put both into one directory",
}
# keys that another rule, or `finish`, reads
_READ_ELSEWHERE = (
    "stage finetuning_type dataset dataset_dir max_samples val_size packing neat_packing"
    " per_device_train_batch_size lora_target quantization_bit quantization_method pref_loss template"
    " disable_gradient_checkpointing add_tokens add_special_tokens new_special_tokens"
    " freeze_vision_tower freeze_multi_modal_projector"
)
RULES: Mapping[str, Rule] = {
    **training_arguments.RULES,
    **dict.fromkeys((*_READ_ELSEWHERE.split(), *_OF_IMAGES), used),
    "model_name_or_path": text("model.source"),
    "model_revision": text("model.revision"),
    "eval_dataset": changes("set dataset.validation_source, or dataset.validation_share"),
    "cutoff_len": number("dataset.max_length"),
    "train_on_prompt": switch("dataset.loss_on", "all"),
    "use_dft_loss": switch("trl.loss_type", "dft"),
    "mask_history": changes("of a chat, every answer counts in the loss"),
    "num_train_epochs": number("training.epochs"),
    "pure_bf16": changes("trained weights are kept in fp32, and computed with in bf16"),
    "lora_rank": number("lora.r"),
    "lora_alpha": number("lora.alpha"),
    "lora_dropout": number("lora.dropout"),
    "use_rslora": switch("lora.rslora"),
    "use_dora": switch("lora.dora"),
    "loraplus_lr_ratio": number("lora.plus_ratio"),
    "mix_strategy": only("concat", _MIXED),
    "interleave_probs": changes(_MIXED),
    "adapter_name_or_path": changes("set model.adapter.source to it, or merge it into model.source first"),
    "ref_model": changes("the reference of DPO is the base model"),
    "additional_target": whole_modules,
    "rope_scaling": changes("is taken from the model's own files"),
}
_ALPACA = ("instruction", "input", "output")
_OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_SHAREGPT_TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
_SHARED = ("system", "tools")  # columns that belong to messages, under these names
# columns of preferences, by the kit's format
_COLUMNS: Mapping[str, Mapping[str, str | None]] = {
    "preference": {"prompt": "prompt", "query": None, "chosen": "chosen", "rejected": "rejected"},
    "unpaired-preference": {"prompt": "prompt", "query": None, "response": "completion", "kto_tag": "label"},
}


def rules_of(objective: str) -> Mapping[str, Rule]:
    return {**RULES, **objectives.named_rules(objective, _NAMES)}


def objective_of(conversion: Conversion) -> str:
    """Raises UserError when the kit does not have what the file trains."""
    values = conversion.values
    stage = _stage(conversion)
    objective = objectives.require("stage", _STAGES.get(stage, stage))
    if str(values.get("finetuning_type", "lora")) not in ("lora", "full"):
        raise UserError("finetuning_type: the kit has LoRA and training of all parameters", "use lora or full")
    if objective == "dpo" and values.get("pref_loss") not in _PAIR_LOSSES:
        raise UserError("pref_loss: the kit has sigmoid, hinge and ipo of its losses", "train with one of them")
    if conversion.is_on("do_predict") and not conversion.is_on("do_train"):
        raise UserError("do_predict: the file does not train", "give one with do_train")
    return objective


def _stage(conversion: Conversion) -> str:
    return str(conversion.values.get("stage", "sft"))


def finish(conversion: Conversion, objective: str) -> None:
    """What needs more than one key, and LLaMA-Factory's defaults."""
    draft, values, stage = conversion.draft, conversion.values, _stage(conversion)
    known = objectives.OBJECTIVES[objective]
    full = values.get("finetuning_type") == "full"
    draft.set("training.method", "full" if full else "lora")
    if not full:
        _set_lora(conversion)
    special = values.get("add_special_tokens") or values.get("new_special_tokens")  # as it was called before
    conversion.set_new_tokens(values.get("add_tokens"), special)
    if objective == "dpo" and values.get("pref_loss") not in (None, "sigmoid"):
        draft.set("trl.loss_type", [values["pref_loss"]])
    if stage != "pt":
        conversion.changes["template"] = (
            "chats take the template of the model's tokenizer, and rows of other formats none: alpaca's are Stanford"
            " Alpaca's text"
        )
    for key, value in (("learning_rate", 5e-5), ("schedule", "linear"), ("warmup_share", 0.0)):
        draft.default(f"training.{key}", value, "transformers' default")
    draft.default("dataset.max_length", 2048)
    if not conversion.is_on("disable_gradient_checkpointing"):
        draft.default("training.activation_checkpointing", "full", "LLaMA-Factory's default")
    training_arguments.set_batch(conversion, objective, "per_device_train_batch_size", 8)
    neat = conversion.is_on("neat_packing")
    # packing is the default of pre-training
    packed = neat or conversion.is_on("packing") or (stage == "pt" and values.get("packing") is None)
    if packed and not neat:
        conversion.changes["packing"] = "examples of a row do not attend to one another"
    training_arguments.set_packing(conversion, ("wrapped" if stage == "pt" else "auto") if packed else "none")
    training_arguments.set_validation_share(conversion, "val_size")
    if conversion.dataset:
        conversion.set_sources([{"format": "text"} if stage == "pt" else {}])
    else:
        _set_dataset(conversion, stage, known.format)
    _set_images(conversion)
    training_arguments.finish(conversion)


def _set_lora(conversion: Conversion) -> None:
    draft, values = conversion.draft, conversion.values
    draft.default("lora.r", 8, "LLaMA-Factory's default")
    draft.default("lora.alpha", 2 * draft.get("lora.r"), "LLaMA-Factory's default: twice the rank")
    if not is_unset(values.get("lora_target")):
        conversion.set_target_modules("lora_target", values["lora_target"])
    bits = values.get("quantization_bit")
    if bits == 4:
        draft.set("lora.quantization", "nf4")
        if values.get("quantization_method") not in (None, "bnb", "bitsandbytes"):
            conversion.changes["quantization_method"] = "the kit's 4 bits are nf4"
    elif not is_unset(bits):
        conversion.changes["quantization_bit"] = "the kit keeps a frozen model in bf16, or in 4 bits"


def _set_images(conversion: Conversion) -> None:
    """What changes training on images; nothing without any."""
    on_images, values = conversion.draft.get("dataset.images"), conversion.values
    for key, reason in _OF_IMAGES.items():
        if not is_unset(values.get(key)):
            named = conversion.changes if on_images else conversion.housekeeping
            named[key] = reason if on_images else "has no effect without images"
    frozen = ("freeze_vision_tower", "freeze_multi_modal_projector") if on_images else ()
    trained = [key for key in frozen if key in values and not conversion.is_on(key)]
    if "freeze_vision_tower" in trained:
        conversion.draft.set("lora.image_tower", True, "from freeze_vision_tower")
    elif trained:
        conversion.changes["freeze_multi_modal_projector"] = _OF_IMAGES["freeze_language_model"]


def _set_dataset(conversion: Conversion, stage: str, rows: str | None) -> None:
    """The datasets, as dataset_info.json describes them. `rows`: their format, which no other objective has."""
    named = conversion.values.get("dataset")
    names = [str(name).strip() for name in (named if isinstance(named, list) else str(named or "").split(","))]
    if names == [""]:
        raise UserError("dataset: names no dataset", GIVE_DATASET)
    info = Path(str(conversion.values.get("dataset_dir") or "data")) / "dataset_info.json"
    entries = _described(conversion, info, names)
    directory = (conversion.find(str(info)) or info).parent
    most = conversion.values.get("max_samples")
    sources = []
    for entry in entries:
        split = str(entry.get("split") or "train")
        if not is_unset(most):
            split = f"{split}[:{conversion.number('max_samples')}]"
        # the tool too prefers the Hub
        file = "" if entry.get("hf_hub_url") else str(entry.get("file_name") or "")
        elsewhere = str(entry.get("hf_hub_url") or entry.get("cloud_file_name") or "")
        source = {"source": str(directory / file) if file else elsewhere}
        sources.append(source | conversion.split("dataset", split) | _format(entry, stage, rows))
        if "images" in _columns(entry):
            conversion.draft.set("dataset.images", True)
    conversion.set_sources(sources)
    for key in sorted({key for entry in entries for key in ("subset", "folder", "num_samples") if entry.get(key)}):
        conversion.changes[f"dataset_info.json: {key}"] = "has no counterpart: choose files with dataset.files"
    for key in sorted({key for entry in entries for key in ("system", "history") if _leaves_out(entry, key)}):
        conversion.changes[f"dataset_info.json: {key}"] = "is not in the prompt"


def _described(conversion: Conversion, info: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The entries of the datasets. Raises UserError for one that is not there, or is nothing that the kit reads."""
    if conversion.values.get("dataset_dir") == "ONLINE":
        return [{"hf_hub_url": name} for name in names]
    path = conversion.find(str(info))
    if path is None:
        raise UserError(
            f"dataset: is a name in {info}, which is neither here nor beside the file",
            f"run this where the data is, or {GIVE_DATASET}",
        )
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        entries = [dict(described[name]) for name in names]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"dataset: {path} does not describe it ({type(error).__name__})", GIVE_DATASET) from error
    for name, entry in zip(names, entries, strict=True):
        if media := {"videos", "audios"} & _columns(entry).keys():
            raise UserError(f"dataset: {name} has {min(media)}; the kit trains on text and images", GIVE_DATASET)
        if _columns(entry).get("images") not in (None, "image", "images"):
            raise _other_rows("images in a column images")
        if _leaves_out(entry, "tools"):
            raise UserError(f"dataset: {name}: its tools are not in a column tools of conversations", GIVE_DATASET)
        if not (entry.keys() & {"file_name", "hf_hub_url"} or str(entry.get("cloud_file_name")).startswith("s3://")):
            raise UserError(f"dataset: {name} is neither a file nor on the Hugging Face Hub", GIVE_DATASET)
    return entries


def _leaves_out(entry: Mapping[str, Any], key: str) -> bool:
    """Whether a column would not be read."""
    name, is_chat = _columns(entry).get(key), entry.get("formatting", "alpaca") != "alpaca"
    return bool(name) and not (is_chat and key in _SHARED and name == key)


def _columns(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    columns = entry.get("columns")
    return columns if isinstance(columns, dict) else {}


def _format(entry: Mapping[str, Any], stage: str, rows: str | None) -> dict[str, Any]:
    """The dataset's format. Raises UserError for rows that the kit does not read."""
    columns, shared = _columns(entry), entry.get("formatting", "alpaca") != "alpaca"
    if stage == "pt":
        if not columns.get("prompt"):
            raise _other_rows("text")
        return text_of(str(columns["prompt"]))
    if rows:
        wanted = _COLUMNS[rows]
        if shared or {key: columns.get(key) for key in wanted} != wanted:
            *names, last = filter(None, wanted.values())
            raise _other_rows(f"{', '.join(names)} and {last}")
        return {"format": rows}
    if shared:
        usual, named = (
            ("messages", _OPENAI_TAGS) if entry["formatting"] == "openai" else ("conversations", _SHAREGPT_TAGS)
        )
        tags = {key: (entry.get("tags") or {}).get(key, value) for key, value in named.items()}
        if (columns.get("messages", usual), tags) not in (
            ("messages", _OPENAI_TAGS),
            ("conversations", _SHAREGPT_TAGS),
        ):
            raise _other_rows("messages of role and content, or conversations of from and value")
        return {"format": "chat"}
    fields = [columns.get(key) for key in ("prompt", "query", "response")] if columns else [*_ALPACA]
    if fields == [*_ALPACA]:
        return {"format": "alpaca"}
    prompt, query, answer = fields
    if not (prompt and answer):
        raise _other_rows("a prompt and an answer")
    keys = template(str(prompt), str(answer))
    if query:
        keys["prompt_template"] = f"{{{{ {prompt} }}}}\n{{{{ {query} }}}}\n"
    return keys


def _other_rows(fields: str) -> UserError:
    return UserError(
        f"dataset: its rows have other fields than {fields}", "convert them, and give the new file with --dataset"
    )
