"""The models on which gradients are averaged during backward, and how full their buckets are; for `overlapped`.

Buckets are filled greedily: for tensors in a given order no way of filling makes fewer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from course_utils.grading.judged import FLOAT, drawn
from course_utils.paced import Paced

BATCH = 3  # samples on each rank
PACE = 0.004  # seconds of a layer's backward

Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    """Linear layers, one after the other; paced, or with parameters that are special.

    Of the special ones two are not used by forward: their buckets, the last two in line, are never complete.
    """

    def __init__(self, case: Case):
        super().__init__()
        if case.kind == "special":
            self.unused = nn.Parameter(torch.zeros(case.widths[0]))  # shares the last bucket with what is trained
        layers = [nn.Linear(into, out) for into, out in zip(case.widths, case.widths[1:])]
        if case.kind == "special":
            layers[-1].weight = layers[0].weight
            layers[1].weight.requires_grad_(False)
            layers[0].unused = nn.Parameter(torch.zeros(case.bucket_bytes // FLOAT + 1))  # has one to itself, before it
        if case.kind == "paced":
            layers = [Paced(layer, 0, PACE, name=f"layer {i}") for i, layer in enumerate(layers)]
        self.layers = nn.ModuleList(layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(drawn(f"{case} {name}", *parameter.shape) / math.sqrt(parameter.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True)
class Case:
    """A model, and how many bytes go into a bucket.

    Attributes:
        kind: "plain"; "special", with tied, frozen and unused parameters; or "paced", with layers that take their time.
        widths: features that go into the first layer, and come out of each.
        bucket_bytes: what a bucket holds at most; a larger tensor has one to itself.
        seed: of the weights and the samples.
    """

    kind: str
    widths: tuple[int, ...]
    bucket_bytes: int
    seed: int

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """x [BATCH, widths[0]] and the y [BATCH, widths[-1]] that is wanted, of this rank in this step."""
        return tuple(
            drawn(f"{self} {what} {step} {rank}", BATCH, self.widths[place]) for what, place in (("x", 0), ("y", -1))
        )

    @property
    def twin(self) -> Net:
        """The model as a single process has it."""
        return _twin(self)

    def gradients(self, step: int, ranks: Sequence[int]) -> Gradients:
        """Those of a single process that has the batches of these ranks."""
        xs, ys = zip(*(self.batch(step, rank) for rank in ranks))
        twin = self.twin
        twin.zero_grad(set_to_none=True)
        loss(twin(torch.cat(xs)), torch.cat(ys)).backward()
        return {name: p.grad for name, p in twin.named_parameters()}

    @property
    def trained(self) -> dict[str, int]:
        """Name -> bytes of each parameter that asks for a gradient, in the order of `model.parameters()`."""
        return dict(_trained(self.kind, self.widths, self.bucket_bytes))

    def buckets(self) -> list[list[str]]:
        """Filled greedily from the last parameter to the first."""
        return filled(dict(reversed(self.trained.items())), self.bucket_bytes)

    def gradients_exist(self) -> int:
        """Bytes of the gradients that come: what has to travel in a step, at least."""
        return sum(FLOAT * value.numel() for value in self.gradients(0, [0]).values() if value is not None)

    def left_to_finish(self) -> int:
        """How many buckets, in line, can't start in backward: the first without one of its gradients, and all behind;
        one where every gradient comes, for those that don't fill their last bucket."""
        comes = {name for name, value in self.gradients(0, [0]).items() if value is not None}
        buckets = self.buckets()
        complete = [comes.issuperset(bucket) for bucket in buckets]
        return 1 if all(complete) else len(buckets) - complete.index(False)

    def enough(self) -> int:
        """How many all-reduces a step may take: as many as greedy buckets, in the order of `model.parameters()` or of
        readiness, whichever makes more."""
        ready, model = [], Net(self)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
        loss(model(self.batch(0, 0)[0]), self.batch(0, 0)[1]).backward()
        by_readiness = filled({name: self.trained[name] for name in ready}, self.bucket_bytes)
        return max(len(self.buckets()), len(by_readiness))

    def __str__(self) -> str:
        return f"{self.kind} {self.widths} {self.seed}"

    @property
    def layout(self) -> str:
        """The parameters in their order, for the reader."""
        lines = []
        for name, p in self.twin.named_parameters():
            what = dict.fromkeys(("unused", "layers.0.unused"), ", not used by forward")
            what["layers.0.weight"] = f", tied to layers.{len(self.widths) - 2}"
            more = what.get(name, "") if self.kind == "special" else ""
            lines.append(f"{name} {list(p.shape)}, {FLOAT * p.numel()} bytes{more if p.requires_grad else ', frozen'}")
        return "\n".join([f"bucket_bytes={self.bucket_bytes}; model.named_parameters():", *(f"  {x}" for x in lines)])


