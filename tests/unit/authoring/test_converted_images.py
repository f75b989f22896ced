"""Files of other tools that train on images."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.errors import UserError
from scripts.memory_table import LLAMA_3_8B
from tests.unit.authoring.converting import AXOLOTL, LLAMA_FACTORY, TRL, converted

ASKED = [{"role": "user", "content": "<image>What is this?"}, {"role": "assistant", "content": "A tit."}]
LORA = "use_peft: true\nlora_target_modules: all-linear\n"


@pytest.fixture
def pictures(directory: Path) -> Path:
    """With a model that reads images, and rows whose images are beside them."""
    language = LLAMA_3_8B | {"model_type": "qwen3_vl_text"}
    described = {"model_type": "qwen3_vl", "text_config": language, "vision_config": {}}
    (directory / "llama" / "config.json").write_text(json.dumps(described))
    (directory / "seen").mkdir()
    for name in ("1.png", "2.png"):
        (directory / "seen" / name).write_bytes(b"")
    rows: list[dict[str, Any]] = [{"messages": ASKED, "images": ["seen/1.png"]}]
    part = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}
    rows += [{"messages": [part, ASKED[1]], "images": [image]} for image in ("seen/2.png", *["seen/1.png"] * 60)]
    rows.append({"messages": ASKED, "images": ["later/3.jpg"]})
    (directory / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    asked = {"file_name": "asked.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
    birds = {"file_name": "birds.jsonl"}
    info = {"asked": asked, "web": {"hf_hub_url": "org/web"} | asked, "birds": birds}
    (directory / "dataset_info.json").write_text(json.dumps(info))
    return directory


AXOLOTL_IMAGES = AXOLOTL.replace("./birds.jsonl\n    type: alpaca", "./asked.jsonl\n    type: chat_template")
AXOLOTL_IMAGES = AXOLOTL_IMAGES.replace("train_on_inputs: true\n", "").replace("paged_adamw_8bit", "adamw_torch")
AXOLOTL_IMAGES += "processor_type: AutoProcessor\nskip_prepare_dataset: true\nimage_size: 512\n"
AXOLOTL_IMAGES += "image_resize_algorithm: bilinear\nfreeze_mm_modules: true\n"
FACTORY_IMAGES = LLAMA_FACTORY.replace("full", "lora").replace("dataset: birds", "dataset: asked")
FACTORY_IMAGES += "image_max_pixels: 262144\nvideo_max_pixels: 16384\nfreeze_vision_tower: true\n"
FACTORY_IMAGES += "freeze_multi_modal_projector: true\nfreeze_language_model: false\n"
TRL_IMAGES = TRL.replace("pairs", "asked").replace("beta: 0.2\n", "packing: true\n")


@pytest.mark.parametrize(
    ("text", "changes", "unused"),
    [
        (
            AXOLOTL_IMAGES,
            {"image_size", "image_resize_algorithm", "lora.quantization", "dataset.overlong"},
            {"skip_prepare_dataset", "freeze_mm_modules"},
        ),
        (FACTORY_IMAGES, {"image_max_pixels", "template", "dataset.overlong"}, {"video_max_pixels"}),
        (TRL_IMAGES, {"dataset.overlong", "dataset.loss_on"}, {"save_strategy"}),
    ],
)
def test_images(pictures: Path, text: str, changes: set[str], unused: set[str]) -> None:
    """The run file names the directory, with the files of rows and of all their images; it allows no bad row."""
    found, config = converted(pictures, text)
    assert (config.engine, config.dataset.images, config.dataset.format) == ("trl", True, "chat")
    assert config.dataset.source == str(pictures) and {*config.dataset.files} == {
        *("asked.jsonl", "later/*.jpg", "seen/*.png")
    }
    assert (config.dataset.packing, config.dataset.overlong) == ("none", "drop") and not config.dataset.max_bad_rows
    others = {"fsdp_config", "deepspeed", "dataloader_drop_last"}
    assert ({*found.changes} - others, {*found.housekeeping} - others) == (changes, unused)
    assert "Stage dataset will stop" not in " ".join(found.draft.head)


def test_the_part_that_reads_images_is_trained_where_it_was(pictures: Path) -> None:
    _, config = converted(pictures, FACTORY_IMAGES.replace("freeze_vision_tower: true", "freeze_vision_tower: false"))
    assert config.lora.image_tower
    off = FACTORY_IMAGES.replace("freeze_multi_modal_projector: true", "freeze_multi_modal_projector: false")
    assert "lora.image_tower" in converted(pictures, off)[0].changes["freeze_multi_modal_projector"]
    _, config = converted(pictures, FACTORY_IMAGES.replace("dataset: asked", "dataset: web"))
    assert config.dataset.images and config.dataset.source == "org/web", "its rows have their images"


def test_where_peft_adapts_every_linear_layer_it_adapts_the_part_that_reads_images(pictures: Path) -> None:
    found, config = converted(pictures, TRL_IMAGES)
    assert config.lora.image_tower and "lora_target_modules" not in found.changes
    described = json.loads((pictures / "llama" / "config.json").read_text()) | {"model_type": "gemma3"}
    (pictures / "llama" / "config.json").write_text(json.dumps(described))
    found, config = converted(pictures, TRL_IMAGES)
    assert not config.lora.image_tower and "language model" in found.changes["lora_target_modules"]


@pytest.mark.parametrize("image", ["/there/1.png", "../there/1.png"])
def test_images_elsewhere_are_refused(pictures: Path, image: str) -> None:
    (pictures / "asked.jsonl").write_text(json.dumps({"messages": ASKED, "images": [image]}) + "\n")
    with pytest.raises(UserError, match=r"asked\.jsonl:1: names an image .*put the images beside the rows"):
        converted(pictures, TRL_IMAGES)


def test_without_images_their_keys_have_no_effect(directory: Path) -> None:
    found, config = converted(directory, f"{LLAMA_FACTORY}image_max_pixels: 9\nfreeze_vision_tower: false\n")
    assert not config.dataset.images and "image_max_pixels" in found.housekeeping


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FACTORY_IMAGES.replace("lora", "full"), r"training\.method: full has not been tried with dataset\.images"),
        (FACTORY_IMAGES.replace("dataset: asked", "dataset: asked, birds"), "rows of format alpaca beside images"),
        (f"{AXOLOTL_IMAGES}rl: dpo\n".replace("chat_template", "chatml.ultra"), "objective dpo on images; the kit"),
    ],
)
def test_what_is_not_trained_on_images(pictures: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        converted(pictures, text)
