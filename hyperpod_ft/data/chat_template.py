"""The chat template of a tuned model: a question is written as the rows of its dataset were in training.

Servers ask a model through the template in its directory. That of the base model is not what was trained, unless the
rows were chats. `of` makes one for each dataset format, and proves it on token ids before anything is published.

Templates use the parts of Jinja that other engines know too (minijinja, llama.cpp's), and write all text as string
literals: transformers trims line breaks after blocks, Jinja's default does not.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hyperpod_ft.config.sections.inputs import TEXT_OR_MESSAGES, Dataset
from hyperpod_ft.data import tokenization, tokenizer
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.text import prompts
from hyperpod_ft.errors import UserError

_SYSTEM = "system"
_NOTHING = "''"
# Names that servers give to chat templates, or that the templates below use.
_TAKEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "loop"),
    *("bos_token", "eos_token", "pad_token", "unk_token", "chat_turns", "chat_turn", "chat_prompt"),
}
_REDEFINED = "tojson"  # a filter: transformers has its own
# Questions that the proof asks: line breaks and spaces at the edges, Jinja's own marks, quotes, other scripts.
_QUESTIONS = (
    "Which command submits a job?",
    "  two lines,\n\nthe second one indented:\n    x = {{ 7 * 7 }} {% if %} 'a' \"b\" \\n\n",
    "Größe 東京 😀 <s> </s> ### Answer",
    "?",
)
_CONTEXTS = ("", "Slurm is a workload manager.\nIt has nodes.")
_ANSWER = "It is sbatch."


class _NoTemplateError(Exception):
    """Why there can be none for this dataset."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template to publish; `refusal` is why it only refuses questions, empty when it writes the training prompt."""

    text: str
    refusal: str = ""


@dataclass(frozen=True)
class _Form:
    """How one dataset format writes a question: Jinja that prints the prompt, and the fields of a row.

    `question` and `system` are the names of the fields that the user's and the system message fill; `system` is empty
    where rows have no such field.
    """

    body: str
    question: str
    system: str


def of(dataset: Dataset, model: Path) -> ChatTemplate | None:
    """The template for a model that was trained on this dataset, from the base model `model`.

    None where the base model's own stays: the rows were chats, which it wrote; preferences or prompts, which refine a
    model that already answers; or texts without questions. With `chat_template_kwargs`, it begins with them as
    defaults. Where no list of messages gives the training prompt, the template refuses every question with the reason.
    """
    if dataset.format in ("chat", "text", *TEXT_OR_MESSAGES):
        return _with_defaults(dataset.chat_template_kwargs, model) if dataset.chat_template_kwargs else None
    try:
        encoder = Encoder.load(model, chat=False)
        return ChatTemplate(_proved(dataset, _form(dataset), encoder, _special_tokens(encoder, model)))
    # days of training must not be lost because of the template
    except (_NoTemplateError, UserError) as error:
        reason = f"{error}: send the whole prompt to /v1/completions instead"
        refusing = _literal(f"This model has no chat template: {reason}.")
        return ChatTemplate(f"{{{{- raise_exception({refusing}) -}}}}\n", reason)


def _with_defaults(values: Mapping[str, str | int | float | bool], model: Path) -> ChatTemplate | None:
    """The model's own template, in which a server's request has these values unless it names others."""
    own: Any = tokenizer.load(model)
    if not isinstance(own.chat_template, str):  # several, of which a request chooses
        return None
    defaults = ""
    for name, value in values.items():
        literal = _literal(value) if isinstance(value, str) else json.dumps(value)
        defaults += f"{{% set {name} = {name} if {name} is defined else {literal} %}}"
    return ChatTemplate(defaults + own.chat_template)


def describe(template: ChatTemplate | None, dataset: Dataset) -> str:
    """What the template does, for logs and model cards."""
    if template is None:
        return "the base model's own"
    if dataset.may_have_messages:
        values = ", ".join(f"{name}: {json.dumps(value)}" for name, value in dataset.chat_template_kwargs.items())
        return f"the base model's own, by default with {values}"
    return f"none: {template.refusal}" if template.refusal else f"writes a question as rows of format {dataset.format}"


def _form(dataset: Dataset) -> _Form:
    if dataset.format == "dolly":
        return _of_texts(prompts.DOLLY, prompts.DOLLY_CONTEXT, "context")
    if dataset.format == "alpaca":
        return _of_texts(prompts.ALPACA, prompts.ALPACA_INPUT, "input")
    if dataset.format == "prompt-completion":
        return _Form("{{- question -}}", "question", "")
    return _of_template(dataset.prompt_template or "")


def _of_texts(without: str, with_context: str, context: str) -> _Form:
    """Two texts of str.format: one with the field `instruction`, one with `context` too, unless that is blank."""
    longer, shorter = _formatted(with_context), _formatted(without)
    body = f"{{%- if {context}.strip() -%}}{longer}{{%- else -%}}{shorter}{{%- endif -%}}"
    return _Form(body, "instruction", context)


def _formatted(text: str) -> str:
    """Jinja for a text of str.format."""
    parts = []
    for literal, field, _, _ in Formatter().parse(text):
        parts.append(_literal(literal))
        if field:
            parts.append(field)
    return "{{- " + " + ".join(parts) + " -}}"


