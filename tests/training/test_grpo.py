"""GRPO: the prompts that reach the model, restarts, and what becomes of functions that fail."""

import json
import os
import signal
from contextlib import nullcontext
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GenerationMixin

from hyperpod_ft import heartbeat
from hyperpod_ft.config import run_file
from hyperpod_ft.config.sections.rewards import Reward
from hyperpod_ft.data.prepared import Prompt, Prompts, open_split, write_prompts
from hyperpod_ft.data.tokenizer import prompt_ids
from hyperpod_ft.engines.batches import DataOrder
from hyperpod_ft.engines.throughput import throughput
from hyperpod_ft.engines.trl import prompts
from hyperpod_ft.engines.trl.prompts import RewardFunction, with_prompts
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.trl import rules
from hyperpod_ft.rewards.process import NoRewardError
from hyperpod_ft.runs.job_files import NOTICE
from hyperpod_ft.runs.results import sampled_answers
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import dataset, download, reward, stage
from tests.tasks import task_of
from tests.training.conftest import Jobs, curve, descendants, metrics, tiny_llama, train_here
from tests.training.test_trl import again_from
from tests.unit import tiny_tokenizer
from tests.unit.stage_runs import finish
from tests.waiting import wait_for

pytestmark = pytest.mark.training
FUNCTION = "def long(prompt, completion, *, answer, **columns): return len(completion) / len(answer)\n"
TEXTS = [{"prompt": f"how many {word}s", "answer": word * 9} for word in ("clip", "fox", "context", "brown", "quick")]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in TEXTS]


def made(tmp_path: Path, rows: list[dict[str, Any]], settings: dict[str, Any] | None = None) -> Run:
    """A run of these rows with a tiny model."""
    tokenizer, model = tiny_tokenizer.make(), tmp_path / "model"
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(tiny_llama(vocab_size=len(tokenizer))).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(FUNCTION)
    values: dict[str, Any] = {
        "name": "run",
        "engine": "trl",
        "cluster": {"root": str(tmp_path / "root"), "instance_type": "local"},
        "model": {"source": str(model)},
        "dataset": {"source": "./rows.jsonl", "format": "prompt", "max_length": 48, "validation_share": 0},
        "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
        "sampling": {"generations": 4, "max_completion_length": 6, "beta": 0.1},
        "reward": [{"function": "rewards.py:long"}, {"function": "json", "weight": -1}],
        "training": {"objective": "grpo", "precision": "fp32", "micro_batch_size": 4, "gradient_accumulation_steps": 2},
        "parallelism": {"ranks_per_node": 1},
    }
    for section, changes in (settings or {}).items():
        values[section] = changes if isinstance(changes, list) else values.get(section, {}) | changes
    return Run.of(run_file.resolve(run_file.validate(values, "run"), tmp_path))


def prepared(tmp_path: Path, rows: list[dict[str, Any]], settings: dict[str, Any] | None = None) -> Run:
    """A run whose stages before `train` are done."""
    run = made(tmp_path, rows, settings)
    run.paths.directory.mkdir(parents=True, exist_ok=True)
    run.freeze()
    finish(run, "env")
    finish(run, "certify")
    for each in (download, dataset, reward):
        if (name := each.__name__.rpartition(".")[2]) in run.plan:
            stage.perform(run, name, each.work)
    return run


