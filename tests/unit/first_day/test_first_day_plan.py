"""The steps of the first day: their prices, as docs/first-day.md says them, and the limit on spending."""

import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.first_day.plan import REGION, STEPS, at_most, chosen, require_affordable, run_of
from hyperpod_ft.first_day.steps import TimeIsUp, within
from hyperpod_ft.sagemaker.resources import TrainingResources
from hyperpod_ft.sagemaker.validation import validate
from tests.pages.blocks import ROOT


def test_the_page_has_each_step_with_its_price_cheapest_first() -> None:
    page = (ROOT / "docs/first-day.md").read_text()
    found = re.findall(r"^### [^$]*\$([\d.]+).*?^hyperpod-ft first-day (\w+) --spend-at-most (\d+) ", page, re.M | re.S)
    prices = {name: sum(map(at_most, chosen([name]))) for _, name, _ in found}
    assert [(f"{prices[name]:.2f}", name) for _, name, _ in found] == [(price, name) for price, name, _ in found]
    assert list(prices) == [step.name for step in STEPS]
    assert list(prices.values()) == sorted(prices.values())
    assert all(price <= float(limit) < price + 2 for (_, _, limit), price in zip(found, prices.values(), strict=True))


def test_steps_come_with_what_they_need() -> None:
    assert [step.name for step in chosen(["gpus", "endpoint"])] == ["cpu", "endpoint", "gpus"]
    with pytest.raises(UserError, match=r"gpu: no such step.*gpus"):
        chosen(["gpu"])


def test_a_training_costs_what_its_jobs_may_take() -> None:
    """Two hosts, and the limits of both stages on Trainium; a host more, a price more."""
    (gpus,) = chosen(["gpus"])
    more = at_most(replace(gpus, settings=(*gpus.settings, "cluster.nodes=3"))) - at_most(gpus)
    assert more == pytest.approx(3.06 * (20 + 5) / 60)
    longer = at_most(replace(gpus, settings=(*gpus.settings, "cluster.time_limit='00:50:00'"))) - at_most(gpus)
    assert longer == pytest.approx(2 * 3.06 * 30 / 60)


def test_their_trainings_are_what_sagemaker_takes(tmp_path: Path) -> None:
    made = TrainingResources(REGION, "arn:aws:iam::123456789012:role/any", "any-bucket")
    engines = {}
    for step in (step for step in STEPS if step.kind == "training"):
        run = run_of(step, made, tmp_path)
        assert validate(run, None).findings == ()
        engines[step.name] = (run.config.engine, run.config.cluster.nodes, run.config.instance.ranks)
    assert engines == {"cpu": ("torch", 1, None), "gpus": ("torch", 2, 1), "trainium": ("neuron", 1, 32)}


def test_the_limit_counts_all_steps() -> None:
    steps = chosen(["endpoint"])
    total = require_affordable(steps, None)
    assert require_affordable(steps, total) == total
    with pytest.raises(UserError, match=r"--spend-at-most 2.5: the steps cost up to \$2.63; nothing was created"):
        require_affordable(steps, 2.5)
    with pytest.raises(UserError, match=r"--spend-at-most nan: "):
        require_affordable(steps, math.nan)


def test_a_step_ends_at_its_limit_whatever_it_waits_for() -> None:
    with pytest.raises(TimeIsUp, match="not done after"), within(0.001):
        try:
            time.sleep(60)
        except Exception:  # as in code that goes on after an error
            pytest.fail("nothing below may handle it")
    time.sleep(0.1)
