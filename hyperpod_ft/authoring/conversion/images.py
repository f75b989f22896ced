"""Images of a converted file: the files of those that its rows name, and what a run file cannot have beside them."""

from pathlib import Path
from typing import Any

from hyperpod_ft.authoring.conversion.foreign_file import GIVE_DATASET, Conversion
from hyperpod_ft.authoring.dataset_format import LocalFiles
from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.config import sources
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.families import IMAGE_TOWERS

SIZE = "images have the size that the model's processor gives them"


def with_files(draft: Draft, source: dict[str, Any], *, rows_tell: bool) -> dict[str, Any]:
    """The keys of section `dataset` for a source; if its rows are here and name images, with the files of these.

    `rows_tell`: images are trained on wherever rows have some, whether or not the other file says so. Raises UserError
    for images that are not beside the rows.
    """
    path, on_images = Path(source["source"]), bool(draft.get("dataset.images"))
    if not (rows_tell or on_images) or not path.exists():
        return source
    files, split = (source.get(key) or Dataset.model_fields[key].default for key in ("files", "split"))
    patterns = LocalFiles.of(path, files, split).image_files(first_rows_tell=not on_images)
    if patterns is None:
        return source
    draft.set("dataset.images", True)
    if not patterns:
        return source
    own, directory = ([path.name], path.parent) if path.is_file() else (files, path)
    return source | {"source": str(directory), "files": [*own, *patterns]}


def finish(conversion: Conversion, objective: str, output: Path) -> None:
    """What a run on images has none of, and its tower. Raises UserError if it is not for supervised fine-tuning."""
    draft = conversion.draft
    if not draft.get("dataset.images"):
        return
    if objective != "sft":
        raise UserError(f"is for objective {objective} on images", "the kit trains sft on images, and no other")
    listed = draft.get("dataset.sources") or [draft.values["dataset"]]
    if other := next((one["format"] for one in listed if one.get("format") != "chat"), None):
        raise UserError(f"has rows of format {other} beside images, which need format chat", GIVE_DATASET)
    draft.set("dataset.packing", "none")
    # any number of bad rows would also leave out rows whose images are missing
    if draft.drop("dataset.max_bad_rows") or draft.get("dataset.overlong") != "drop":
        draft.set("dataset.overlong", "drop")
        conversion.changes["dataset.overlong"] = (
            "images cannot be cut: stage dataset stops at a row that is too long, or leaves out as many as"
            " dataset.max_bad_rows says"
        )
    if draft.get("dataset.loss_on") == "all":
        draft.drop("dataset.loss_on")
        conversion.changes["dataset.loss_on"] = "of rows with images, the answers alone are trained"
    adapted = conversion.values.get("lora_target_modules")
    if adapted in ("all-linear", ["all-linear"]) and draft.get("training.method") == "lora":
        _adapt_tower(conversion, output)


def _adapt_tower(conversion: Conversion, output: Path) -> None:
    """PEFT's all-linear is every linear layer, also of the part that reads images."""
    source = sources.resolve("model.source", conversion.draft.values["model"]["source"], None, output.resolve().parent)
    model = Path(source.source)
    if source.kind == "local" and read_config(model).get("model_type") in IMAGE_TOWERS:
        conversion.draft.set("lora.image_tower", True, "all-linear adapts it too")
    else:
        conversion.changes["lora_target_modules"] = (
            f"the run adapts the language model alone; with a model of type {', '.join(IMAGE_TOWERS)},"
            " lora.image_tower adds the part that reads images"
        )