def in_order(run: Run, steps: int) -> list[list[int]]:
    """The tokens of the prepared prompts, in the order of the seed, each for all its answers."""
    split, order = open_split(run.paths.dataset_path / "train"), DataOrder(5, 42, 2, 2, 1)
    lengths = (split.position_ids[:, ::-1] == 0).argmax(1)  # padding begins again at 0
    numbers = [int(row) for step in range(1, steps + 1) for row in order.step(step) for _ in range(4)]
    return [split.input_ids[row][: 48 - 1 - lengths[row]].tolist() for row in numbers]


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["text", "chat"])
def test_prompts_reach_the_model_as_prepared(
    tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, in the order of the seed, each for all its answers; and a server would render the same."""
    asked: list[list[int]] = []
    beats: list[float] = []
    generate = GenerationMixin.generate

    def watched(self: Any, **given: Any) -> Any:
        pairs = zip(given["input_ids"], given["attention_mask"], strict=True)
        asked.extend(ids[mask.bool()].tolist() for ids, mask in pairs)
        before = len(beats)
        answers = generate(self, **given)
        assert len(beats) - before == answers.shape[1] - given["input_ids"].shape[1], "a sign of each token"
        return answers

    monkeypatch.setattr(GenerationMixin, "generate", watched)
    monkeypatch.setattr(heartbeat, "beat", lambda *_: beats.append(0.0))
    run = prepared(tmp_path, rows, {"training": {"max_steps": 3}})
    train_here(run)
    stored = in_order(run, 3)
    assert asked == stored
    tokenizer = tiny_tokenizer.make()
    served = [
        tokenizer(row["prompt"])["input_ids"]
        if isinstance(row["prompt"], str)
        else tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        for row in rows
    ]
    assert sorted(map(tuple, served)) == sorted(set(map(tuple, stored)))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": " "}, r"rows\.jsonl:6 \(empty prompt"),
        (
            {"prompt": "fox " * 99},
            r"rows\.jsonl:6 \(longer than max_length: .* or for long ones raise dataset\.max_length$",
        ),
        ({"prompt": CHATS[0]["prompt"]}, "the prompt is .*, others are "),
        ({"prompt": "a", "images": ["a.png"]}, "does not use column images"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        prepared(tmp_path, [*TEXTS, row])


def test_text_has_bos_once_and_no_eos() -> None:
    """As in the prepared rows, whatever the tokenizer adds."""
    tokenizer, texts = tiny_tokenizer.make(), ["how many clips", "<s>how many clips"]
    tokenizer.add_bos_token, tokenizer.add_eos_token = True, True
    stored = [prompt_ids(tokenizer, text) for text in texts]
    assert [tokenizer(text)["input_ids"] for text in texts] != stored
    stored_rows: Any = [Prompt(text, False, {}, "rows.jsonl line 1") for text in texts]
    given = with_prompts(Dataset.from_dict({"row": [0, 1]}), stored_rows, tokenizer)[:]["prompt"]
    assert tokenizer(text=given)["input_ids"] == stored


def test_rewards_get_every_column_but_those_that_are_ignored(tmp_path: Path) -> None:
    row = {"prompt": "how many clips", "answer": "clips", "note": "\ud800", "images": ["a.png"]}
    run = prepared(tmp_path, [row] * 2, {"dataset": {"ignored_columns": ["images"]}})
    assert Prompts(run.paths.dataset_path / "train")[0].columns == {"answer": "clips", "note": "\ud800"}
    other = Prompt("a", False, {"day": date(2026, 1, 2), "price": Decimal("1.50")}, "rows.parquet row 1")
    write_prompts(run.paths.dataset_path, "train", [other])
    assert Prompts(run.paths.dataset_path / "train")[0].columns == {"day": "2026-01-02", "price": "1.50"}


def test_a_function_that_fails_is_found_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^reward\.0\.function: long raises TypeError: .*'answer'; .* rows.jsonl"):
        prepared(tmp_path, [{"prompt": "how many clips"}] * 2)


def test_a_prompt_without_the_column_of_a_function_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "how many clips", "answer": "clips"}, {"prompt": "how many foxes"}]
    changes = {"reward": [{"function": "exact_match", "column": "answer"}]}
    with pytest.raises(UserError, match=r"^reward\.0\.column: .*rows\.jsonl:2 has no column 'answer'"):
        prepared(tmp_path, rows, changes)


@pytest.mark.parametrize(
    ("answer", "rewarded"), [("Paris", False), (r"\frac{1}{2}", True), ("6 x 3 = 18 #### 18", True)]
)
def test_math_verify_needs_a_column_of_mathematics(tmp_path: Path, answer: str, rewarded: bool) -> None:
    """It would give 0 for every answer."""
    changes = {"reward": [{"function": "math_verify", "column": "answer"}]}
    said = r"^reward\.0\.column: math_verify rewards no answer that is the expected one, such as 'Paris' of "
    with nullcontext() if rewarded else pytest.raises(UserError, match=said):
        prepared(tmp_path, [{"prompt": "how many foxes", "answer": answer}], changes)


@pytest.mark.parametrize(("objective", "method"), [("grpo", "lora"), ("grpo", "full"), ("rloo", "lora")])
def test_a_restart_changes_no_answer_and_no_reward(tmp_path: Path, objective: str, method: str) -> None:
    training = {"objective": objective, "method": method, "max_steps": 6, "save_every_steps": 2, "learning_rate": 1e-2}
    run = prepared(tmp_path, TEXTS, {"training": training})
    facts = train_here(run).facts
    names = ("reward", "rewards/long/mean", "rewards/json/mean", "kl", "completions/mean_length")
    whole = [[row[name] for name in names] for row in metrics(run)], curve(run)
    assert facts["reward"] == whole[0][-1][0]
    assert whole[0][0][3] == pytest.approx(0, abs=1e-6) and abs(whole[0][1][3]) > 1e-4  # against the model before
    assert throughput(task_of(run), 2, 256, 1000).flops_per_token is None
    answered = round(sum(row["completions/mean_length"] for row in metrics(run)) * 8)
    assert facts["tokens"] == sum(map(len, in_order(run, 6))) + answered, "those of prompts and answers"
    rate, seconds = facts["tokens_per_second"], facts["seconds"]
    assert abs(rate * seconds - facts["tokens"]) < rate * 0.0005 + seconds * 0.05 + 0.001, "rounded to 0.1 and 0.001"
    answers, asked = sampled_answers.read(run.paths.sampled_answers), Prompts(run.paths.dataset_path / "train")
    assert [one.step for one in answers] == [1, 2, 3, 4, 5, 6]
    for one in answers:
        prompt = asked[int(DataOrder(5, 42, 2, 2, 1).step(one.step)[0])]
        assert one.prompt == prompt.text and one.rewards["long"] == len(one.answer) / len(prompt.columns["answer"])
    again_from(run, 4)
    again = train_here(run).facts
    assert (again["resumed_from"], again["tokens"]) == ([4], facts["tokens"])
    assert ([[row[name] for name in names] for row in metrics(run)], curve(run)) == whole
    assert sampled_answers.read(run.paths.sampled_answers) == answers


def killed_then_noticed(jobs: Jobs, run: Run) -> tuple[list[int], str]:
    """Kill one of two ranks after step 3, start both again, and send them the notice of the time limit after step 5.

    Returns the pids of all processes, and what the second attempt printed.
    """
    processes, printed = [], ""
    for step, number, of in ((3, signal.SIGKILL, slice(1, 2)), (5, NOTICE, slice(0, 2))):
        job = jobs.start_held(run, after_step=step)
        below = descendants(job.process.pid)
        ranks = sorted(pid for pid in below if descendants(pid))  # each has a process for its rewards
        assert len(ranks) == 2
        processes += below
        for pid in ranks[of]:
            os.kill(pid, number)
        assert job.wait() == 1, job.text()
        printed = job.text()
    return processes, printed


def test_two_ranks_go_on_after_a_kill_and_stop_at_a_notice(tmp_path: Path, trl_jobs: Jobs) -> None:
    """They are asked what one rank would be, but sample by seeds of their own (TRL), so that answers differ."""
    asked = tmp_path / "asked"
    settings = {
        "reward": [{"function": "asked.py:asked"}],
        "training": {"micro_batch_size": 2, "max_steps": 8, "save_every_steps": 2, "learning_rate": 1e-2},
        "parallelism": {"ranks_per_node": 2},
    }
    (tmp_path / "asked.py").write_text(
        f"def asked(prompt, completion, *, answer, **columns):\n    with open({str(asked)!r}, 'a') as file:\n"
        "        file.write(answer + chr(10))\n    return len(completion) / len(answer)\n"
    )
    run = prepared(tmp_path, TEXTS, settings)
    trl_jobs.environment |= rules.variables(run.config, tmp_path)
    asked.unlink()
    trl_jobs.train(run)
    whole, answers = (curve(run), [row["reward"] for row in metrics(run)]), asked.read_text().splitlines()
    rows, order = Prompts(run.paths.dataset_path / "train"), DataOrder(5, 42, 2, 2, 1)
    for step in range(8):
        wanted = [rows[row].columns["answer"] for row in order.step(step + 1).tolist() for _ in range(4)]
        assert sorted(answers[8 * step : 8 * step + 8]) == sorted(wanted)

    again_from(run, 0)
    run.paths.metrics_path.unlink()
    processes, stopped = killed_then_noticed(trl_jobs, run)
    assert "SIGUSR1: stopped after step 6, which is saved" in stopped
    trl_jobs.train(run)
    record = run.journal.record("train")
    assert record is not None and record.facts["resumed_from"] == [2, 6]
    assert (curve(run), [row["reward"] for row in metrics(run)]) == whole
    wait_for(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()])


def test_an_answer_without_reward_is_named_and_all_of_a_step_end_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(prompt: str, completion: str, columns: dict[str, Any]) -> float:
        if completion == "bad":
            raise NoRewardError("raises KeyError: 'x'")
        return 1.0

    class Texts:
        def batch_decode(self, ids: list[str], **_: Any) -> list[str]:
            return ids

    rows = [Prompt("p", False, {}, f"rows.jsonl line {line}") for line in (1, 2)]
    scored: Any = RewardFunction(0, Reward(function="json"), process, rows, Texts())  # type: ignore[arg-type]
    assert scored(completion_ids=["good", "bad"], row=[0, 1]) == [1.0, None]
    assert "reward.0: json raises KeyError: 'x'; the answer 'bad' to rows.jsonl line 2" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^reward\.0\.function: json raises KeyError: 'x'; the answer 'bad' to rows"):
        scored(completion_ids=["bad", "bad"], row=[0, 1])
    # another rank has an answer with a reward
    monkeypatch.setattr(prompts, "gather_object", lambda found: [*found, True])
    assert scored(completion_ids=["bad"], row=[0]) == [None]
