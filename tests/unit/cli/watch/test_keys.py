"""What each key does."""

from hyperpod_ft.cli.watch.keys import Action, View, press

STAGES = ["env", "train", "merge"]


def after(*keys: str, shown: str = "train") -> tuple[View, list[Action]]:
    view, actions = View(), []
    for key in keys:
        view, action = press(view, key, STAGES, view.stage or shown, page=10, log_lines=45)
        actions += [action] if action else []
    return view, actions


def test_cancelling_asks_first() -> None:
    assert after("c") == (View(asks=True), [])
    assert after("c", "y") == (View(), ["cancel"])
    for key in ("n", "enter", "escape", "q", "c", "Y"):
        assert after("c", key) == (View(), []), key
    assert after("y") == (View(), [])


def test_only_q_leaves() -> None:
    assert after("q")[1] == ["leave"]
    assert after("escape", "x", "home", "[")[1] == []


def test_arrows_choose_a_stage_whose_log_is_shown() -> None:
    assert after("up")[0].stage == "env"
    assert after("up", "up")[0].stage == "env"
    assert after("down", "down", "left", "right")[0].stage == "merge"
    assert after("down", "escape")[0] == View(), "back to the one at work"


def test_a_log_alone_can_be_scrolled() -> None:
    whole = View(whole_log=True)
    assert after("enter")[0] == after("l")[0] == whole
    assert after("enter", "up", "up", "down")[0].lines_back == 1
    assert after("enter", "page up", "page up", "page down")[0].lines_back == 10
    assert after("enter", "page down")[0] == whole
    assert after("enter", "home")[0].lines_back == after("enter", *["page up"] * 9)[0].lines_back == 35
    assert after("enter", "home", "down")[0].lines_back == 34
    assert after("enter", "home", "end")[0] == whole
    assert after("enter", "up", "right")[0] == View("merge", whole_log=True)
    assert after("enter", "up", "enter")[0] == View()
