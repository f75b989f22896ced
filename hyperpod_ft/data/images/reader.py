"""What a text with images is to a model: its tokens and pixels, by the model's own processor in transformers.

Pillow prepares the images, wherever that is done, so that training, tests and servers give the model the same pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hyperpod_ft.config import prompt_images
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.data.images import files
from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.data.text.formats import RowImages
from hyperpod_ft.data.text.run_prompts import AS_WRITTEN
from hyperpod_ft.errors import UserError, first_sentence


@dataclass(frozen=True)
class ImageReader:
    """`processor`: transformers' ProcessorMixin with a tokenizer and a processor of images.

    None: texts stay as the chat template writes them.
    """

    processor: Any

    @classmethod
    def load(cls, model: Path) -> "ImageReader":
        """Of a model directory. Raises UserError if it has no image processor, or Pillow is not installed."""
        from transformers import AutoConfig, AutoImageProcessor  # noqa: PLC0415 - takes seconds to import
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING  # noqa: PLC0415

        tokenizer: Any = tokenizers.load(model)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(model, **local))]
            images = AutoImageProcessor.from_pretrained(model, backend="pil", **local)
            settings, _ = kind.get_processor_dict(model, local_files_only=True)
            return cls(_without_video(kind).from_args_and_dict([images, tokenizer], settings))
        except Exception as error:  # files of others raise errors of any type
            raise UserError(
                f"{model}: no usable processor of images: {type(error).__name__}: {first_sentence(error)}",
                "use an image-text model that has one, with Pillow installed (extra `trl`), or leave dataset.images"
                " out",
            ) from error

    def beside(self, folder: Path) -> RowImages:
        """What it makes of the images of rows that are in a folder."""
        return RowImages(partial(files.content, folder=folder), self.expanded)

    def expanded(self, text: str, images: Sequence[bytes]) -> str:
        """The text whose tokens the model gets: of each image as many as it has. Raises RowError."""
        if self.processor is None:
            return text
        self._check(text, images)
        if not images:
            return text
        (found,) = self._processed([text], [images], return_text_replacement_offsets=True)["text_replacement_offsets"]
        for each in reversed(found):
            start, stop = each["span"]
            text = text[:start] + each["replacement"] + text[stop:]
        return text

    def ids(self, text: str, images: Sequence[bytes]) -> list[int]:
        """The token ids of a text, to which nothing is added. Raises RowError."""
        self._check(text, images)
        (found,) = self._processed([text], [images])["input_ids"]
        return list(found)

    def inputs(self, texts: Sequence[str], images: Sequence[Sequence[bytes]]) -> dict[str, Any]:
        """What the model's `generate` takes, as tensors on the CPU; texts are padded on the left. Raises RowError."""
        for text, of_text in zip(texts, images, strict=True):
            self._check(text, of_text)
        return dict(self._processed(texts, images, padding=True, padding_side="left", return_tensors="pt"))

    def _processed(self, texts: Sequence[str], images: Sequence[Sequence[bytes]], **options: Any) -> Any:
        shown = [files.opened(of_text) for of_text in images]
        try:
            return self.processor(
                text=list(texts), images=shown if any(shown) else None, add_special_tokens=False, **options
            )
        except (ValueError, TypeError) as error:  # as for one that is a thousand times as wide as high
            raise RowError("image that the model's processor refuses", first_sentence(error)) from error

    def _check(self, text: str, images: Sequence[bytes]) -> None:
        """The chat template must write one mark for each image, and no one else any."""
        processor = self.processor
        others = (getattr(processor.tokenizer, "image_token", None), getattr(processor, "video_token", None))
        for mark in others:
            if mark not in (None, processor.image_token) and mark in text:
                raise RowError("text with a token of images", mark)
        if (found := text.count(processor.image_token)) != len(images):
            raise RowError("chat template writes another number of images", f"{found}, and the row has {len(images)}")


def of_prompts(reader: ImageReader | None, folder: Path) -> RowImages:
    """What is made of the images of a run file's prompts; `reader`: of a model that reads images.

    `folder` has the run's copies of the user's files.
    """

    def read(image: Any) -> bytes:
        return files.content(image["revision"] if prompt_images.is_pinned(image) else image, folder)

    return RowImages(read, reader.expanded) if reader else AS_WRITTEN


def _without_video(kind: Any) -> Any:
    """A class of processors for images alone: those of video need torchvision, which is not installed."""
    if "video_processor" not in kind.get_attributes():
        return kind

    class ImagesOnly(kind):  # type: ignore[misc]
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    return ImagesOnly
