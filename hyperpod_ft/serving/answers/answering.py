"""The models of a server, and their answers to several questions at once.

Each answer is one call of transformers' `generate`, as stage generate makes it, in the thread of its request. Only one
thread computes at a time; after each token the next one has its turn, so that a long answer delays others only by its
share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.checkpoint.formats.model_directory import is_image_text, read_config
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.data.images import files
from hyperpod_ft.data.images.reader import ImageReader
from hyperpod_ft.data.text import answer_format, chat, conversation, prompts
from hyperpod_ft.data.text.answer_format import AnswerFormat
from hyperpod_ft.data.text.example import RowError
from hyperpod_ft.data.tokenizer import Tokenizer
from hyperpod_ft.errors import UserError, first_sentence
from hyperpod_ft.evaluation.greedy import make_greedy, tokens_before
from hyperpod_ft.serving.answers.decoding import FairLock, TextStream, decoder, is_usable, sampling
from hyperpod_ft.serving.http.openai_api import Answer, HttpError, Request
from hyperpod_ft.serving.markup.parts import Part
from hyperpod_ft.serving.markup.stream import MarkupStream

# The most tokens of an answer whose request sets no limit: a model that never ends its answer must not run for minutes.
_DEFAULT_TOKENS = 256
# The context of a model whose configuration names none, such as T5: memory may grow with the square of the prompt.
_DEFAULT_CONTEXT = 16384


@dataclass(frozen=True)
class _Loaded:
    """A model in memory; `adapter` is the one to switch on, where it has several. `switch`: None without adapters."""

    model: PreTrainedModel
    adapter: str | None = None
    switch: Callable[[str | None], None] | None = None


class Answering:
    """All models of a server. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        models: Mapping[str, _Loaded],
        form: AnswerFormat,
        images: ImageReader | None = None,
        max_length: int | None = None,
    ) -> None:
        """`models` by name; the first answers requests that name none. `form`: that of the tokenizer's template.

        `images`: None for models that read none. `max_length`: the most tokens of prompt and answer together, if that
        is less than the models can take.
        """
        self._tokenizer, self._models, self._form, self._images = tokenizer, dict(models), form, images
        self._stops = {name: make_greedy(one.model, tokenizer) for name, one in self._models.items()}
        # not the tokenizer's size: that of the tuned model may have tokens which its base model lacks
        self._vocabulary = {name: _embeddings(one.model) for name, one in self._models.items()}
        self._max_length = max_length
        self._lock = FairLock()
        self._failure = ""

    @classmethod
    def load(
        cls,
        models: Mapping[str, Path],
        adapters: Mapping[str, Path],
        tokenizer: Path,
        device: torch.device,
        max_length: int | None = None,
    ) -> "Answering":
        """Model directories by name, and PEFT adapters of the last of them by name.

        Raises UserError when one cannot be loaded, or does not fit into the device's memory.
        """
        loaded = {name: _Loaded(_load(directory, device)) for name, directory in models.items()}
        if adapters:
            base = list(loaded)[-1]
            model = loaded[base].model
            switch = _with_adapters(model, adapters)
            loaded[base] = _Loaded(model, None, switch)
            loaded |= {name: _Loaded(model, name, switch) for name in adapters}
        images = _images(tokenizer) if is_image_text(read_config(next(iter(models.values())))) else None
        return cls(tokenizers.load(tokenizer), loaded, answer_format.of_model(tokenizer), images, max_length)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    @cached_property
    def chats(self) -> bool:
        """Whether the chat template takes a question: there may be none, or one that only refuses."""
        try:
            chat.prompt([{"role": "user", "content": "?"}], self._tokenizer)
        except UserError:
            return False
        return True

    @property
    def failure(self) -> str:
        """Why nothing can be answered any more, after an error that left the device unusable; else empty."""
        return self._failure

    def named(self, name: str) -> str:
        """The name of the model that a request means. Raises HttpError (404) for one that is not served."""
        if name and name not in self._models:
            raise HttpError(
                404, f"model {name!r} is not served here; available: {', '.join(self._models)}", "model_not_found"
            )
        return name or next(iter(self._models))

    def answer(self, request: Request, send: Callable[[Sequence[Part]], None]) -> Answer:
        """The answer to one question. `send` gets its parts, text in pieces, after each token and in this thread; what
        it raises ends the answer.

        Raises HttpError when the question is refused, or does not fit into memory.
        """
        name = self.named(request.model)
        shown: dict[str, torch.Tensor] = {}
        if request.messages is None:
            ids, markup = self._prompt_ids(request, name), MarkupStream(AnswerFormat())
        else:
            text, images = self._chat_prompt(request)
            if images:
                shown = self._with_images(text, images)
                ids = shown.pop("input_ids")[0].tolist()
            else:
                ids = tokenizers.prompt_ids(self._tokenizer, text, chat=True)
            markup = MarkupStream(self._form, request.callable_tools, text)
        self._check_ids(ids, name)
        limit = self._limit(request, name, len(ids))
        try:
            return self._generate(request, name, ids, shown, limit, markup, send)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise HttpError(503, f"out of memory: {first_sentence(error)}", "out_of_memory") from error
        except RuntimeError as error:
            if not is_usable(self._models[name].model.device):
                self._failure = first_sentence(error)
            raise

    def _prompt_ids(self, request: Request, name: str) -> list[int]:
        """The token ids of a prompt that is no chat, encoded as stage generate and training do."""
        if isinstance(request.prompt, tuple):
            return list(request.prompt)
        encoder_decoder = self._models[name].model.config.is_encoder_decoder
        encode = tokenizers.source_ids if encoder_decoder else tokenizers.prompt_ids
        return encode(self._tokenizer, _checked("prompt", request.prompt or ""))

    def _chat_prompt(self, request: Request) -> tuple[str, tuple[bytes, ...]]:
        """The text before the answer, and its images."""
        try:
            given = conversation.of_messages(
                request.messages or (),
                tools=list(request.callable_tools) or None,
                template_kwargs=request.template_kwargs,
                read_image=files.of_data_url if self._images else None,
            )
            text = chat.asked(given, self._tokenizer)
        except RowError as error:
            raise HttpError(400, f"messages: {error.problem}") from error
        except UserError as error:
            raise HttpError(
                400, "messages: this model has no chat template; send the whole prompt to /v1/completions instead"
            ) from error
        return _checked("messages", text), given.images

    def _with_images(self, text: str, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """What the model gets for a text with images."""
        assert self._images is not None, "else messages with images are refused"
        try:
            with self._lock:  # its tokenizer is of one thread at a time
                return self._images.inputs([text], [images])
        except RowError as error:
            raise HttpError(400, f"messages: {error.problem}") from error

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        """Raise HttpError for an id without an embedding, since looking it up ends the process's use of a GPU."""
        known = self._vocabulary[name]
        if (largest := max(ids, default=0)) >= known:
            raise HttpError(400, f"the prompt has token id {largest}; the ids of {name} are 0 to {known - 1}")

    def _limit(self, request: Request, name: str, prompt: int) -> int:
        """How many tokens the answer may have. Raises HttpError when prompt and answer exceed the model's context."""
        config = self._models[name].model.config
        if not prompt:
            raise HttpError(400, "the prompt has no tokens")
        context = self._max_length or getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT
        # an encoder-decoder's answer has its own positions, of which the start token takes the first
        own_positions = config.is_encoder_decoder and self._max_length is None
        room = context - (1 if own_positions else prompt)
        if prompt > context or (request.max_tokens or 1) > room:
            asked = f" and max_tokens {request.max_tokens}" if request.max_tokens else ""
            raise HttpError(
                400, f"the prompt has {prompt} tokens{asked}; {name} has room for {context}", "context_length_exceeded"
            )
        return request.max_tokens or min(_DEFAULT_TOKENS, room)

    def _generate(
        self,
        request: Request,
        name: str,
        ids: Sequence[int],
        shown: Mapping[str, torch.Tensor],
        limit: int,
        markup: MarkupStream,
        send: Callable[[Sequence[Part]], None],
    ) -> Answer:
        one, stops = self._models[name], self._stops[name]
        stream = TextStream(decoder(self._tokenizer, markup.marks), request.stop)
        made: list[int] = []
        answer: list[Part] = []
        ended = False

        def after_token(so_far: list[int]) -> bool:
            nonlocal made, ended
            ended = so_far[-1] in stops
            made = so_far[:-1] if ended else so_far
            last = ended or len(so_far) == limit
            piece = stream.update(made, last=last)
            parts = markup.feed(piece, last=last or stream.stopped)
            answer.extend(parts)
            self._lock.release()
            try:
                send(parts)
            finally:
                self._lock.acquire()
                _switch_on(one)
            return stream.stopped

        with self._lock, torch.inference_mode():
            _switch_on(one)
            input_ids = torch.tensor([ids], device=one.model.device)
            inputs = {"attention_mask": torch.ones_like(input_ids)}
            inputs |= {name: tensor.to(one.model.device) for name, tensor in shown.items()}
            one.model.generate(  # type: ignore[operator]
                input_ids=input_ids,
                **inputs,
                max_new_tokens=limit,
                logits_processor=sampling(request, one.model.device),
                stopping_criteria=StoppingCriteriaList([_AfterToken(tokens_before(one.model, len(ids)), after_token)]),
            )
        return Answer(tuple(answer), ended or stream.stopped, len(ids), len(made) + ended)


def _images(model: Path) -> ImageReader | None:
    try:
        return ImageReader.load(model)
    except UserError as error:
        print(f"Only text is answered: {error.problem}", flush=True)
        return None


class _AfterToken(StoppingCriteria):
    """Calls a function with the answer's tokens after each one; it says whether to stop."""

    def __init__(self, before: int, function: Callable[[list[int]], bool]) -> None:
        self._before, self._function = before, function

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        stop = self._function(input_ids[0, self._before :].tolist())
        return torch.full((len(input_ids),), stop, device=input_ids.device, dtype=torch.bool)


def _embeddings(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor), "of a module for embeddings, or PEFT's around it"
    return len(weight)


def _switch_on(one: _Loaded) -> None:
    if one.switch is not None:
        one.switch(one.adapter)


def _load(directory: Path, device: torch.device) -> PreTrainedModel:
    model = pretrained.load(directory, "auto")
    try:
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper loses the signature
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{directory}: does not fit into the memory of {device}",
            "serve one model (--no-base), or divide it over GPUs with vLLM (--with)",
        ) from error
    model.eval()
    return model


