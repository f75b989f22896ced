"""The pure parts: which rows a step trains on, and its learning rate."""

from pathlib import Path

import numpy as np
import pytest

from hyperpod_ft.config.sections.training import Training, learning_rate, total_steps
from hyperpod_ft.engines.batches import DataOrder, PackedSplit
from hyperpod_ft.errors import UserError
from tests.training.conftest import write_rows

pytestmark = pytest.mark.training


def order(micro: int = 2, accumulation: int = 3, data_parallel: int = 2, rows: int = 29, seed: int = 5) -> DataOrder:
    return DataOrder(rows, seed, micro * accumulation * data_parallel, accumulation, data_parallel)


def test_every_epoch_holds_every_row_once_in_its_own_order() -> None:
    stream = np.concatenate([order().step(step) for step in range(1, 30)])
    first, second = stream[:29], stream[29:58]
    assert sorted(first) == sorted(second) == list(range(29))
    assert list(first) != list(second)


def test_a_step_needs_no_memory_of_the_steps_before() -> None:
    forwards = [order().step(step).tolist() for step in range(1, 9)]
    backwards = [order().step(step).tolist() for step in range(8, 0, -1)]
    assert forwards == backwards[::-1]
    assert order(seed=6).step(1).tolist() != forwards[0]


@pytest.mark.parametrize(("micro", "accumulation", "data_parallel"), [(12, 1, 1), (1, 12, 1), (1, 3, 4), (2, 2, 3)])
def test_every_division_of_a_step_has_the_same_rows(micro: int, accumulation: int, data_parallel: int) -> None:
    divided = order(micro, accumulation, data_parallel)
    parts = [divided.micro_batches(4, rank) for rank in range(data_parallel)]
    assert all(part.shape == (accumulation, micro) for part in parts)
    assert sorted(np.concatenate(parts, axis=None)) == sorted(order().step(4))


def test_a_step_longer_than_an_epoch_repeats_rows_evenly() -> None:
    counts = np.bincount(order(rows=5, micro=10, accumulation=1, data_parallel=1).step(1), minlength=5)
    assert counts.tolist() == [2] * 5


def test_total_steps() -> None:
    assert total_steps(Training(epochs=3), rows=10, rows_per_step=4) == 8
    assert total_steps(Training(epochs=0.5), rows=10, rows_per_step=4) == 2
    assert total_steps(Training(epochs=0.01), rows=10, rows_per_step=4) == 1
    assert total_steps(Training(max_steps=5), rows=10, rows_per_step=4) == 5


def rates(schedule: str, warmup_share: float = 0.2, steps: int = 10) -> list[float]:
    training = Training(learning_rate=1.0, schedule=schedule, warmup_share=warmup_share)  # type: ignore[arg-type]
    return [learning_rate(training, step, steps) for step in range(1, steps + 1)]


def test_schedules() -> None:
    assert rates("constant") == [0.5, 1.0] + [1.0] * 8
    assert rates("linear") == pytest.approx([0.5, 1.0, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9, 3 / 9, 2 / 9, 1 / 9])
    cosine = rates("cosine")
    assert cosine[:2] == [0.5, 1.0]
    assert cosine[2:] == sorted(cosine[2:], reverse=True)
    # half way down between step 2 (peak) and step 11 (zero)
    assert (cosine[5] + cosine[6]) / 2 == pytest.approx(0.5)
    assert 0 < cosine[-1] < 0.05
    assert rates("linear", warmup_share=0, steps=1) == [0.5]


def test_rows_refuses_what_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the rows"):
        PackedSplit(tmp_path)
    write_rows(tmp_path, 3, 16)
    (tmp_path / "labels.npy").write_bytes(b"")
    with pytest.raises(UserError, match="cannot read the rows"):
        PackedSplit(tmp_path)
    write_rows(tmp_path, 3, 16)
    rows = PackedSplit(tmp_path)
    assert (len(rows), rows.max_length) == (3, 16)
    np.save(tmp_path / "labels.npy", np.zeros((2, 16), np.int32))
    with pytest.raises(UserError, match="different shapes"):
        PackedSplit(tmp_path)
    write_rows(tmp_path, 0, 16)
    with pytest.raises(UserError, match="has no rows"):
        PackedSplit(tmp_path)


def test_only_predicted_labels_are_counted(tmp_path: Path) -> None:
    write_rows(tmp_path, 4, 16)
    labels = np.full((4, 16), -100, np.int32)
    labels[1, 0] = labels[1, 5] = labels[2, 15] = 7
    np.save(tmp_path / "labels.npy", labels)
    assert PackedSplit(tmp_path).label_tokens(np.array([1, 2, 3])) == 2
