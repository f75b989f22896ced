"""The account of node-hours, and what `status` and `compare` show of a training, from records written by hand."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

from hyperpod_ft import publish
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import LatestMetrics, RunStatus, StageStatus, status
from hyperpod_ft.runs.records import Record, unix_time, utc_now
from hyperpod_ft.runs.results import holdings, places, slowest_rank, training_summary, usage
from hyperpod_ft.runs.results.samples import AnswerCount
from hyperpod_ft.runs.results.slowest_rank import SlowestRank
from hyperpod_ft.runs.results.training_summary import steps
from hyperpod_ft.runs.run import Run
from tests.conftest import MakeRun
from tests.programs import call
from tests.waiting import wait_for

TRN1 = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "parallelism": {"tensor_parallel": 8}}
# the 2024 article's LoRA run, as its record would say it
FACTS = {
    "trainable_parameters": 6_815_744,
    "steps": 942,
    "rows_per_second": 3.554,
    "documents_per_second": 14.2,
    "tokens_per_second": 7278.6,
    "mfu": 0.0801,
    "seconds_per_step": 3.37,
    "seconds": 3180.0,
    "warm_up_seconds": 61.2,
    "attempts": 2,
    "node_hours": 1.0,
    "accelerator_hours": 16.0,
    "cost": 21.5,
    "first_loss": 2.1,
    "final_loss": 1.3,
}


def finish(run: Run, stage: str, facts: dict[str, Any]) -> None:
    Record(stage, run.plan[stage].fingerprint, {}, (), facts, utc_now(), 90.0, "test", "").write(
        run.paths.record_path(stage)
    )


def add(run: Run, number: int, seconds: float) -> None:
    started, ran = f"2026-01-01T00:00:0{number}Z", ("trn1.32xlarge", "dp 8 x tp 8", 64, 1, "a", None)
    attempt = usage.Usage("1", started, seconds, 2, 32, *ran)
    publish.write_json(run.paths.usage_path / f"{number}.json", asdict(attempt))


def test_hours_and_cost_over_all_attempts(make_run: MakeRun) -> None:
    run = make_run(**TRN1, cluster__nodes=2, cluster__price_per_node_hour=20.0)
    add(run, 1, 1800.0)
    add(run, 2, 900.0)
    add(run, 3, 900.0)
    written = json.loads((run.paths.usage_path / "3.json").read_bytes())
    publish.write_text(run.paths.usage_path / "4.json", "{")
    for name in ("instance_type", "degrees"):  # another user may write what controls a terminal
        publish.write_json(run.paths.usage_path / f"{name}.json", written | {name: "\x1b[2J"})
    known = holdings.facts(run)
    totals = {"attempts": 3, "node_hours": 2.0, "accelerator_hours": 32.0, "cost": 40.0}
    assert {name: known[name] for name in totals} == totals
    other_type = replace(usage.read(run.paths)[0], job_id="2", nodes=1, seconds=3600.0, instance_type="p5.48xlarge")
    for price, cost in {50.0: 90.0, None: None}.items():
        priced = replace(other_type, price_per_node_hour=price)
        publish.write_json(run.paths.usage_path / "5.json", asdict(priced))
        assert holdings.facts(run)["cost"] == cost, "each type at its own price"
    finish(run, "train", FACTS | {"places": [{"step": 1, "nodes": 1, "instance_type": "p5.48xlarge", "degrees": ""}]})
    assert training_summary.require(run).cost == FACTS["cost"]
    (run.paths.usage_path / "5.json").unlink()
    free = make_run(**TRN1, cluster__nodes=2)
    assert free.paths.directory == run.paths.directory, "a price makes no other run"
    assert holdings.facts(free)["cost"] is None


def test_where_it_ran_is_said_once_it_changed(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(**TRN1, cluster__nodes=2)
    add(run, 1, 1.0)
    rows = [{"step": step, "time": unix_time("2026-01-01T00:00:01Z") + step / 10} for step in (1, 2)]
    before_all = {"step": 0, "time": rows[0]["time"] - 10}
    publish.write_text(run.paths.metrics_path, "".join(f"{json.dumps(row)}\n" for row in (before_all, *rows)))
    assert [str(place) for place in places.read(run.paths)] == ["2 x trn1.32xlarge (dp 8 x tp 8)"]
    show_runs.status(status(run, Launchers()))
    assert "trained on" not in capsys.readouterr().out
    moved = replace(usage.read(run.paths)[0], started="2026-01-01T00:00:03Z", nodes=1, degrees="dp 4 x tp 8")
    publish.write_json(run.paths.usage_path / "3.json", asdict(moved))
    with run.paths.metrics_path.open("a") as stream:
        stream.writelines(f"{json.dumps(row | {'step': row['step'] + 2, 'time': row['time'] + 3})}\n" for row in rows)
    current = status(run, Launchers())
    assert [place.step for place in current.places] == [1, 3]
    slow = SlowestRank("7", 3, 0, "node1", True, 1.2, 1.0)
    for step in (2, 3):
        slowest_rank.add(run.paths.slowest_ranks, replace(slow, step=step))
    current = status(run, Launchers())
    show_runs.status(current)
    said = "trained on 2 x trn1.32xlarge (dp 8 x tp 8), from step 3: 1 x trn1.32xlarge (dp 4 x tp 8)\n"
    assert f"{said}{slow}\n" in capsys.readouterr().out
    finish(run, "train", FACTS | {"places": [asdict(place) for place in current.places]})
    expected = "2 x trn1.32xlarge, from step 3: 1 x trn1.32xlarge (dp 4 x tp 8)"
    assert training_summary.require(run).instances == expected
    finish(run, "train", FACTS | {"places": [asdict(replace(current.places[0], degrees="\x1b[2J"))]})
    assert training_summary.require(run).instances == "2 x trn1.32xlarge"
    finish(run, "train", FACTS | {"places": [{"step": "x"}]})
    assert training_summary.require(run).instances == "2 x trn1.32xlarge", "as it would run now"
    readable = status(run, Launchers())
    run.paths.metrics_path.unlink()
    run.paths.metrics_path.mkdir()
    assert status(run, Launchers()) == replace(readable, places=(), slow_ranks=())


def test_an_attempt_is_counted_whatever_ends_it(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERPOD_FT_JOB_ID", "77")
    run = make_run()
    with pytest.raises(RuntimeError), usage.recording_usage(run):
        time.sleep(0.05)
        raise RuntimeError
    (attempt,) = usage.read(run.paths)
    assert attempt.seconds >= 0.05 and (attempt.job_id, attempt.nodes) == ("77", 1)
    assert attempt.accelerators == 0 and holdings.facts(run)["accelerator_hours"] is None
    assert not [thread for thread in threading.enumerate() if thread.name == "usage"]


def test_an_attempt_that_is_killed_is_counted_until_then(make_run: MakeRun) -> None:
    run = make_run()
    run.freeze()
    program = (
        "import sys, time; from pathlib import Path\n"
        "from hyperpod_ft.runs.results import usage; from hyperpod_ft.runs.run import Run\n"
        "usage._EVERY_SECONDS = 0.05\n"
        "with usage.recording_usage(Run.open(Path(sys.argv[1]))): time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(run.paths.directory)])
    try:
        wait_for(lambda: any(attempt.seconds >= 0.1 for attempt in usage.read(run.paths)), process=process)
    finally:
        process.kill()
        process.wait()
    (attempt,) = usage.read(run.paths)
    assert attempt.seconds >= 0.1


def test_summaries_come_from_valid_records(make_run: MakeRun) -> None:
    run = make_run(**TRN1)
    assert training_summary.summary_of(run) is None
    finish(run, "train", FACTS)
    exact = {"train": {"rows": 8, "base": 1, "tuned": 6}, "validation": {"rows": 0, "base": 0, "tuned": 0}}
    pattern = {"validation": {"rows": 4, "base": 0, "tuned": 3}}
    scores = {
        "base": {"rouge_1": 0.5, "rouge_2": 0, "rouge_l": 0.25},
        "tuned": dict.fromkeys(("rouge_1", "rouge_2", "rouge_l"), 1.0),
    }
    facts = {"exact_match": exact, "pattern_match": pattern, "rouge": {"train": {"rows": 8, **scores}}}
    finish(run, "generate", facts)
    finish(run, "precompile", {})
    found = training_summary.summary_of(run)
    assert found is not None
    assert (found.method, found.instances, found.precompile_seconds) == ("lora", "1 x trn1.32xlarge", 90.0)
    assert found.exact_train == AnswerCount(8, 1, 6) and found.exact_validation is None
    assert found.pattern_validation == AnswerCount(4, 0, 3) and found.pattern_train is None
    assert ("answers by pattern, validation", "3/4 (base 0)") in training_summary.table([found])
    assert ("ROUGE-1/2/L, train", "1.000/1.000/1.000 (base 0.500/0.000/0.250)") in training_summary.table([found])
    assert {name: getattr(found, name) for name in FACTS} == FACTS
    priced = training_summary.summary_of(make_run(**TRN1, cluster__price_per_node_hour=30.0))
    assert priced is not None and priced.cost == 30.0, "a price may be given after the training"
    record = run.journal.record("train")
    assert record is not None
    replace(record, fingerprint="other").write(run.paths.record_path("train"))
    assert training_summary.summary_of(run) is None


def test_a_record_before_all_has_fewer(make_run: MakeRun) -> None:
    run = make_run()
    finish(run, "train", {"steps": 4, "tokens_per_second": 100.0, "seconds": 60.0})
    found = training_summary.summary_of(run)
    assert found is not None and training_summary.line(found) == "100 tokens/s, 1.0 min"
    _head, *lines = training_summary.table([found])
    assert [name for name, _ in lines] == ["method", "instances", "steps", "tokens/s", "minutes"]


def test_several_sources_have_validation_losses(make_run: MakeRun) -> None:
    run = make_run()
    finish(run, "train", FACTS | {"validation_loss/chats": 1.5, "validation_loss/books": 2.25})
    found = training_summary.summary_of(run)
    assert found is not None
    cells = dict(list(training_summary.table([found]))[1:])
    assert cells["final validation loss, chats"] == "1.5000" and cells["final validation loss, books"] == "2.2500"


def test_preferences_have_rewards(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(training__objective="dpo", dataset__format="preference")
    rewards = {"rewards/margins": 1.5, "rewards/accuracies": 0.75, "validation_rewards/accuracies": 0.7}
    finish(run, "train", FACTS | rewards)
    found = training_summary.summary_of(run)
    assert found is not None
    cells = dict(list(training_summary.table([found]))[1:])
    assert cells["rewards/margins"] == "1.5000" and cells["rewards/accuracies"] == "75.0%"
    assert cells["validation rewards/accuracies"] == "70.0%" and "validation rewards/margins" not in cells
    training = StageStatus("train", "running", "1:02", "4")
    current = RunStatus("test", "/root/runs/test/1", "/root/merged", "running", (training,))
    show_runs.status(replace(current, training=LatestMetrics(3, 9, 0.6, None, reward_accuracy=0.75)))
    assert "step 3/9  loss 0.6000  rewards/accuracies 75.0%" in capsys.readouterr().out


def test_status_of_a_training_at_work_has_its_newest_rates(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    training = StageStatus("train", "running", "1:02 trn-1", "4")
    current = RunStatus("test", "/root/runs/test/1", "/root/merged", "running", (training,))
    current = replace(current, training=LatestMetrics(12, 300, 2.31, 7278.6, 3.554, 0.0801))
    show_runs.status(current)
    assert "step 12/300  loss 2.3100  7,279 tokens/s  MFU 8.0%  3.55 rows/s  1:02 trn-1" in capsys.readouterr().out
    assert current.as_dict()["training"]["total_steps"] == 300


def test_status_has_them_once_trained(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(**TRN1)
    assert status(run, Launchers()).training_summary is None
    finish(run, "train", FACTS)
    current = status(run, Launchers())
    show_runs.status(current)
    assert "\ntrained: 3.554 rows/s, 7,279 tokens/s, MFU 8.0%" in capsys.readouterr().out
    assert current.training_summary is not None
    assert training_summary.line(current.training_summary) == (
        "3.554 rows/s, 7,279 tokens/s, MFU 8.0%, 3.370 s/step, 53.0 min, 16.00 accelerator-hours, cost 21.50"
    )
    assert json.loads(json.dumps(current.as_dict()))["training_summary"]["cost"] == 21.5


def compare(*arguments: str, expect: int = 0) -> str:
    done = call("compare", *arguments, COLUMNS="200")
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stderr if expect else done.stdout


def test_compare_prints_the_table_of_the_article(make_run: MakeRun) -> None:
    lora, full = make_run(**TRN1), make_run(**TRN1, training__method="full")
    for run in (lora, full):
        run.freeze()
    finish(lora, "train", FACTS)
    refused = compare(str(lora.paths.directory), str(full.paths.directory), expect=2)
    assert (
        refused.startswith(f"error: {full.paths.directory}: ")
        and f"hyperpod-ft status {full.paths.directory}" in refused
    )
    slower = {"trainable_parameters": 8_030_261_248, "rows_per_second": 2.083, "seconds": 5400.0, "cost": None}
    finish(full, "train", FACTS | slower)
    head, differs, *lines = compare(str(lora.paths.directory), str(full.paths.directory)).splitlines()
    names = [f"test/{lora.plan.run_id}", f"test/{full.plan.run_id}"]
    assert head.split()[-2:] == lines.pop(0).split() == names
    assert differs.split() == ["training.method", "lora", "full"]
    rows = {line[:26].strip(): line[26:].split() for line in lines}
    assert rows["method"] == ["lora", "full"]
    assert rows["trainable parameters"] == ["6,815,744", "8,030,261,248"]
    assert rows["rows/s"] == ["3.554", "2.083"]
    assert rows["minutes"] == ["53.0", "90.0"]
    assert rows["cost"] == ["21.50"]
    assert "exact answers, train" not in rows, "generate has not run"
    values = json.loads(compare(str(lora.paths.directory), str(full.paths.directory), "--json"))
    assert values["settings"] == {"training.method": ["lora", "full"]}
    assert values["runs"][0]["accelerator_hours"] == 16.0 and [run["run"] for run in values["runs"]] == names


def test_text_where_a_number_belongs_is_a_number_that_is_not_known(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(cluster__price_per_node_hour=20.0)
    run.freeze()
    finish(run, "dataset", {"train_rows": "many"})
    finish(run, "train", {**FACTS, "final_loss": "1.3", "node_hours": "1", "mfu": [0.1]})
    finish(run, "generate", {"exact_match": {"train": {"rows": "two"}}})
    found = training_summary.summary_of(run)
    assert found is not None
    assert (found.final_loss, found.mfu, found.cost, found.exact_train) == (None, None, 21.5, None)
    assert steps(run) is None
    show_runs.status(status(run, Launchers()))
    assert "trained: 3.554 rows/s" in capsys.readouterr().out
