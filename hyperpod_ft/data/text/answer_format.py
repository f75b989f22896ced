"""How a model writes what is not text for the reader: tool calls, and reasoning. Its chat template shows it.

A template writes earlier answers in the form that the model was taught, and most tell the model this form as well.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperpod_ft.checkpoint.formats import model_directory

# As vLLM names its parsers.
ToolFormat = Literal["hermes", "qwen3_coder", "llama3_json"]

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"  # Llama's, before what an interpreter is given

# A template has its texts as Jinja's strings: line breaks and quotes may be escaped there.
_MARKS: dict[ToolFormat, re.Pattern[str]] = {
    "hermes": re.compile(rf'{CALL}(?:\\n|\s)*\{{\\*"(?:name|arguments)\\*"'),
    "qwen3_coder": re.compile(rf"{CALL}(?:\\n|\s)*<function="),
    "llama3_json": re.compile(r'\{\\*"name\\*": function name, \\*"parameters\\*": '),
}
_DESCRIBED: dict[ToolFormat, str] = {
    "hermes": "JSON in <tool_call>, as Hermes and Qwen 3 write it",
    "qwen3_coder": "XML in <tool_call>, as Qwen3-Coder and Qwen 3.5 write it",
    "llama3_json": "JSON, as Llama 3 writes it",
}


@dataclass(frozen=True)
class AnswerFormat:
    """`tools`: the form of calls, None if it is not known. `reasoning`: an answer may begin with <think>."""

    tools: ToolFormat | None = None
    reasoning: bool = False

    @property
    def description(self) -> str:
        """How a server reads calls, for its user."""
        if self.tools is None:
            return "not parsed, since the chat template has none of the known forms"
        return _DESCRIBED[self.tools]

    @property
    def vllm_options(self) -> dict[str, str]:
        """vLLM's options for it, without their dashes; a switch is "true"."""
        if self.tools is None:
            return {}
        options = {"enable-auto-tool-choice": "true", "tool-call-parser": self.tools}
        if self.reasoning and self.tools != "llama3_json":
            options["reasoning-parser"] = "qwen3"
        return options


def of_template(text: str) -> AnswerFormat:
    """The format of a chat template, given as its Jinja text."""
    found = [tools for tools, mark in _MARKS.items() if mark.search(text)]
    # a template with several forms lets the request choose one: its answers cannot be predicted
    return AnswerFormat(found[0] if len(found) == 1 else None, THINK_END in text)


def of_model(directory: Path) -> AnswerFormat:
    """The format of the chat templates in a model's or tokenizer's directory."""
    return of_template("\n".join(model_directory.chat_templates(directory)))
