"""The pieces of an answer add up to its text, end at whole characters, and hold nothing of a stop text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hyperpod_ft.serving.answers.decoding import TextStream


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def pieces(text: str, stops: Sequence[str]) -> tuple[list[str], TextStream]:
    """The pieces for an answer whose tokens are bytes."""
    ids = text.encode()
    stream = TextStream(decode, stops)
    found = []
    for count in range(1, len(ids) + 1):
        found.append(stream.update(list(ids[:count]), last=count == len(ids)))
        if stream.stopped:
            break
    return found, stream


@given(st.text(alphabet="aé東😀\n", max_size=30))
def test_pieces_are_the_text_in_whole_characters(text: str) -> None:
    found, stream = pieces(text, ())
    assert "".join(found) == text == stream.text
    assert not any("\ufffd" in piece for piece in found)


@given(st.text(alphabet="abé", min_size=1, max_size=30), st.lists(st.text(alphabet="abé", min_size=1, max_size=4)))
def test_an_answer_ends_before_its_first_stop_text(text: str, stops: list[str]) -> None:
    found, stream = pieces(text, stops)
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    assert stream.stopped == bool(ends)
    if not ends:
        assert "".join(found) == text
    else:
        # the tokens after the first stop text were never made
        assert "".join(found) == stream.text and text.startswith(stream.text)
        assert not any(stop in stream.text for stop in stops)


def test_text_without_a_stop_is_given_at_once() -> None:
    found, _ = pieces("abc", ["END"])
    assert found == ["a", "b", "c"]


def test_an_answer_that_ends_within_a_character_shows_it() -> None:
    stream = TextStream(decode, ())
    assert stream.update([0xE6], last=False) == ""
    assert stream.update([0xE6, 0x9D], last=True) == "\ufffd"
