"""The form of a model's tool calls, found from its chat template, and vLLM's options for it."""

import json
from pathlib import Path

import pytest

from hyperpod_ft.data.text import answer_format
from hyperpod_ft.data.text.answer_format import AnswerFormat

# What marks each, as it stands in the published templates.
QWEN_2_5 = (
    r"""{{- "For each function call, return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n"""
)
QWEN_2_5 += r"""{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}"""
QWEN_3 = r"""{{- '<tool_call>\n{"name": "' }}{%- set content = message.content.split('</think>')[-1] %}"""
HERMES_2_PRO = """<tool_call>
{"arguments": <args-dict>, "name": <function-name>}
</tool_call>"""
QWEN_3_CODER = r"""{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}"""
QWEN_3_5 = QWEN_3_CODER + r"""{{- '<think>\n\n</think>\n\n' }}"""
LLAMA_3 = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its"""
GLM = r"""<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>{{ '<think></think>' }}"""
MINIMAX = r"""<minimax:tool_call>\n<invoke name="tool-name-1">"""
CHATML = r"""{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"""


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN_2_5, "hermes", False),
        (QWEN_3, "hermes", True),
        (HERMES_2_PRO, "hermes", False),
        (QWEN_3_CODER, "qwen3_coder", False),
        (QWEN_3_5, "qwen3_coder", True),
        (LLAMA_3, "llama3_json", False),
        (GLM, None, True),
        (MINIMAX, None, False),
        (CHATML, None, False),
        (QWEN_2_5 + LLAMA_3, None, False),
        ("", None, False),
    ],
)
def test_a_template_tells_the_form(template: str, tools: answer_format.ToolFormat | None, reasoning: bool) -> None:
    found = answer_format.of_template(template)
    assert found == AnswerFormat(tools, reasoning)
    assert ("not parsed" in found.description) == (tools is None)


def test_vllm_is_told_the_form() -> None:
    assert AnswerFormat("qwen3_coder", reasoning=True).vllm_options == {
        "enable-auto-tool-choice": "true",
        "tool-call-parser": "qwen3_coder",
        "reasoning-parser": "qwen3",
    }
    assert "reasoning-parser" not in AnswerFormat("hermes").vllm_options
    assert AnswerFormat(None, reasoning=True).vllm_options == {}, "DeepSeek's and GLM's are other parsers"


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    assert answer_format.of_model(tmp_path) == AnswerFormat()
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES_2_PRO}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert answer_format.of_model(tmp_path).tools == "hermes"
    (tmp_path / "chat_template.jinja").write_text(LLAMA_3)
    assert answer_format.of_model(tmp_path).tools == "llama3_json", "the file is read instead"
