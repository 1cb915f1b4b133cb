"""An exercise that is judged in its own way: not by gradients against a single-process twin, but by what it returns.

A wrong answer is compared with what the plausible mistakes would give (`Slip`): the one that it equals is what the hint
is about. Besides, what such exercises share: numbers that every process draws alike, and the round over all numbers of
ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from course_utils.grading.reports import Report
from course_utils.grading.wording import ranks, within
from course_utils.world import World

FLOAT = 4  # bytes


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


def each_world(
    name: str,
    world_sizes: Sequence[int],
    seed: int,
    timeout: float,
    on: Callable[[World, int], Report | None],
    praise: str,
) -> Report:
    """`on(world, seed)` on each number of ranks, twice: the first report of something wrong, or that all is right."""
    for world_size in world_sizes:
        with World(world_size, timeout=timeout, device="cpu") as world:
            for again in (False, True):
                wrong = on(world, seed + again)
                if wrong:
                    other = ", with other inputs than in the call before" if again else ""
                    return within(f"{name} on {ranks(world_size)}", wrong, other)
    return Report(True, f"{name} is right on {ranks(*world_sizes)}: {praise}")


def drawn(key: str, *shape: int) -> Tensor:
    """Standard normal float32 that every process draws alike."""
    generator = torch.Generator().manual_seed(random.Random(key).getrandbits(63))
    return torch.randn(shape, generator=generator, device="cpu")