@lru_cache(maxsize=64)
def _trained(kind: str, widths: tuple[int, ...], bucket_bytes: int) -> tuple[tuple[str, int], ...]:
    model = Net(Case(kind, widths, bucket_bytes, 0))
    return tuple((name, FLOAT * p.numel()) for name, p in model.named_parameters() if p.requires_grad)


@lru_cache(maxsize=8)
def _twin(case: Case) -> Net:
    return Net(case)


def filled(sizes: dict[str, int], most: int, overfull: bool = False) -> list[list[str]]:
    """Buckets, filled in this order up to `most` bytes; what is larger has one to itself.

    >>> filled({"a": 8, "b": 8, "c": 40, "d": 4}, most=16)
    [['a', 'b'], ['c'], ['d']]
    """
    buckets: list[list[str]] = [[]]
    for name, size in sizes.items():
        held = sum(sizes[other] for other in buckets[-1])
        if buckets[-1] and (held >= most if overfull else held + size > most):
            buckets.append([])
        buckets[-1].append(name)
    return buckets


def loss(y: Tensor, target: Tensor) -> Tensor:
    """The squared distance, summed over the outputs; the mean over the samples."""
    return (y - target).square().sum(1).mean()


def plain(seed: int) -> Case:
    """Widths of all sorts; one tensor is larger than a bucket, others share one, and would overfill it.

    >>> case = plain(0)
    >>> case.widths, case.bucket_bytes, case.buckets()[0]
    ((3, 4, 6, 3, 3), 72, ['layers.3.bias', 'layers.3.weight', 'layers.2.bias'])
    """

    def suits(case: Case) -> bool:
        sizes = dict(reversed(case.trained.items()))
        over = filled(sizes, case.bucket_bytes, overfull=True)
        too_full = any(sum(sizes[name] for name in bucket) > case.bucket_bytes for bucket in over if len(bucket) > 1)
        return max(sizes.values()) > case.bucket_bytes and too_full and _some(case)

    draw = random.Random(f"plain {seed}")
    while True:
        widths = tuple(draw.randint(3, 7) for _ in range(5))
        suitable = list(filter(suits, (Case("plain", widths, most, seed) for most in range(60, 200, 4))))
        if suitable:
            return draw.choice(suitable)


def special(seed: int) -> Case:
    """With a parameter that is tied, one that is frozen, and two that forward doesn't use: one in a bucket of its own,
    and behind it one in a bucket with others.

    >>> special(0).buckets()[-2:]
    [['layers.0.unused'], ['layers.0.bias', 'layers.0.weight', 'unused']]
    """
    draw = random.Random(f"special {seed}")
    cases = (Case("special", (width,) * 6, most, seed) for width in (4, 5, 6) for most in range(40, 400, 4))
    return draw.choice(
        [case for case in cases if len(case.buckets()) >= 4 and case.left_to_finish() == 2 and _some(case)]
    )


def _some(case: Case) -> bool:
    """Several buckets, and fewer than parameters."""
    return 3 <= len(case.buckets()) <= len(case.trained) - 3


def paced(seed: int) -> Case:
    """Layers that take their time, each one bucket."""
    width = 4 + seed % 3
    return Case("paced", (width,) * 6, FLOAT * (width * width + width), seed)
