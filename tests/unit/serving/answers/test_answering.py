"""Several answers at once from one process: turns, seeds, stop texts, encoder-decoders, models without a template."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperpod_ft.checkpoint.formats import model_directory, pretrained
from hyperpod_ft.config.sections.inputs import Dataset
from hyperpod_ft.data import chat_template
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.errors import UserError
from hyperpod_ft.evaluation import greedy
from hyperpod_ft.serving.answers.answering import Answering
from hyperpod_ft.serving.answers.decoding import device_named
from hyperpod_ft.serving.http.openai_api import HttpError, Request
from hyperpod_ft.serving.markup import parts
from hyperpod_ft.serving.markup.parts import Part
from tests.unit import tiny_checkpoints, tiny_t5, tiny_tokenizer

CPU = torch.device("cpu")


def asked(prompt: "str | Sequence[int] | None" = "the quick", **changes: Any) -> Request:
    values: dict[str, Any] = {"prompt": tuple(prompt) if isinstance(prompt, list) else prompt, "max_tokens": 12}
    return Request(**values | changes)


def nowhere(_: object) -> None: ...


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.base_model(tmp_path_factory.mktemp("base") / "tiny", spread=0.4)


@pytest.fixture(scope="module")
def answering(base: Path) -> Answering:
    return Answering.load({"tiny": base}, {}, base, CPU)


def test_a_short_answer_does_not_wait_for_a_long_one(answering: Answering) -> None:
    """The second question is asked, and answered, between two tokens of the first answer."""
    alone = answering.answer(asked(), nowhere).text
    meanwhile: list[str] = []
    tokens = 0

    def count(_: object) -> None:
        nonlocal tokens
        tokens += 1
        if tokens == 3:
            thread = threading.Thread(target=lambda: meanwhile.append(answering.answer(asked(), nowhere).text))
            thread.start()
            thread.join(300)

    long = answering.answer(asked("how many", max_tokens=40), count)
    assert meanwhile == [alone] and tokens >= 3
    assert long.text == answering.answer(asked("how many", max_tokens=40), nowhere).text


def test_an_answer_that_nobody_reads_frees_the_model(answering: Answering) -> None:
    def gone(_: object) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        answering.answer(asked(), gone)
    other = threading.Thread(target=answering.answer, args=(asked(), nowhere))
    other.start()
    other.join(300)
    assert not other.is_alive()


def test_a_seed_repeats_an_answer_whatever_else_is_asked(answering: Answering) -> None:
    drawn = asked(temperature=1.5, seed=7)
    alone = answering.answer(drawn, nowhere).text
    texts = {answering.answer(asked(temperature=1.5, seed=seed), nowhere).text for seed in range(5)}
    assert len(texts) > 1
    between = answering.answer(
        drawn, lambda _: answering.answer(asked(temperature=1.5, max_tokens=1), nowhere) and None
    )
    assert between.text == alone
    assert answering.answer(asked(temperature=1.5, top_p=0.0), nowhere).text == answering.answer(asked(), nowhere).text


def test_sampling_follows_the_models_chances(base: Path, answering: Answering) -> None:
    model = pretrained.load(base, "auto").eval()
    with torch.inference_mode():
        chances = torch.softmax(model(torch.tensor([[0, 40]])).logits[0, -1], -1)
    drawn = [answering.answer(asked([0, 40], temperature=1, max_tokens=1, seed=n), nowhere).text for n in range(300)]
    text_of = tokenizers.load(base).backend_tokenizer.decode
    expected = text_of([int(chances.argmax())])
    # several tokens are parts of characters, which look the same
    wanted = float(sum(chance for token, chance in enumerate(chances) if text_of([token]) == expected))
    share = drawn.count(expected) / len(drawn)
    assert abs(share - wanted) < 4 * (wanted * (1 - wanted) / len(drawn)) ** 0.5 + 0.02


def test_a_stop_text_ends_the_answer(answering: Answering) -> None:
    whole = answering.answer(asked(), nowhere).text
    mark = whole[4:6]
    pieces: list[Part] = []
    found = answering.answer(asked(stop=(mark,)), pieces.extend)
    assert found.text == whole[: whole.index(mark)] == parts.content(pieces) and found.finish_reason == "stop"
    assert found.completion_tokens < 12


def test_the_limit_ends_the_answer(answering: Answering) -> None:
    found = answering.answer(asked(max_tokens=3), nowhere)
    assert (found.finish_reason, found.completion_tokens) == ("length", 3)
    with pytest.raises(HttpError, match="room for 256"):
        answering.answer(asked([5] * 256), nowhere)
    assert answering.answer(asked([5] * 250, max_tokens=None), nowhere).completion_tokens <= 6
    with pytest.raises(HttpError, match="no tokens"):
        answering.answer(asked([]), nowhere)


def test_ids_outside_the_vocabulary_are_refused(base: Path, answering: Answering) -> None:
    known = pretrained.load(base, "auto").config.vocab_size
    assert answering.answer(asked([known - 1], max_tokens=1), nowhere).prompt_tokens == 1
    for outside in (known, 1 << 70):
        with pytest.raises(HttpError, match=f"token id {outside}; the ids of tiny are 0 to {known - 1}") as caught:
            answering.answer(asked([5, outside]), nowhere)
        assert caught.value.status == 400


def test_a_base_model_is_not_asked_with_the_tuned_models_new_tokens(base: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.load(base)
    known = pretrained.load(base, "auto").config.vocab_size
    tokenizer.add_tokens([f"<new {number}>" for number in range(known - len(tokenizer) + 1)])
    tokenizer.save_pretrained(tmp_path)
    answering = Answering.load({"tiny": base}, {}, tmp_path, CPU)
    with pytest.raises(HttpError, match=f"token id {known};"):
        answering.answer(asked(f"the {tokenizer.convert_ids_to_tokens(known)}"), nowhere)


def test_the_least_temperature_still_draws(answering: Answering) -> None:
    """Smaller ones are refused: their quotients are no numbers."""
    coldest = answering.answer(asked(temperature=1e-6, seed=1), nowhere).text
    assert coldest == answering.answer(asked(), nowhere).text


def test_an_error_that_the_device_survives_is_no_failure(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")

    answering = Answering.load({"tiny": base}, {}, base, CPU)
    monkeypatch.setattr(answering._models["tiny"].model, "generate", broken)
    with pytest.raises(RuntimeError, match="device-side"):
        answering.answer(asked(), nowhere)
    assert answering.failure == ""
    monkeypatch.setattr(torch, "ones", broken)  # the device computes nothing any more
    with pytest.raises(RuntimeError, match="device-side"):
        answering.answer(asked(), nowhere)
    assert answering.failure == "CUDA error: device-side assert triggered"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is false")
def test_a_gpu_that_is_lost_is_noticed(base: Path) -> None:
    """In a process of its own, which can use the GPU no more."""
    program = (
        "import sys, torch\nfrom pathlib import Path\n"
        "from hyperpod_ft.serving.answers.answering import Answering\n"
        "from tests.unit.serving.answers.test_answering import asked, nowhere\n"
        "base = Path(sys.argv[1])\n"
        "answering = Answering.load({'tiny': base}, {}, base, torch.device('cuda'))\n"
        "answering._vocabulary['tiny'] = 1 << 40\n"  # as if it were not checked
        "try:\n    answering.answer(asked([1 << 30]), nowhere)\n"
        "except RuntimeError:\n    print(answering.failure)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(base)], capture_output=True, text=True, check=True)
    assert "CUDA error" in done.stdout


def test_an_encoder_decoder_answers_as_stage_generate(tmp_path: Path) -> None:
    t5 = tiny_t5.save(tmp_path / "t5", ["Which command submits a job? It is sbatch."] * 8)
    dataset = Dataset(source="org/data", format="prompt-completion", max_target_length=16)
    made = chat_template.of(dataset, t5)
    assert made is not None
    model_directory.set_chat_template(t5, made.text)
    answering = Answering.load({"t5": t5}, {}, t5, CPU)
    tokenizer = tokenizers.load(t5)
    ids = tokenizers.source_ids(tokenizer, "Which command?")
    (expected,) = greedy.answers(pretrained.load(t5, "auto").eval(), tokenizer, [ids], 12)
    assert answering.answer(asked("Which command?"), nowhere).text == expected.text
    question = ({"role": "user", "content": "Which command?"},)
    chat = answering.answer(asked(None, messages=question), nowhere)
    assert (chat.text, chat.prompt_tokens) == (expected.text, len(ids))
    for long in (asked([5] * 16385), asked([5], max_tokens=16384)):
        with pytest.raises(HttpError, match="room for 16384"):
            answering.answer(long, nowhere)
    # an endpoint's memory is checked for prompt and answer together
    limited = Answering.load({"t5": t5}, {}, t5, CPU, max_length=len(ids) + 12)
    assert limited.answer(asked("Which command?"), nowhere).text == expected.text
    with pytest.raises(HttpError, match=f"max_tokens 13; t5 has room for {len(ids) + 12}"):
        limited.answer(asked("Which command?", max_tokens=13), nowhere)


def test_without_a_chat_template_the_reason_is_given(base: Path, tmp_path: Path) -> None:
    question = asked(None, messages=({"role": "user", "content": "a"},))
    tiny_tokenizer.save(tmp_path / "none", tiny_tokenizer.make(chat_template=None))
    answering = Answering.load({"tiny": base}, {}, tmp_path / "none", CPU)
    with pytest.raises(HttpError, match=r"no chat template; .*completions"):
        answering.answer(question, nowhere)
    template = {"format": "template", "prompt_template": "{{ a }} {{ b }}", "completion_template": "{{ c }}"}
    refusing = chat_template.of(Dataset(source="org/data", **template), base)
    assert refusing is not None
    model_directory.set_chat_template(tmp_path / "none", refusing.text)
    answering = Answering.load({"tiny": base}, {}, tmp_path / "none", CPU)
    assert not answering.chats
    with pytest.raises(HttpError, match=r"a and b.*completions"):
        answering.answer(question, nowhere)


def test_a_damaged_adapter_is_one_line(base: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load the adapter"):
        Answering.load({"tiny": base}, {"mine": tmp_path}, base, CPU)


def test_a_device_that_is_not_there() -> None:
    assert device_named("cpu") == CPU
    for name in ("nonsense", *(["cuda"] if not torch.cuda.is_available() else [])):
        with pytest.raises(UserError, match=f"--device {name}"):
            device_named(name)
