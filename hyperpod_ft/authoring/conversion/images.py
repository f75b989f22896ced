"""Images of a converted file: the files of those that its rows name, and what a run file cannot have beside them."""

from pathlib import Path
from typing import Any

from hyperpod_ft.authoring.conversion.foreign_file import ANY_NUMBER, GIVE_DATASET, Conversion
from hyperpod_ft.authoring.dataset_format import LocalFiles
from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.errors import UserError

SIZE = "images have the size that the model's processor gives them"


def with_files(draft: Draft, source: dict[str, Any], *, rows_tell: bool) -> dict[str, Any]:
    """The keys of section `dataset` for a source; if its rows are here and name images, with the files of these.

    `rows_tell`: images are trained on wherever rows have some, whether or not the other file says so.
    """
    path = Path(source["source"])
    if not (rows_tell or draft.get("dataset.images")) or not path.exists():
        return source
    files, split = (source.get(key) or Dataset.model_fields[key].default for key in ("files", "split"))
    patterns = LocalFiles.of(path, files, split).image_files()
    if patterns is None:
        return source
    draft.set("dataset.images", True)
    if not patterns:
        return source
    own, directory = ([path.name], path.parent) if path.is_file() else (files, path)
    return source | {"source": str(directory), "files": [*own, *patterns]}


def finish(conversion: Conversion, objective: str) -> None:
    """What a run on images has none of. Raises UserError if it is not for supervised fine-tuning."""
    draft = conversion.draft
    if not draft.get("dataset.images"):
        return
    if objective != "sft":
        raise UserError(f"is for objective {objective} on images", "the kit trains sft on images, and no other")
    listed = draft.get("dataset.sources") or [draft.values["dataset"]]
    if other := next((one["format"] for one in listed if one.get("format") != "chat"), None):
        raise UserError(f"has rows of format {other} beside images, which need format chat", GIVE_DATASET)
    draft.set("dataset.packing", "none")
    if draft.get("dataset.overlong") != "drop":
        draft.set("dataset.overlong", "drop")
        draft.default("dataset.max_bad_rows", ANY_NUMBER)
        conversion.changes["dataset.overlong"] = "rows that are too long are left out: their images cannot be cut"
    if draft.get("dataset.loss_on") == "all":
        draft.drop("dataset.loss_on")
        conversion.changes["dataset.loss_on"] = "of rows with images, the answers alone are trained"
