"""Batches are made once each, one prefetch, and those taken are those asked for."""

from hyperpod_ft.engines.batches import Prefetch


def test_a_prepared_value_is_not_made_again() -> None:
    made: list[int] = []

    def make(key: int) -> str:
        made.append(key)
        return f"value {key}"

    prefetch = Prefetch(make)
    assert prefetch.take(1) == "value 1"
    prefetch.prepare(2)
    assert made == [1, 2]
    assert prefetch.take(2) == "value 2"
    assert prefetch.take(2) == "value 2"
    assert made == [1, 2, 2], "each can be taken once"


def test_another_value_than_the_prepared_one_is_made() -> None:
    prefetch = Prefetch(lambda key: key * 10)
    prefetch.prepare(1)
    assert prefetch.take(3) == 30
    assert prefetch.take(1) == 10
