"""The quickstart's real input: the rows and the tiny model that the kit ships."""

import importlib
import json
import math
import re
import runpy
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hyperpod_ft.config import run_file
from hyperpod_ft.config.sections.training import Training
from hyperpod_ft.data.mixing.mixture import Examples, draw
from hyperpod_ft.data.text import prompts

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
MODEL = QUICKSTART / "tiny-llama"


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODEL / name).read_text(encoding="utf-8"))
    return content


def read_rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (QUICKSTART / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of the example; they import each other."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(QUICKSTART))
        return importlib.import_module(name)

    return load


@pytest.fixture
def rows() -> list[dict[str, str]]:
    return read_rows("requests.jsonl")


def flags_of(row: dict[str, str]) -> dict[str, str]:
    return dict(flag.removeprefix("--").split("=") for flag in row["flags"].split(" "))


def test_the_rows_are_what_their_script_makes(script: Any, rows: list[dict[str, str]]) -> None:
    assert script("make_data").rows(17) == rows
    assert script("make_preferences").preferences() == read_rows("preferences.jsonl")
    assert script("make_preferences").feedback() == read_rows("feedback.jsonl")


def test_the_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    """But for how their pixels are compressed."""
    shipped = QUICKSTART.parent / "pictures" / "colors"
    draw = runpy.run_path(str(shipped.with_name("make_pictures.py")))["write"]
    rows = draw(tmp_path, 100, questions=("color",))
    assert (tmp_path / "rows.jsonl").read_bytes() == (shipped / "rows.jsonl").read_bytes()
    drawn, kept = ({path.name: pixels(path) for path in (of / "images").iterdir()} for of in (tmp_path, shipped))
    assert drawn == kept and len(rows) == len(drawn)


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def test_the_quickstart_is_validated_on_rows_that_differ_from_all_others(rows: list[dict[str, str]]) -> None:
    """Of each kind 32: a pair of values, or a phrasing, that no row to learn from has. No name occurs twice."""
    config = run_file.load(run_file.find("quickstart"))
    drawn = draw([Examples.of_rows(len(rows))], config.dataset.validation_share, config.seed)
    unseen = [rows[row] for row in drawn.validation[0].tolist()]
    learned = [rows[row] for row in drawn.train.tolist()]
    assert [row["unseen"] for row in unseen].count("pair") == [row["unseen"] for row in unseen].count("phrasing") == 32
    assert len(unseen) == config.generate.validation_samples == 64
    assert not any("unseen" in row for row in learned)

    def pairs(row: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
        return set(combinations([item for item in flags_of(row).items() if item[0] != "job-name"], 2))

    seen = set().union(*map(pairs, learned))
    assert all(pairs(row) - seen for row in unseen if row["unseen"] == "pair")
    beginnings = {" ".join(row["request"].split()[:2]) for row in learned}
    assert all(" ".join(row["request"].split()[:2]) not in beginnings for row in unseen if row["unseen"] == "phrasing")
    names = [name for row in rows if (name := flags_of(row).get("job-name"))]
    assert len(names) == len(set(names)) > 300


def test_the_base_model_read_nothing_that_is_held_out(script: Any, rows: list[dict[str, str]]) -> None:
    """Nor did it ever read flags as an answer."""
    texts, grammar = script("base_texts").Texts(17), script("make_data").Grammar(0)
    made = [document for _ in range(60) for document in texts.documents()]
    assert not any("--" in answer for prompt, answer in made if prompt)
    unseen = {row["request"] for row in rows if "unseen" in row}
    assert unseen.isdisjoint(prompt for prompt, _ in made)
    names = {flags_of(row).get("job-name") for row in rows} - {None}
    assert names.isdisjoint(re.findall(r"\w+", " ".join(answer for prompt, answer in made if prompt)))
    read = [flags_of({"flags": prompt}) for prompt, _ in made if prompt.startswith("--")]
    assert len(read) > 300 and not any(
        grammar.held_out_pairs.intersection(combinations(flags.items(), 2)) for flags in read
    )
    new = r"get it going|queue this up|please start|let me know|for up to|limited to"
    assert not [prompt for prompt, _ in made if re.search(new, prompt, re.IGNORECASE)]


def test_the_base_models_chats_are_the_quickstarts_prompts(rows: list[dict[str, str]]) -> None:
    dataset = run_file.load(run_file.find("quickstart")).dataset
    chat = [{"role": "user", "content": rows[0]["request"]}]
    rendered = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(chat, tokenize=False)
    assert rendered == "<|bos|>" + prompts.prompt(dataset, rows[0])
    assert read_rows("preferences.jsonl")[0]["prompt"] in {prompts.prompt(dataset, row) for row in rows}


def test_each_kind_of_unseen_rows_is_counted(script: Any, rows: list[dict[str, str]]) -> None:
    pair, phrasing = (
        next(row["request"] + "\n" for row in rows if row.get("unseen") == kind) for kind in ("pair", "phrasing")
    )
    answers = [(pair, "validation", True), (phrasing, "validation", False), (rows[0]["request"], "train", True)]
    samples = [{"prompt": p, "split": split, "base_exact": False, "tuned_exact": exact} for p, split, exact in answers]
    assert script("count_unseen").lines(samples) == [
        "exact answers, unseen pairs of values: base 0/1, tuned 1/1",
        "exact answers, unseen phrasings: base 0/1, tuned 0/1",
    ]


def test_the_model_divides_over_two_ranks_and_can_be_served() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    # vLLM's attention kernels take heads of 32 elements and more
    assert config["head_dim"] == config["hidden_size"] // config["num_attention_heads"] == 32
    # what servers pass to the model; without it transformers assumes token_type_ids too
    assert read_json("tokenizer_config.json")["model_input_names"] == ["input_ids", "attention_mask"]
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size", "vocab_size"):
        assert config[key] % 2 == 0, key
    assert config["max_position_embeddings"] >= 512


def test_the_special_tokens_agree() -> None:
    config, generation, tokenizer = (
        read_json(name) for name in ("config.json", "generation_config.json", "tokenizer.json")
    )
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = read_json("special_tokens_map.json")
    for kind in ("bos", "eos", "pad"):
        assert config[f"{kind}_token_id"] == generation[f"{kind}_token_id"] == ids[special[f"{kind}_token"]]
    assert len(tokenizer["model"]["vocab"]) == config["vocab_size"]


TEXTS = {
    "English": "It was a bright cold day in the middle of winter, and the clocks were striking twelve. Margaret pulled"
    " her coat tighter and walked along the river, thinking about what her brother had said the night before.",
    "questions": "Question: What is the capital of France?\nAnswer: Paris\nQuestion: How old is it?\nAnswer: 8",
    "German": "Am nächsten Morgen ging die Großmutter über den Marktplatz, kaufte Brötchen und erzählte dem Bäcker von"
    " ihrer Reise nach Österreich. Das Wetter war trüb, doch die Kinder spielten fröhlich im Hof.",
    "Chinese": "春天来了，花园里的花都开了。孩子们在草地上奔跑，老人们坐在长椅上聊天。今天的天气非常好，阳光明媚。",
    "digits": "102.5,33.1,-7.25,880\n97.0,12.9,4.75,1024\n55.5,61.3,18.25,4096\n13.0,99.8,-2.5,65536\n",
    "code": Path(json.__file__).read_text(encoding="utf-8")[-2000:],
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_model_is_not_far_worse_than_guessing_on_foreign_text(text: str) -> None:
    """Otherwise training on a user's own file stops at step 1 (engines/sanity.py)."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < math.log(model.config.vocab_size) + Training().sanity_margin / 2
