"""What jobs waited for and did, from times written by hand."""

from hyperpod_ft.report.timeline import AttemptTimes, JobTimes, timeline


def spans(*jobs: JobTimes, now: float | None = None) -> list[tuple[str, str, float, float]]:
    return [(span.stage, span.activity, span.start, span.end) for span in timeline(jobs, now)]


DATASET = JobTimes("dataset", (), 100.0, 103.0, 110.0, (104.0, 109.0))


def test_a_job_waits_for_what_it_needs_and_then_for_a_node() -> None:
    merge = JobTimes("merge", ("dataset",), 101.0, 115.0, 120.0, (116.0, 119.0))
    assert spans(DATASET, merge) == [
        ("dataset", "waiting", 0.0, 3.0),
        ("dataset", "starting", 3.0, 4.0),
        ("dataset", "working", 4.0, 9.0),
        ("dataset", "ending", 9.0, 10.0),
        ("merge", "waiting", 1.0, 10.0),
        ("merge", "waiting", 10.0, 15.0),
        ("merge", "starting", 15.0, 16.0),
        ("merge", "working", 16.0, 19.0),
        ("merge", "ending", 19.0, 20.0),
    ]
    reasons = [span.why for span in timeline([DATASET, merge], None) if span.stage == "merge"]
    assert reasons[:2] == ["waits for stage dataset", "waits for a node"]


def test_training_shows_each_attempt_and_what_a_crash_cost() -> None:
    first = AttemptTimes(14.0, 40.0, first_step=16.0, last_step=35.0, lost_steps=5, reason="rank 1: SIGKILL")
    second = AttemptTimes(50.0, 90.0, first_step=55.0, last_step=88.0)
    train = JobTimes("train", (), 0.0, 10.0, 92.0, (12.0, 91.0), (first, second))
    assert spans(train) == [
        ("train", "waiting", 0.0, 10.0),
        ("train", "starting", 10.0, 14.0),
        ("train", "starting", 14.0, 16.0),
        ("train", "training", 16.0, 35.0),
        ("train", "lost", 35.0, 40.0),
        ("train", "restarting", 40.0, 50.0),
        ("train", "starting", 50.0, 55.0),
        ("train", "training", 55.0, 88.0),
        ("train", "ending", 88.0, 90.0),
        ("train", "ending", 90.0, 92.0),
    ]
    lost = next(span for span in timeline([train], None) if span.activity == "lost")
    assert "5 steps" in lost.why and "rank 1: SIGKILL" in lost.why


def test_an_attempt_without_a_step_that_counts_is_lost() -> None:
    crashed = AttemptTimes(14.0, 40.0, None, None, lost_steps=3, reason="rank 0: exit 1")
    assert ("train", "lost", 14.0, 40.0) in spans(JobTimes("train", (), 0.0, 10.0, 41.0, None, (crashed,)))


def test_an_attempt_at_work_trains_until_now() -> None:
    """Its usage is written every 15 seconds, and a row of metrics only after a step."""
    loading = AttemptTimes(14.0, 20.0, None, None)
    training = AttemptTimes(14.0, 29.0, 18.0, 27.0)
    assert spans(JobTimes("train", (), 0.0, 10.0, None, None, (loading,)), now=30.0)[2:] == [
        ("train", "starting", 14.0, 30.0)
    ]
    assert spans(JobTimes("train", (), 0.0, 10.0, None, None, (training,)), now=30.0)[2:] == [
        ("train", "starting", 14.0, 18.0),
        ("train", "training", 18.0, 30.0),
    ]


def test_unfinished_jobs_end_now() -> None:
    train = JobTimes("train", (), 0.0, 10.0, None, None)
    merge = JobTimes("merge", ("train",), 0.0, None, None, None)
    assert spans(train, merge, now=30.0) == [
        ("train", "waiting", 0.0, 10.0),
        ("train", "starting", 10.0, 30.0),
        ("merge", "waiting", 0.0, 30.0),
    ]
    assert [span.why for span in timeline([train, merge], 30.0)][-1] == "waits for stage train"
    assert timeline([], None) == []
