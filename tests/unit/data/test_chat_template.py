"""Chat templates that are published: for every dataset format they give the tokens of training, or refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Regex, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.conversations import templates
from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import chat_template, tokenization
from hyperpod_ft.data.encoder import Encoder
from hyperpod_ft.data.text import prompts
from tests.unit import tiny_t5, tiny_tokenizer

TINY_LLAMA = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "tiny-llama"
TEMPLATE = {
    "format": "template",
    "prompt_template": "  {# a comment #}Q: {{ question | upper }}\n\n{%- if question %}\n  'yes' \\n{% endif %}\n"
    "A:{% raw %}{{x}}{% endraw %}\n",
    "completion_template": "{{ answer }}",
}
WITH_SYSTEM = {
    "format": "template",
    "prompt_template": "{% if system %}<|im_start|>{{ system }}<|im_end|>\n{% endif %}{{ prompt }}\n",
    "completion_template": "{{ answer }}",
}
# a dataset's section, and the row of a question and a context
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, str], dict[str, str]]]] = {
    "dolly": ({"format": "dolly"}, lambda asked, context: {"instruction": asked, "context": context}),
    "alpaca": ({"format": "alpaca"}, lambda asked, context: {"instruction": asked, "input": context}),
    "prompt-completion": ({"format": "prompt-completion"}, lambda asked, _: {"prompt": asked}),
    "template": (TEMPLATE, lambda asked, _: {"question": asked}),
    "with system": (WITH_SYSTEM, lambda asked, context: {"prompt": asked, "system": context}),
}
HAS_CONTEXT = ("dolly", "alpaca", "with system")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories with tokenizers of every kind."""
    top = tmp_path_factory.mktemp("models")
    tiny_tokenizer.save(top / "without-bos", tiny_tokenizer.make(adds_bos=False))
    tiny_tokenizer.save(top / "with-bos", tiny_tokenizer.make(chat_template=None))
    tiny_t5.save(top / "t5", ["Which command submits a job? Slurm is a workload manager. It is sbatch."] * 8)
    return {"tiny-llama": TINY_LLAMA} | {path.name: path for path in sorted(top.iterdir())}


def dataset_of(values: dict[str, Any], model: str) -> Dataset:
    return Dataset(source="org/data", **values | ({"max_target_length": 64} if model == "t5" else {}))


