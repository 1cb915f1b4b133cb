"""What an exercise is: the inputs of its function, the single-process specification, and what it may communicate.

A case of an exercise is fixed by a seed and a number of ranks: the seed draws the sizes and the values. Every piece of
a sharded input comes from a generator of its own, so a rank makes its own piece and never holds the others'.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from course_utils.gradients import Diagnosis

Sizes = dict[str, int]  # name of a dimension -> its length on one rank


@dataclass(frozen=True)
class Input:
    """One tensor: the names of its dimensions, and which of them is sharded over the ranks (None: whole on every rank).

    >>> Input("x", ("batch", "tokens"), sharded="tokens").dim
    1
    """

    name: str
    shape: tuple[str, ...]
    sharded: str | None = None

    @property
    def dim(self) -> int | None:
        return None if self.sharded is None else self.shape.index(self.sharded)

    def shape_on(self, ranks: int, sizes: Sizes) -> tuple[int, ...]:
        """The shape of the pieces of `ranks` ranks laid side by side."""
        return tuple(sizes[d] * (ranks if d == self.sharded else 1) for d in self.shape)


@dataclass(frozen=True)
class Price:
    """The collectives that are enough: none in forward, and in backward one all-reduce of `numbers(sizes)` numbers."""

    numbers: Callable[[Sizes], int]
    formula: str


@dataclass(frozen=True)
class Evidence:
    """What a hint may look at: how far the function got, and what the doctor found there.

    `stage` is "forward", "backward" or "price"; `diagnosis` is of the output in the first, of the gradients in the
    others; `counted` has the phase and the operation of each collective.
    """

    stage: str
    diagnosis: Diagnosis
    counted: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Exercise:
    """One function that a learner writes.

    Attributes:
        name: of the exercise and of the function.
        inputs: what every rank's call is given, in order.
        output: the shape of the result, as for an input.
        specification: the single-process twin, on whole inputs.
        sizes: draws the length of each dimension.
        hint: the one sentence for a wrong answer.
        price: what it may communicate; None if that is not the point.
    """

    name: str
    inputs: tuple[Input, ...]
    output: Input
    specification: Callable[..., Tensor]
    sizes: Callable[[random.Random], Sizes]
    hint: Callable[[Evidence], str]
    price: Price | None = None


@dataclass(frozen=True)
class Case:
    """One set of inputs: an exercise, a number of ranks and a seed."""

    exercise: Exercise
    world_size: int
    seed: int

    @property
    def sizes(self) -> Sizes:
        return self.exercise.sizes(random.Random(f"{self.exercise.name} {self.seed}"))

    def piece(self, tensor: Input, rank: int) -> Tensor:
        """What `rank` holds of it; float32, standard normal."""
        key = f"{self.exercise.name} {self.seed} {tensor.name} {rank if tensor.sharded else 'every rank'}"
        generator = torch.Generator().manual_seed(random.Random(key).getrandbits(63))
        value = torch.randn(tensor.shape_on(1, self.sizes), generator=generator, device="cpu")
        return value.to(torch.get_default_device())

    def whole(self, tensor: Input) -> Tensor:
        """All pieces side by side, as a single process would hold them."""
        if tensor.sharded is None:
            return self.piece(tensor, 0)
        return torch.cat([self.piece(tensor, rank) for rank in range(self.world_size)], dim=tensor.dim)

    def reference(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Output and gradients of the specification, on one process. The loss is the sum of output x direction."""
        leaves = {i.name: self.whole(i).requires_grad_() for i in self.exercise.inputs}
        output = self.exercise.specification(*leaves.values())
        (output * self.whole(self.exercise.output)).sum().backward()
        return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}
