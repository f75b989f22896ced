"""What a report reads from a run's files, and the text of its page."""

import doctest
import html
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hyperpod_ft import publish
from hyperpod_ft.cli.main import app
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.status import RunStatus, status
from hyperpod_ft.report import comparison, facts, headings, numbers
from hyperpod_ft.report.charts import charts
from hyperpod_ft.report.comparison import differences
from hyperpod_ft.report.gather import gather
from hyperpod_ft.report.page import report_page, runs_page
from hyperpod_ft.runs import attempts
from hyperpod_ft.runs.attempts import Attempt
from hyperpod_ft.runs.records import utc_now
from hyperpod_ft.runs.results import sampled_answers, slowest_rank, usage
from hyperpod_ft.runs.results.evaluation import Compared, EvaluationResult, Metric, Score
from hyperpod_ft.runs.results.goodput import Lost
from hyperpod_ft.runs.results.sampled_answers import SampledAnswer
from hyperpod_ft.runs.results.samples import RecordedAnswers, Rouge, RougeScores, SampledRow, Samples, Split
from hyperpod_ft.runs.results.slowest_rank import SlowestRank
from hyperpod_ft.runs.run import Run
from tests.unit.report.recorded_run import SPIKE, recorded_run


def data_of(page: str) -> dict[str, object]:
    """The data of the charts, as the page's script finds it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return {chart["name"]: chart for chart in json.loads(found[1])["charts"]}


def test_a_restart_is_marked_and_its_cost_is_counted(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    report = gather(run)
    (point,) = report.resume_points
    assert (point.step, point.seconds, point.lost_steps) == (60, 18.0, 5)
    assert point.reason == "rank 1: SIGKILL at step 65"
    held = report.held
    assert held is not None and report.accelerators is not None
    training = [(span.start, span.end) for span in report.timeline if span.activity == "training"]
    assert [(round(start), round(end)) for start, end in training] == [(15, 35), (60, 80)]
    assert held.node_seconds == held.seconds == pytest.approx(87.0), "from the job's start to its end"
    assert held.parts == {
        **{"step": 38.0, "start": 30.0, "validation": 3.0, "save": 5.0, "end": 4.0},
        **{"waiting": 0.0, "other": 0.0},
    }
    assert held.lost == [Lost("rank 1: SIGKILL at step 65", 7.0)], "with the time until that was noticed"
    assert held.pending == 0.0, "its job has only waited for other stages"
    assert held.cost == pytest.approx(87 / 3600 * 7.2)
    current = status(run, Launchers())
    assert current.held == held and current.goodput == pytest.approx(held.goodput, abs=1e-4)
    # the record was written before its job ended
    known = current.training_summary
    assert known and known.goodput == current.goodput
    assert known.node_hours == pytest.approx(held.node_hours, abs=1e-4) and known.cost == pytest.approx(
        held.cost, abs=1e-4
    )
    assert "held 1 node for 1 min 27 s, goodput 44%; 1 restart, 5 steps trained again" in headings.timeline(report)
    page = " ".join(report_page([report]).split())
    assert f"{numbers.number(held.node_hours)} node-hours" in page.split("<h2")[0], "the tile"
    assert "steps that count 44%; starting and loading 34%; a restart (rank 1: SIGKILL at step 65) 8.0%;" in page


def test_a_restart_from_the_nodes_memory_costs_fewer_steps(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    record = run.journal.record("train")
    assert record
    replace(record, facts=record.facts | {"resumed_from": [64]}).write(run.paths.record_path("train"))
    report = gather(run)
    assert [(point.step, point.lost_steps) for point in report.resume_points] == [(64, 1)]
    assert "1 restart, 1 step trained again" in headings.timeline(report)


def test_a_change_of_place_is_marked(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    second = usage.read(run.paths)[1]
    publish.write_json(run.paths.usage_path / "50.json", asdict(replace(second, nodes=2, degrees="dp 2 x tp 1")))
    report = gather(run)
    assert "training held up to 2 nodes for " in headings.timeline(report)
    assert headings.cost(report) == "Training cost 0.17: 0.0242 node-hours at 7.20 each"
    (loss,) = (chart for chart in charts([report]) if chart.name == "loss")
    restart, moved = loss.marks
    assert restart.label.startswith("resumed from step 60")
    assert moved.label == "from step 61: 2 x local (dp 2 x tp 1)" and moved.x["step"] == 61.0
    assert set(moved.x) == set(restart.x)


def test_the_slowest_rank_has_a_chart_and_is_named(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    assert "slowest_rank" not in {chart.name for chart in charts([gather(run)])}
    rows = [SlowestRank("5", 50 * number, 8 * (number % 9), f"node{number % 9}", True, 1.0, 1.0) for number in range(9)]
    rows += [replace(rows[0], step=450), *(replace(rows[2], step=step, seconds=1.5) for step in (500, 525))]
    rows += [replace(rows[0], step=425), replace(rows[0], step=450)]  # after a restart
    for row in rows:
        slowest_rank.add(run.paths.slowest_ranks, row)
    with run.paths.slowest_ranks.open("a") as stream:  # numbers whose quotient no float holds
        stream.write(json.dumps(asdict(replace(rows[0], step=550, seconds=1e300, others=1e-300))) + "\n")
    report = gather(run)
    page = report_page([report])
    chart: Any = data_of(page)["slowest_rank"]
    assert [series["label"] for series in chart["series"]] == ["node0", *(f"node{n}" for n in range(1, 7)), "any other"]
    node0, _, node2, *_, other = chart["series"]
    assert (node0["x"]["step"], node0["y"]) == ([0, 425, 450], [0, 0, 0])
    assert (node2["x"]["step"], node2["y"]) == ([100, 500, 525], [0, 50, 50])
    assert other["x"]["step"] == [350, 400]
    assert f"Seen while it trained: {report.slow_ranks[0]}." in page and "rank 16 on node2 is slow: " in page


def test_headings_say_what_was_found(tmp_path: Path) -> None:
    report = gather(recorded_run(tmp_path))
    assert report.state == "done"
    assert headings.loss(report) == "Validation loss fell from 5.500 to 4"
    assert "1 of 1 training rows (base: 0)" in headings.answers(report)
    assert "1,000 tokens/s, 25.0% of the hardware's peak FLOPs, and took at most 1.500 GB" in headings.speed(report)
    assert "90 examples" in headings.dataset(report) and "25% of their tokens" in headings.dataset(report)
    page = report_page([report])
    for heading in (headings.loss(report), headings.answers(report), headings.cost(report)):
        assert heading in page
    cost = page.split('<h2 id="cost">')[1].split("</section>")[0]
    assert "at the price in the run file" in cost and "With cluster.price_per_node_hour" not in cost
    cost = report_page([gather(recorded_run(tmp_path / "free", cluster__price_per_node_hour=None))])
    cost = cost.split('<h2 id="cost">')[1].split("</section>")[0]
    assert "their price is not known" in cost and "With cluster.price_per_node_hour" in cost
    assert "at the price in the run file" not in cost


def test_several_sources_have_their_shares_and_losses(tmp_path: Path) -> None:
    sources = [{"source": f"org/{name}", "format": "text"} for name in ("chats", "books", "notes")]
    run = recorded_run(tmp_path, dataset={"sources": sources})
    record = run.journal.record("dataset")
    assert record is not None
    chats = {"name": "chats", "examples": 10, "train_examples": 60, "duplicates": 4, "validation_examples": 5}
    chats |= {"rows_read": 15, "rows_used": 15, "bad_rows": 0, "train_tokens": 900, "validation_rows": 2}
    known = {**record.facts, "sources": [chats, {"name": "damaged"}]}
    replace(record, facts=known).write(run.paths.record_path("dataset"))
    assert "Source chats" not in report_page([gather(run)]), "damaged facts are left out"
    known = {**record.facts, "sources": [chats], "validation_in_training": 3}
    replace(record, facts=known).write(run.paths.record_path("dataset"))
    rows = [json.loads(line) for line in run.paths.metrics_path.read_text().splitlines()]
    for row in rows:
        if row["validation_loss"] is not None:
            row |= {"validation_loss/chats": row["validation_loss"] - 1, "validation_loss/books": 7.0}
    publish.write_text(run.paths.metrics_path, "".join(json.dumps(row) + "\n" for row in rows))
    report = gather(run)
    assert "with org/chats, org/books and org/notes, on" in headings.lead(report)
    assert report.subject["Dataset"] == "org/chats @ main, org/books @ main, org/notes @ main"
    page = report_page([report])
    chart = data_of(page)["validation_loss_of_sources"]
    assert isinstance(chart, dict)
    assert [(series["label"], len(series["y"])) for series in chart["series"]] == [("books", 10), ("chats", 10)]
    assert "60 training examples, 66.7% of an epoch, 50 of them repeats; 5 validation; 4 duplicates removed" in page
    assert "Validation examples that training has too" in page


def test_answers_while_training_have_a_chart_of_their_rouge(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    assert "validation_rouge" not in data_of(report_page([gather(run)]))
    rows = [json.loads(line) for line in run.paths.metrics_path.read_text().splitlines()]
    for row in rows:
        if row["validation_loss"] is not None:
            row |= {"validation_rouge_1": 0.5, "validation_rouge_2": row["step"] / 1000, "validation_rouge_l": 0.25}
    publish.write_text(run.paths.metrics_path, "".join(json.dumps(row) + "\n" for row in rows))
    chart = data_of(report_page([gather(run)]))["validation_rouge"]
    assert isinstance(chart, dict)
    assert [series["label"] for series in chart["series"]] == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
    assert chart["series"][1]["y"] == [step / 1000 for step in range(10, 101, 10)]


def test_a_mixture_has_the_loads_of_its_experts(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    assert 'id="experts"' not in report_page([gather(run)])
    rows = [json.loads(line) for line in run.paths.metrics_path.read_text().splitlines()]
    for row in rows:
        row |= {"expert_load_max": 2 + row["step"] / 100, "dead_experts": row["step"] // 50}
    publish.write_text(run.paths.metrics_path, "".join(json.dumps(row) + "\n" for row in rows))
    record = run.journal.record("train")
    assert record is not None
    first = {"layers.0.mlp": [2.0, 0.5, 0], "layers.1.mlp": [1.75, 0.25, 0]}
    last = {"layers.0.mlp": [2.5, 0.125, 0], "layers.1.mlp": [3.0, 0.0, 2]}
    known = record.facts | {"expert_load_max": 3.0, "dead_experts": 2}
    for damaged in ([first], [first, {"layers.0.mlp": last["layers.0.mlp"]}], [first, last | {"layers.1.mlp": [3.0]}]):
        replace(record, facts=known | {"expert_load": damaged}).write(run.paths.record_path("train"))
        assert 'id="experts"' not in report_page([gather(run)])
    replace(record, facts=known | {"expert_load": [first, last]}).write(run.paths.record_path("train"))
    report = gather(run)
    page = report_page([report])
    found = "in layers.1.mlp, got 3.0 times the mean number of tokens in the last step (2.0 in the first); 2 experts"
    assert found in headings.experts(report) and headings.experts(report) in page
    (row,) = re.findall(r'<tr><th scope="row">layers\.1\.mlp</th>(.*?)</tr>', page)
    assert re.findall(r">([0-9.]+)<", row) == ["1.75", "0.25", "0", "3.00", "0.00", "2"]
    charts = data_of(page)
    assert {"expert_load_max", "dead_experts"} < charts.keys()
    assert report.training_summary is not None and report.training_summary.dead_experts == 2


def test_answers_that_are_right_by_pattern_are_counted_and_marked(tmp_path: Path) -> None:
    row = SampledRow.of("validation", RecordedAnswers("q", False, "#1", "see #7"), "so #7", lambda text: text[-2:])
    rouge: dict[Split, RougeScores] = {"validation": RougeScores(1, Rouge(0.5, 0, 0.25), Rouge(1, 1, 0.75))}
    report = replace(gather(recorded_run(tmp_path)), samples=Samples.of([], [row], 1, None, rouge=rouge))
    assert ("ROUGE-L, validation", "0.75", "base 0.25") in facts.tiles(report)
    assert headings.answers(report) == "The tuned model gives the right answer for 1 of 1 rows it never saw (base: 0)"
    assert ("Answers by pattern, validation", "1 of 1", "base 0") in facts.tiles(report)
    page = report_page([report])
    assert '<p>see #7</p><span class="exact">right</span>' in page and "generate.answer_pattern" in page


def test_sampled_answers_are_shown_with_their_rewards(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    assert 'id="sampled"' not in report_page([gather(run)])
    path = run.paths.sampled_answers
    steps = [step for step in range(1, 101) if sampled_answers.is_kept(step, 100)]
    assert steps == [1, 12, 23, 34, 45, 56, 67, 78, 89, 100]
    for step in [*steps, 78]:  # a restart trains step 78 again
        sampled_answers.keep(path, SampledAnswer(step, "Why <b>?", "so " * step * 20, {"json": 0.5, "polite": None}))
    answers = sampled_answers.read(path)
    assert [one.step for one in answers] == steps[:8] and {len(one.answer) for one in answers[4:]} == {2000}
    report = replace(gather(run), metrics={"reward": [0.25, None, 0.75]})
    page = report_page([report])
    assert headings.sampled(report) == "The mean reward of a step rose from 0.25 to 0.75"
    assert "<p>Why &lt;b&gt;?</p>" in page and page.count("<p>json 0.5</p><p>polite none</p>") == 8
    path.write_text('[{"step": 1}]')
    assert 'id="sampled"' not in report_page([gather(run)])


def test_examples_are_shown_token_by_token(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, prompt="Why <b>?")
    report = gather(run)
    found = dict(facts.dataset_facts(report))
    assert found["Conversations that became several examples"] == "7"
    assert found["Tokens of 98 sampled examples, trained share"] == "user 3,000, 0%; answer 1,000, 100%"
    page = report_page([report])
    assert '<mark class="answer" title="answer, trained, 2 tokens"><i>the</i><i> sky</i></mark>' in page
    assert '<span class="user" title="user, not trained, 1 token"><i>Why &lt;b&gt;?</i></span>' in page
    assert "trains message 2; 6 tokens, 3 of them trained (50%)" in page and "rows.jsonl:7" in page
    (run.paths.dataset_path / "shown.json").write_text("[{]")
    assert "token by token" not in report_page([gather(run)]), "of a dataset without them"


def test_scores_of_evaluations_stand_beside_each_other(tmp_path: Path) -> None:
    def metric(task: str, higher: bool | None) -> Metric:
        return Metric(task, "acc", "none", "1", 5, 10, "", higher)

    scores = (
        Compared(metric("up", True), Score(0.25, 0.01), Score(0.5, 0.02)),
        Compared(metric("down", False), Score(2.0, None), Score(3.0, None)),
        Compared(metric("<i>", None), Score(1.0, None), Score(None, None)),
    )
    evaluation = EvaluationResult(("all",), None, False, scores, {}, "cpu")
    report = replace(gather(recorded_run(tmp_path)), evaluations=(evaluation,))
    assert headings.evaluations(report).endswith("better than its base on 1 of 2 metrics, worse on 1")
    page = report_page([report])
    assert "up, acc (5-shot)" in page and "0.2500 ± 0.0100" in page and "0.5000 ± 0.0200" in page
    assert "&lt;i&gt;, acc" in page


def test_a_run_that_is_not_finished_has_a_page(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.freeze()
    report = gather(run, status(run, Launchers()))
    assert report.state == "not run"
    assert f"hyperpod-ft resume {run.paths.directory}" in report_page([report])


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    run.paths.record_path("generate").unlink()
    job = run.journal.latest_jobs()["generate"].job_id
    run.paths.exit_marker("generate", job).write_text("2\n")
    run.paths.log("generate", job).write_text("== generate job 7 on a, x\nerror: generate: the <disk> is full\n")
    report = gather(run, status(run, Launchers()))
    assert report.state in ("failed", "unknown")
    if report.state == "failed":
        assert "error: generate: the &lt;disk&gt; is full" in report_page([report])


def test_damaged_facts_are_left_out(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    assert gather(run).dataset["chats"]["turns"] == 120
    record = json.loads(run.paths.record_path("dataset").read_text())
    for chats in (None, {"turns": 1}, record["facts"]["chats"] | {"compared_tokens": [{"tokens": "x"}]}):
        facts_now = record["facts"] | {"chats": chats}
        run.paths.record_path("dataset").write_text(json.dumps(record | {"facts": facts_now}))
        assert "Trained turns" not in report_page([gather(run)])
    damaged = {"dataset": {"rows_read": "many"}, "train": {"trainable_parameters": "all", "resumed_from": None}}
    for stage, damage in damaged.items():
        record = json.loads(run.paths.record_path(stage).read_text())
        run.paths.record_path(stage).write_text(json.dumps(record | {"facts": record["facts"] | damage}))
    report = gather(run)
    assert report.dataset == {} and "parameters" not in report.subject["Method"]
    assert "many" not in report_page([report])


def test_damaged_times_are_left_out(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    attempt = Attempt("7", utc_now(), 1, False, (), 0, 0, 4, 6)
    for time in ("2026-11-02 at noon", "2026-13-02T20:22:12Z"):
        publish.write_json(run.paths.restarts_path("train"), [attempt.as_dict() | {"time": time}])
        assert attempts.history(run.paths, "train") == [] and report_page([gather(run)])
    publish.write_json(run.paths.restarts_path("train"), [attempt.as_dict()])
    assert attempts.history(run.paths, "train") == [attempt]


def test_texts_of_a_run_are_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>\n<img src=x onerror=alert(2)> & \u2028"
    page = report_page([gather(recorded_run(tmp_path, prompt=hostile))])
    assert "<img" not in page and "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<script") == page.count("</script") == 3, "data, library and the page's own"


def test_a_long_run_stays_below_a_megabyte_and_keeps_its_spikes(long_page: Path) -> None:
    page = long_page.read_text()
    assert len(page.encode()) < 1_000_000
    loss = data_of(page)["loss"]
    assert isinstance(loss, dict)
    assert max(loss["series"][0]["y"]) == SPIKE
    assert "no spike is left out" in page


def test_many_runs_stay_below_a_megabyte(tmp_path: Path) -> None:
    report = gather(recorded_run(tmp_path, steps=3_000))
    assert len(report_page([report] * 30).encode()) < 1_000_000


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    lora, full = (
        gather(recorded_run(tmp_path / method, training__method=method, training__learning_rate=rate))
        for method, rate in (("lora", 1e-3), ("full", 1e-5))
    )
    found = dict(differences([lora.settings, full.settings]))
    assert found.pop("cluster.root") == [str(tmp_path / method / "root") for method in ("lora", "full")]
    assert found == {"training.method": ["lora", "full"], "training.learning_rate": ["0.001", "1e-05"]}
    assert "LoRA trained 1.00 times as many rows a second" in comparison.methods([lora, full])
    assert comparison.title([lora, full]) == "LoRA and full fine-tuning compared"


def test_numbers_are_written_as_their_examples_say() -> None:
    found = doctest.testmod(numbers)
    assert (found.failed, found.attempted > 3) == (0, True)


def test_a_page_of_a_server_may_ask_only_that_server(tmp_path: Path) -> None:
    reports = [gather(recorded_run(tmp_path))]
    assert "connect-src 'none'" in html.unescape(report_page(reports))
    served = html.unescape(report_page(reports, refresh_seconds=5))
    assert "connect-src 'self'" in served and 'data-refresh-seconds="5"' in served


def test_the_command_writes_one_page_for_all_runs(tmp_path: Path) -> None:
    first, second = recorded_run(tmp_path / "a"), recorded_run(tmp_path / "b", training__learning_rate=0.5)
    page = tmp_path / "both.html"
    done = CliRunner().invoke(app, ["report", str(first.paths.directory), str(second.paths.directory), "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(page)
    assert first.paths.full_name in page.read_text() and second.paths.full_name in page.read_text()


def test_the_vendored_library_is_the_version_that_the_script_names() -> None:
    root = Path(__file__).resolve().parents[3]
    version = re.search(r"^readonly version=(\S+)$", (root / "scripts/vendor-uplot.sh").read_text(), re.MULTILINE)
    assert version
    library = root / "templates/report/uplot"
    assert f"(v{version[1]})" in (library / "uPlot.iife.min.js").read_text()[:200]
    assert "MIT" in (library / "LICENSE").read_text()


def test_a_training_that_has_diverged_has_a_page(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    record = run.journal.record("train")
    assert record is not None
    report = gather(run)
    facts = record.facts | {"validation_loss": math.nan, "base_validation_loss": math.inf}
    replace(record, facts=facts).write(run.paths.record_path("train"))
    with run.paths.metrics_path.open("a") as stream:
        stream.write('{"step": 900, "mfu": 1e308}\n')
    diverged = gather(run)
    assert "nan" in report_page([diverged])
    assert comparison.methods([diverged, report]).startswith(f"{report.name} has the lowest final validation loss of 1")


def test_the_list_of_runs_has_a_column_of_costs_only_if_one_is_known(tmp_path: Path) -> None:
    run = RunStatus("birds", str(tmp_path / "abc"), "", "done", ())
    priced = SimpleNamespace(final_loss=None, validation_loss=None, cost=2.5)
    without, with_cost = (
        runs_page("/fsx", runs, 10)
        for runs in ([run], [run, replace(run, training_summary=priced)])  # type: ignore[arg-type]
    )
    assert "Cost" not in without and with_cost.count("Cost</th>") == 1 and "2.50" in with_cost
    for page in (without, with_cost):
        heads, first = page.count('<th scope="col"'), page.split("<tbody>")[1].split("</tr>")[0]
        assert first.count("<td") + first.count("<th") == heads
