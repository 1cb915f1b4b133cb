"""Micro-batches of uneven numbers of tokens, the gradient of their mean, and those of other weights; for `token_mean`.

Every answer to that exercise is a sum over ranks and micro-batches of the summed loss's gradient times a weight. Right
is 1 over the number of all tokens; `SLIPS` are the weights of the plausible mistakes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_utils.gradients import diagnose
from course_utils.grading.judged import drawn

IGNORED = -100
VOCABULARY, HIDDEN = 11, 6

Batch = tuple[Tensor, Tensor]  # inputs and targets, [sequences, tokens]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """How many tokens of each micro-batch are not ignored: `counts[rank][microbatch]`."""

    counts: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]  # of a sequence, in each micro-batch
    seed: int
    what: str  # in words
    weights: int  # seed of the model's

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def microbatches(self) -> int:
        return len(self.tokens)

    def batch(self, rank: int, which: int) -> Batch:
        """Two sequences, of which the tokens behind the first few are padding."""
        draw = random.Random(f"token mean {self.seed} {self.ranks} {self.what} {rank} {which}")
        length, wanted = self.tokens[which], self.counts[rank][which]
        first = draw.randint(max(0, wanted - length), min(length, wanted))
        shape = (2, length)
        inputs = torch.tensor([draw.randrange(VOCABULARY) for _ in range(2 * length)]).view(shape)
        targets = torch.tensor([draw.randrange(VOCABULARY) for _ in range(2 * length)]).view(shape)
        for row, kept in enumerate((first, wanted - first)):
            targets[row, kept:] = IGNORED
        return inputs, targets

    @property
    def table(self) -> str:
        """The numbers, for the reader."""
        lines = [f"rank {rank}: {', '.join(map(str, counts))}" for rank, counts in enumerate(self.counts)]
        return "\n".join(["tokens that are not ignored, by micro-batch:", *(f"  {line}" for line in lines)])


def cases(world_size: int, seed: int) -> list[Case]:
    """Uneven numbers of tokens; then a rank without any, and another whose last micro-batch has none; then just one.

    >>> [case.counts for case in cases(2, 0)]
    [((4, 6, 3), (8, 10, 4)), ((0, 0, 0), (5, 5, 0)), ((8,), (3,))]
    """
    draw = random.Random(f"token mean {world_size} {seed}")

    def uneven(number: int, most: int) -> tuple[tuple[int, ...], ...]:
        while True:
            counts = tuple(tuple(draw.randint(3, most) for _ in range(number)) for _ in range(world_size))
            sums = [sum(one) for one in counts]
            by_microbatch = [sum(one) for one in zip(*counts)]
            if (len(set(sums)) > 1 or world_size == 1) and (len(set(by_microbatch)) > 1 or number == 1):
                return counts

    number = 4 if world_size == 3 else 3  # so that 1/microbatches is not 1/world_size
    first = uneven(number, 12)
    empty = draw.randrange(world_size) if world_size > 1 else None
    second = [list(counts) for counts in uneven(number, 8)]
    second[0 if empty != 0 else world_size - 1][-1] = 0
    if empty is not None:
        second[empty] = [0] * number
    single = uneven(1, 10)
    who = "with a micro-batch" if empty is None else f"with a rank ({empty}) and a micro-batch"
    return [
        Case(first, (6, 8, 7, 6)[:number], seed, "", seed),
        Case(tuple(map(tuple, second)), (5, 4, 6, 5)[:number], seed, f"{who} whose targets are all ignored", seed),
        Case(single, (6,), seed, "with a single micro-batch", seed),
    ]


def calls(world_size: int, seed: int) -> list[tuple[Case, Case]]:
    """Each of `cases`, and what the same model is given in a second call: another number of tokens in all.

    >>> [(first.counts, second.counts) for first, second in calls(2, 0)][0]
    (((4, 6, 3), (8, 10, 4)), ((8, 11, 12), (5, 9, 12)))
    """

    def following(place: int, first: Case) -> Case:
        others = (cases(world_size, seed + more)[place] for more in count(1))
        return replace(next(one for one in others if _total(one) != _total(first)), weights=seed)

    return [(first, following(place, first)) for place, first in enumerate(cases(world_size, seed))]


def model_of(seed: int) -> nn.Module:
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(f"token mean {seed} {name}", *parameter.shape) / math.sqrt(parameter.shape[-1]))
    return model


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over the tokens that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@lru_cache(maxsize=4)
def sums_of(case: Case) -> list[list[Gradients]]:
    """The gradients of the summed loss, by rank and micro-batch."""
    model = model_of(case.weights)

    def gradients(rank: int, which: int) -> Gradients:
        inputs, targets = case.batch(rank, which)
        model.zero_grad(set_to_none=True)
        cross_entropy(model(inputs), targets).backward()
        return {name: p.grad.double() for name, p in model.named_parameters()}

    return [[gradients(rank, which) for which in range(case.microbatches)] for rank in range(case.ranks)]


def reference(case: Case) -> Gradients:
    """Of one process with all tokens: the mean over those that are not ignored."""
    model = model_of(case.weights)
    every = [case.batch(rank, which) for rank in range(case.ranks) for which in range(case.microbatches)]
    total = sum(map(sum, case.counts))
    sum(cross_entropy(model(inputs), targets) for inputs, targets in every).div(total).backward()
    return {name: p.grad for name, p in model.named_parameters()}


Weight = Callable[[Case, int, int], float]  # what the sum over this rank's micro-batch is multiplied by, DDP included


def weighted(case: Case, weight: Weight) -> Gradients:
    """The gradients that come of these weights."""
    sums = sums_of(case)
    parts = [
        (weight(case, r, m) if case.counts[r][m] else 0, sums[r][m])
        for r in range(case.ranks)
        for m in range(case.microbatches)
    ]
    return {name: sum(w * one[name] for w, one in parts).float() for name in sums[0][0]}


def _total(case: Case) -> int:
    return sum(map(sum, case.counts))


def _last(which: int, case: Case) -> bool:
    return which == case.microbatches - 1


_MEANS = (
    "a mean of means: a token of a short micro-batch weighs more than one of a long. Take sums, and divide once, by "
    "the number of all tokens that are not ignored"
)
_OWN_NUMBER = (
    "each rank divides by its own number of tokens: all ranks together have another; an all-reduce adds them up"
)
_PADDING = "padding is counted: only targets other than -100 have a loss, (targets != -100).sum()"
_LAST = "only the last micro-batch is in the gradients: backward adds to p.grad, and nothing may clear it in between"
# The ways to weigh the micro-batches wrongly, with what there is to say.
SLIPS: tuple[tuple[Weight, str], ...] = (
    (lambda c, r, m: 1 / (c.ranks * c.microbatches * c.counts[r][m]), _MEANS),
    (lambda c, r, m: 1 / (c.microbatches * c.counts[r][m]), f"{_MEANS}; and DDP takes the mean over the ranks"),
    (lambda c, r, m: 1 / (c.ranks * c.counts[r][m]), f"{_MEANS}; here the micro-batches' means are added up"),
    (
        lambda c, r, m: 1 / (c.microbatches * sum(one[m] for one in c.counts)),
        "each micro-batch has its own mean, though over all ranks: one number of tokens for all of them is needed",
    ),
    (lambda c, r, m: 1 / (c.ranks * sum(c.counts[r])), _OWN_NUMBER),
    (lambda c, r, m: 1 / sum(c.counts[r]), _OWN_NUMBER),
    (
        lambda c, r, m: 1 / (c.ranks * _total(c)),
        "DDP averages over the ranks: it divides by world_size what you have already divided by all tokens",
    ),
    (
        lambda c, r, m: c.ranks / _total(c),
        "a factor world_size too many: DDP divides by it once, and gradients are to be reduced once. Is something "
        "multiplied, or added up, in addition?",
    ),
    (lambda c, r, m: 1 / (c.ranks * sum(2 * length for length in c.tokens)), _PADDING),
    (lambda c, r, m: 1 / (c.ranks**2 * sum(2 * length for length in c.tokens)), _PADDING),
    (
        lambda c, r, m: 1 / c.ranks,
        "this is a sum over tokens, averaged over the ranks: what is left is to divide it by the number of all tokens",
    ),
    (lambda c, r, m: 1, "this is the sum over all tokens: what is left is to divide it by their number"),
    (
        lambda c, r, m: 1 / (c.microbatches * _total(c)),
        "the number of all tokens is enough: dividing by the number of micro-batches, too, makes the gradients smaller",
    ),
    (lambda c, r, m: _last(m, c) / _total(c), _LAST),
    (lambda c, r, m: _last(m, c) / sum(one[m] for one in c.counts), _LAST),
    (lambda c, r, m: _last(m, c) / (c.ranks * c.counts[r][m]), _LAST),
    (
        lambda c, r, m: 1 / sum(one[-1] for one in c.counts),
        "the tokens of the last micro-batch alone are counted: add up those of all, before the first backward",
    ),
)


def slip(case: Case, per_rank: list[dict]) -> str:
    """What there is to say about gradients that are those of other weights; "" if they are not."""
    for weight, hint in SLIPS:
        try:
            gradients = weighted(case, weight)
        except ZeroDivisionError:
            continue
        if diagnose(gradients, per_rank):
            return hint
    return ""
