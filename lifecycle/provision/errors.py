"""Errors on a node. Each is one line: what, where, what to do."""

from __future__ import annotations


class NodeError(Exception):
    """Needs a person to fix it: retrying would not help."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        """`problem` says what and where; `remedy` what to do. Line breaks in either are folded."""
        super().__init__(" ".join((f"{problem}; {remedy}" if remedy else problem).split()))


class PassingError(NodeError):
    """May be temporary: the step is retried until its attempts or its time are used up."""