def _with_adapters(model: PreTrainedModel, adapters: Mapping[str, Path]) -> Callable[[str | None], None]:
    """Put PEFT adapters into the model; returns what switches one on, or with None all of them off."""
    from peft import PeftModel  # noqa: PLC0415 - only for adapters

    wrapped: Any = None
    for name, directory in adapters.items():
        try:
            if wrapped is None:
                wrapped = PeftModel.from_pretrained(model, str(directory), adapter_name=name)
            else:
                wrapped.load_adapter(str(directory), adapter_name=name)
        except Exception as error:  # a foreign or damaged adapter raises errors of any type
            raise UserError(
                f"{directory}: cannot load the adapter: {type(error).__name__}: {first_sentence(error)}",
                "serve it with the model that it was trained on",
            ) from error
    wrapped.eval()
    current: list[str | None] = []

    def switch(name: str | None) -> None:
        if current == [name]:
            return
        if name is None:
            wrapped.base_model.disable_adapter_layers()
        else:
            wrapped.base_model.enable_adapter_layers()
            wrapped.set_adapter(name)
        current[:] = [name]

    return switch


def _checked(name: str, text: str) -> str:
    """Raises HttpError for lone surrogates, which no tokenizer encodes."""
    try:
        prompts.check_unicode(text)
    except RowError as error:
        raise HttpError(400, f"{name}: {error.problem}") from error
    return text
