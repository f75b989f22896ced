"""What is read from the results of lm-evaluation-harness, as its version 0.4.13 gave them."""

import json
from pathlib import Path

import numpy as np

from hyperpod_ft.evaluation.harness import metrics
from hyperpod_ft.runs.results.evaluation import Metric, Score

RESULTS = json.loads((Path(__file__).resolve().parents[2] / "data" / "lm-eval" / "results.json").read_text())


def test_a_group_with_its_tasks() -> None:
    found = [(one.task, one.name, one.part_of, score.value) for one, score in metrics(RESULTS["pair"])]
    assert found == [
        ("quiz", "acc", "pair", 0.5),
        ("quiz", "acc_norm", "pair", 0.375),
        ("quiz_write", "exact_match", "pair", 0.0),
        ("pair", "acc", "", 0.5),
    ]
    first, score = next(iter(metrics(RESULTS["pair"])))
    assert first == Metric("quiz", "acc", "none", "1.0", 0, 8, "pair", True)
    assert score == Score(0.5, 0.1889822365046136) and str(score) == "0.5000 ± 0.1890"


def test_filters_are_told_apart() -> None:
    found = dict(metrics(RESULTS["quiz_gen"]))
    assert {(metric.name, metric.filter) for metric in found} == {("bleu", "strict"), ("exact_match", "strict")}
    assert all(score.stderr == 0.0 for score in found.values())


def test_numbers_of_numpy() -> None:
    results = {"results": {"a": {"acc,none": np.float32(0.25), "acc_stderr,none": np.int64(0)}}}
    assert [score for _, score in metrics(results)] == [Score(0.25, 0.0)]


def test_what_is_no_number() -> None:
    results = {"results": {"a": {"acc,none": float("nan"), "acc_stderr,none": "N/A", "alias": "a"}}}
    ((metric, score),) = metrics(results)
    assert (metric.samples, metric.higher_is_better) == (None, None)
    assert score == Score(None, None) and str(score) == "none"
