"""An exercise that is judged in its own way: not by gradients against a single-process twin, but by what it returns.

A wrong answer is compared with what the plausible mistakes would give (`Slip`): the one that it equals is what the hint
is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from course_utils.grading.reports import Report


@dataclass(frozen=True)
class Argument:
    """What an exercise's function is given; by this name it is listed."""

    name: str


@dataclass(frozen=True)
class Judged:
    """An exercise that is judged in its own way.

    Attributes:
        name: of the exercise and of its function.
        inputs: of the function.
        start: the one sentence for a function that is not written yet.
        examine: of function, numbers of ranks, seed and timeout: the report. It may raise what `World.run` raises.
        written: what the learner passes to `check`; the exercise's name if "".
    """

    name: str
    inputs: tuple[Argument, ...]
    start: str
    examine: Callable[[Callable, Sequence[int], int, float], Report]
    written: str = ""


@dataclass(frozen=True)
class Slip:
    """A plausible mistake: what it would answer, given a case, and what to say about it."""

    answer: Callable
    hint: str


def calls(fn: Callable, arguments: list[tuple]) -> list:
    """What the function returns for each of these arguments, one after the other; runs on a rank."""
    return [fn(*each) for each in arguments]