def asked_ids(model: Path, text: str, question: str, context: str) -> list[int]:
    """By transformers, as servers do it, with the template in the directory's own file."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = text
    messages = [{"role": "system", "content": context}] * bool(context) + [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def trained_ids(model: Path, dataset: Dataset, row: dict[str, str]) -> list[int]:
    """The prompt's ids in a row of training: all but those of the answer, which is a single word, and EOS."""
    encoder = Encoder.load(model, chat=False)
    example = prompts.joined(prompts.prompt(dataset, row), "sbatch")
    ids = tokenization.tokenize([example], dataset, encoder).ids.tolist()
    answer = [*encoder.backend.encode(["sbatch"]).ids.tolist(), encoder.eos]
    assert ids[-len(answer) :] == answer
    return ids[: -len(answer)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", ["tiny-llama", "without-bos", "with-bos", "t5"])
def test_a_question_has_the_tokens_of_training(model: str, name: str, models: dict[str, Path]) -> None:
    values, row_of = FORMATS[name]
    dataset = dataset_of(values, model)
    made = chat_template.of(dataset, models[model])
    assert made is not None and not made.refusal, made
    for question in ("Which command submits a job?", " \n{{ x }} 'ä' \"b\" \\n 東京\n"):
        for context in ("", "Slurm has nodes.\n", " \n") if name in HAS_CONTEXT else ("",):
            expected = trained_ids(models[model], dataset, row_of(question, context))
            assert asked_ids(models[model], made.text, question, context) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_any_question_renders_as_its_prompt(name: str) -> None:
    values, row_of = FORMATS[name]
    dataset = dataset_of(values, "tiny-llama")
    made = chat_template.of(dataset, TINY_LLAMA)
    assert made is not None
    text = made.text

    @settings(max_examples=50, deadline=None)
    @given(question=st.text(min_size=1).filter(str.strip), context=st.text() if name in HAS_CONTEXT else st.just(""))
    def check(question: str, context: str) -> None:
        messages = [{"role": "system", "content": context}] * bool(context) + [{"role": "user", "content": question}]
        rendered = chat_template.render(text, messages, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
        assert rendered == "<|bos|>" + prompts.prompt(dataset, row_of(question, context))

    check()


def test_a_prompt_that_begins_with_bos_has_one(models: dict[str, Path]) -> None:
    dataset = dataset_of({**TEMPLATE, "prompt_template": "<|bos|>Q: {{ question }}\n"}, "tiny-llama")
    made = chat_template.of(dataset, TINY_LLAMA)
    assert made is not None and not made.refusal
    ids = asked_ids(TINY_LLAMA, made.text, "what?", "")
    assert ids == trained_ids(TINY_LLAMA, dataset, {"question": "what?"}) and ids.count(0) == 1


def test_earlier_turns_are_rows_of_their_own(models: dict[str, Path]) -> None:
    dataset = dataset_of({"format": "dolly"}, "tiny-llama")
    made = chat_template.of(dataset, TINY_LLAMA)
    assert made is not None
    turns = [("user", "a?"), ("assistant", "b"), ("user", "c?")]
    text = chat_template.render(
        made.text, [{"role": role, "content": content} for role, content in turns], {"bos_token": "B", "eos_token": "E"}
    )
    assert text == "B### Instruction\na?\n\n### Answer\nbE### Instruction\nc?\n\n### Answer\n"
    with pytest.raises(TemplateError, match="user and assistant in turn"):
        chat_template.render(made.text, [{"role": "user", "content": "a"}] * 2, {})


@pytest.mark.parametrize(
    ("prompt_template", "reason"),
    [
        ("{{ question }} {{ hint }}", "hint and question"),
        ("no field", "no fields"),
        ("{{ messages }}", "field 'messages'"),
        ("{{ question | tojson }}", "filter tojson"),
        ("{% block a %}{{ question }}{% endblock %}", "prompt_template"),
    ],
)
def test_what_has_no_form_as_messages_is_refused_with_the_reason(prompt_template: str, reason: str) -> None:
    dataset = dataset_of({**TEMPLATE, "prompt_template": prompt_template}, "tiny-llama")
    made = chat_template.of(dataset, TINY_LLAMA)
    assert made is not None and reason in made.refusal
    with pytest.raises(TemplateError, match="/v1/completions"):
        asked_ids(TINY_LLAMA, made.text, "what?", "")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_tokenizer_that_begins_texts_with_a_space(scheme: str, tmp_path: Path) -> None:
    """`first`: as those of Llama 2 and Mistral: a text begins with a space, unless a special token comes before it."""
    made = chat_template.of(dolly := dataset_of({"format": "dolly"}, "llama-2"), metaspace(tmp_path / "model", scheme))
    assert made is not None and not made.refusal and ("bos_token + ' '" in made.text) == (scheme == "first")
    expected = trained_ids(tmp_path / "model", dolly, {"instruction": "Which command?"})
    assert asked_ids(tmp_path / "model", made.text, "Which command?", "") == expected


def test_a_tokenizer_that_encodes_text_behind_bos_differently_is_refused(tmp_path: Path) -> None:
    strip = normalizers.Replace(Regex("^#"), "first ")
    model = metaspace(tmp_path / "model", "first", normalizers.Sequence([strip]))
    made = chat_template.of(dataset_of({"format": "dolly"}, "odd"), model)
    assert made is not None and "next to BOS" in made.refusal


def metaspace(directory: Path, scheme: str, normalizer: normalizers.Normalizer | None = None) -> Path:
    library = tiny_t5.tokenizer(["### Instruction\n### Answer\nWhich command submits a job? It is sbatch. first"] * 8)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if normalizer is not None:
        library.normalizer = normalizer
    library.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="</s>", eos_token="</s>", unk_token="<unk>")
    tiny_tokenizer.save(directory, tokenizer)
    return directory


@pytest.mark.parametrize("name", ["chat", "text", "preference", "unpaired-preference"])
def test_other_formats_leave_the_base_models_own(name: str) -> None:
    assert chat_template.of(Dataset(source="org/data", format=name), TINY_LLAMA) is None


def test_a_model_without_a_tokenizer_loses_its_template_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made = chat_template.of(dataset_of({"format": "dolly"}, "none"), tmp_path)
    assert made is not None and "no usable tokenizer" in made.refusal


def test_the_published_file_is_the_only_template(tmp_path: Path) -> None:
    tiny_tokenizer.save(tmp_path, tiny_tokenizer.make())
    (tmp_path / "chat_template.json").write_text("{}")
    model_directory.set_chat_template(tmp_path, "{{- 'new' -}}")
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "{{- 'new' -}}"
    assert sorted(path.name for path in tmp_path.glob("chat_template*")) == ["chat_template.jinja"]
    assert "chat_template" not in (tmp_path / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gptoss", "nemotron_3_nano", "glm4moe", "llama3_1"])
def test_settings_of_the_run_are_the_tuned_models_defaults(tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {"enable_thinking": False, "reasoning_effort": "low", "budget": 3}
    tokenizer: Any = tiny_tokenizer.make(templates()[name])
    tiny_tokenizer.save(tmp_path, tokenizer)
    config = Dataset(source="./rows.jsonl", format="chat", chat_template_kwargs=values)
    made = chat_template.of(config, tmp_path)
    assert made is not None and "enable_thinking: false" in chat_template.describe(made, config)
    messages, options = [{"role": "user", "content": "Hi"}], {"tokenize": False, "add_generation_prompt": True}
    wanted = tokenizer.apply_chat_template(messages, **options, **values)
    other = tokenizer.apply_chat_template(messages, **options, enable_thinking=True, reasoning_effort="low")
    tuned: Any = tiny_tokenizer.make(made.text)
    assert tuned.apply_chat_template(messages, **options) == wanted
    assert tuned.apply_chat_template(messages, **options, enable_thinking=True) == other
