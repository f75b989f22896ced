"""Batches are made once each, one ahead, and those taken are those asked for."""

from hyperpod_ft.engines.batches import Ahead


def test_a_prepared_value_is_not_made_again() -> None:
    made: list[int] = []

    def make(key: int) -> str:
        made.append(key)
        return f"value {key}"

    ahead = Ahead(make)
    assert ahead.take(1) == "value 1"
    ahead.prepare(2)
    assert made == [1, 2]
    assert ahead.take(2) == "value 2"
    assert ahead.take(2) == "value 2"
    assert made == [1, 2, 2], "each can be taken once"


def test_another_value_than_the_prepared_one_is_made() -> None:
    ahead = Ahead(lambda key: key * 10)
    ahead.prepare(1)
    assert ahead.take(3) == 30
    assert ahead.take(1) == 10