def _of_template(source: str) -> _Form:
    """The user's own prompt_template, of one field, or of one and `system`."""
    environment = jinja2.Environment(keep_trailing_newline=True, autoescape=False)  # noqa: S701 - only parsed
    parsed = environment.parse(source)
    fields = jinja2.meta.find_undeclared_variables(parsed)
    questions = sorted(fields - {_SYSTEM})
    if len(questions) != 1:
        named = " and ".join(questions) or "no fields"
        raise _NoTemplateError(f"it was trained with a prompt_template of {named}, and a question is one text")
    if taken := sorted(fields & _TAKEN):
        raise _NoTemplateError(f"its prompt_template has a field {taken[0]!r}, which chat templates use themselves")
    if any(used.name == _REDEFINED for used in parsed.find_all(jinja2.nodes.Filter)):
        raise _NoTemplateError(
            f"its prompt_template uses the filter {_REDEFINED}, which chat templates define differently"
        )
    written = {"block_begin": "{%- ", "block_end": " -%}", "variable_begin": "{{- ", "variable_end": " -}}"}
    parts = []
    comment = False
    for _, kind, value in environment.lex(source):
        comment = kind == "comment_begin" or (comment and kind != "comment_end")
        if kind == "data":
            parts.append("{{- " + _literal(value) + " -}}")
        elif kind in written:
            parts.append(written[kind])
        elif not comment and kind not in ("comment_end", "raw_begin", "raw_end"):
            parts.append(value)
    return _Form("".join(parts), questions[0], _SYSTEM if _SYSTEM in fields else "")


def _proved(dataset: Dataset, form: _Form, encoder: Encoder, special: Mapping[str, str]) -> str:
    """The template that gives the ids of training. Raises _NoTemplateError when none does."""
    # Llama 2's tokenizer begins a text with a space, but not after BOS
    openings = ("bos_token", "bos_token + ' '") if encoder.bos else (_NOTHING,)
    for opening in openings:
        text = _template(dataset, form, opening)
        try:
            _prove(text, dataset, form, encoder, special)
        except _NoTemplateError:
            if opening == openings[-1]:
                raise
        else:
            return text
    raise AssertionError


def _template(dataset: Dataset, form: _Form, opening: str) -> str:
    """The whole template: each question as one training prompt, each answer followed by EOS.

    `opening`: Jinja for what comes before the first prompt, unless that begins with BOS itself.
    """
    alone = dataset.max_target_length is not None  # an encoder reads one question
    system = (
        f"{{%- set {form.system} = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}}"
        "{%- set chat_turns = messages[1:] if messages[0]['role'] == 'system' else messages -%}"
        if form.system
        else "{%- set chat_turns = messages -%}"
    )
    roles = "user and assistant in turn" + (", after a system message if there is one" if form.system else "")
    begun = f"{{{{- {opening} if loop.first and chat_prompt[:bos_token | length] != bos_token else '' -}}}}"
    lines = [
        f"{{#- Writes a question as the rows of format {dataset.format} were written in training. -#}}",
        system,
        *(
            [_raise_unless("chat_turns | length == 1", "this model answers one question: send no earlier messages")]
            * alone
        ),
        "{%- for chat_turn in chat_turns -%}",
        _raise_unless(
            "chat_turn['role'] == ('user' if loop.index0 % 2 == 0 else 'assistant')", f"messages must be from {roles}"
        ),
        "{%- if chat_turn['role'] == 'user' -%}",
        f"{{%- set {form.question} = chat_turn['content'] -%}}",
        f"{{%- set chat_prompt -%}}{form.body}{{%- endset -%}}",
        f"{begun if opening != _NOTHING else ''}{{{{- chat_prompt -}}}}{'{{- eos_token -}}' if alone else ''}",
        "{%- else -%}",
        "{{- chat_turn['content'] + eos_token -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
    ]
    return "\n".join(lines) + "\n"


def _raise_unless(condition: str, message: str) -> str:
    return f"{{%- if not ({condition}) -%}}{{{{- raise_exception({_literal(message)}) -}}}}{{%- endif -%}}"


def _literal(text: str) -> str:
    """A string literal that every engine of Jinja reads the same."""
    escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "'" + "".join(escapes.get(character, character) for character in text) + "'"


def _prove(text: str, dataset: Dataset, form: _Form, encoder: Encoder, special: Mapping[str, str]) -> None:
    """Ask questions, and compare text and ids with those of rows in training. Raises _NoTemplateError."""
    for question in _QUESTIONS:
        for context in _CONTEXTS if form.system else _CONTEXTS[:1]:
            row = {_field(dataset, form): question} | ({form.system: context} if form.system else {})
            messages = [{"role": "system", "content": context}] * bool(context) + [
                {"role": "user", "content": question}
            ]
            try:
                prompt = prompts.prompt(dataset, row)
                asked = render(text, messages, special)
            except Exception as error:  # the user's expressions may raise anything
                raise _NoTemplateError(f"its prompt_template cannot be part of one ({error})") from error
            if prompt not in asked:
                raise _NoTemplateError("its prompt_template renders differently as part of one")
            trained = tokenization.tokenize([prompts.joined(prompt, _ANSWER)], dataset, encoder).ids
            ids = encoder.backend.encode([asked, _ANSWER]).ids
            if [*ids.tolist(), encoder.eos] != trained.tolist():
                raise _NoTemplateError("its tokenizer encodes a prompt next to BOS or EOS differently than by itself")


def _field(dataset: Dataset, form: _Form) -> str:
    return "prompt" if dataset.format == "prompt-completion" else form.question


def render(template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
    """A chat template's text, as transformers renders it to ask for an answer (utils/chat_template_utils.py).

    Raises what the template raises.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _special_tokens(encoder: Encoder, model: Path) -> dict[str, str]:
    """BOS and EOS as text."""
    if encoder.tokenizer is not None:
        values: Mapping[str, Any] = encoder.tokenizer.special_tokens_map
    else:
        values = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {name: values.get(name) for name in ("bos_token", "eos_token")}
    return {name: str(token["content"] if isinstance(token, dict) else token) for name, token in named.items() if token}
