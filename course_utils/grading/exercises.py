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
class AllReduce:
    """One all-reduce of `numbers(sizes)` float32 numbers; `formula` says in words how many.

    >>> AllReduce(lambda sizes: 2 * sizes["batch"], "2 · batch").bytes({"batch": 3})
    24
    """

    numbers: Callable[[Sizes], int]
    formula: str

    def bytes(self, sizes: Sizes) -> int:
        return 4 * self.numbers(sizes)


@dataclass(frozen=True)
class Price:
    """What is enough to send in forward and in backward; None: nothing."""

    forward: AllReduce | None = None
    backward: AllReduce | None = None

    def of(self, phase: str) -> AllReduce | None:
        return {"forward": self.forward, "backward": self.backward}[phase]


@dataclass(frozen=True)
class Sent:
    """One operation that a rank called: in which phase, with how many bytes (S of its definition), from which line."""

    phase: str
    operation: str
    bytes: int
    line: str = ""


@dataclass(frozen=True)
class Evidence:
    """What a hint may look at: how far the function got, and what the doctor found there.

    `stage` is "forward", "backward" or "price"; `diagnosis` is of the output in the first, of the gradients in the
    others; `sent` has what the rank that communicates most has called, if the stage is "price".
    """

    stage: str
    diagnosis: Diagnosis
    sent: tuple[Sent, ...] = ()

    def operations(self, phase: str) -> list[str]:
        return [one.operation for one in self.sent if one.phase == phase]


@dataclass(frozen=True)
class Exercise:
    """One function that a learner writes.

    Attributes:
        name: of the exercise.
        inputs: what every rank's call is given, in order.
        output: the shape of the result, as for an input.
        specification: the single-process twin, on whole inputs.
        sizes: draws the length of each dimension.
        hint: the one sentence for a wrong answer.
        price: what it may communicate.
        start: the one sentence for a function that is not written yet.
        written: what the learner passes to `check`; the exercise's name if "".
    """

    name: str
    inputs: tuple[Input, ...]
    output: Input
    specification: Callable[..., Tensor]
    sizes: Callable[[random.Random], Sizes]
    hint: Callable[[Evidence], str]
    price: Price
    start: str = ""
    written: str = ""


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
        """Output and gradients of the specification, on one process. The loss is the sum of output x direction.

        An output that is whole here and of which every rank has a copy of its own meets each copy's direction.
        """
        leaves = {i.name: self.whole(i).requires_grad_() for i in self.exercise.inputs}
        output = self.exercise.specification(*leaves.values())
        (output * self.whole(self.exercise.output)).sum().backward()
        return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}
