"""A step, and one attempt at it. How to write a step: the package's docstring."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Sequence

from provision.errors import NodeError, PassingError
from provision.node import Node


class Step(ABC):
    """A state that a node should be in: how to check it, and how to establish it."""

    name = ""
    needs: tuple[str, ...] = ()
    deadline = 120.0
    """Seconds for all attempts together."""
    attempts = 3
    first_wait = 2.0
    """Seconds before the second attempt; doubled before each further one."""
    advisory = False
    """Whether a failure is only reported: the node is good without this step."""

    def needed(self, node: Node) -> bool:
        """Whether the step applies to this node."""
        return True

    @abstractmethod
    def missing(self, node: Node) -> Sequence[str]:
        """What is missing from the state, a line each. Changes nothing; other processes may be changing the node."""

    @abstractmethod
    def do(self, node: Node) -> None:
        """Establish the state. Any part of it may exist already, and this may be killed at any line."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    event: str
    """not_needed, already_so, would_change, changed, failed, or warning: the failure of an advisory step."""
    message: str = ""
    again: bool = False
    """Whether another attempt may succeed."""

    @property
    def failed(self) -> bool:
        return self.event == "failed"


def attempt(step: Step, node: Node, dry_run: bool) -> Outcome:
    """If the step is needed and something is missing, do it and check again."""
    try:
        if not step.needed(node):
            return Outcome("not_needed")
        missing = step.missing(node)
        if not missing:
            return Outcome("already_so")
        if dry_run:
            return Outcome("would_change", "; ".join(missing))
        step.do(node)
        still = step.missing(node)
        if still:
            return Outcome("failed", f"still missing: {'; '.join(still)}", again=True)
        return Outcome("changed", "; ".join(missing))
    except NodeError as error:
        return Outcome("failed", str(error), again=isinstance(error, PassingError))
    except OSError as error:
        return Outcome("failed", str(error), again=True)
    except Exception as error:  # a bug; the other steps continue
        traceback.print_exc()
        return Outcome("failed", f"a bug in step {step.name}: {error!r}")
