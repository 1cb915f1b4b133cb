"""The second exercise of notebook 01: what FSDP2 holds on every rank, to the byte.

The right answer is counted: live ranks take a step, and `course_utils.memory.measure_states` looks at them. `Way` is
how one computes it from the shapes, and, with one thing changed, how one gets it wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from course_utils.grading.judged import Argument, Judged, Slip, calls
from course_utils.grading.reports import Report, Row
from course_utils.memory import measure_states
from course_utils.world import World

Layers = list[list[tuple[int, ...]]]  # the shapes of each layer's parameters
PURPOSES = ("parameters", "gradients", "optimizer", "gathered")


def layers_of(world_size: int, seed: int) -> tuple[Layers, int]:
    """The shapes of a stack of linear layers, and the bytes of a value.

    Some rows do not divide, and, from three ranks on, torch.chunk deals them otherwise than evenly, and leaves the last
    rank none of some tensor. The largest layer is the first for an even seed, which is in FP32, and the last for an odd
    one, which is in BF16 and has a layer without a bias.

    >>> layers_of(4, 0)
    ([[(17, 11), (17,)], [(3, 17), (3,)], [(6, 3), (6,)]], 4)
    """
    draw = random.Random(f"layers {world_size} {seed}")
    many = draw.randint(3, 5) * world_size + draw.randint(1, max(1, world_size - 2))
    other = draw.choice([width for width in range(8, 12) if width % world_size or world_size == 1])
    widths = [other, many, max(2, world_size - 1), draw.randint(5, 7)]
    if seed % 2:
        widths.reverse()
    layers = [[(out, into), (out,)] for into, out in zip(widths, widths[1:])]
    if seed % 2:
        layers[1] = layers[1][:1]
    return layers, 2 if seed % 2 else 4


def _measured(layers: Layers, value_bytes: int) -> dict[str, int]:
    """What this rank holds under FSDP2 after a step of Adam, and what was gathered at most in a forward pass."""
    from torch.distributed.fsdp import fully_shard

    dtype = {2: torch.bfloat16, 4: torch.float32}[value_bytes]
    stack = [nn.Linear(shapes[0][1], shapes[0][0], bias=len(shapes) == 2, dtype=dtype) for shapes in layers]
    model = nn.Sequential(*stack)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    adam = torch.optim.Adam(model.parameters())
    gathered = []

    def look(*_):
        gathered.append(measure_states(model).extra.get("gathered parameters", 0))

    for layer in model:
        layer.register_forward_pre_hook(look)
    model(torch.ones(2, layers[0][0][1], dtype=dtype)).square().sum().backward()
    adam.step()
    held = measure_states(model, adam)
    extra = held.extra
    return {
        "parameters": held.parameters + extra.get("padding of parameters", 0),
        "gradients": held.gradients + extra.get("padding of gradients", 0),
        "optimizer": held.optimizer + extra.get("optimizer's step counters", 0),
        "gathered": max(gathered),
    }


@dataclass(frozen=True)
class Way:
    """One way of computing the answer: the right one by default, and with a change a wrong one."""

    rows: Callable[[int, int, int], float] = lambda rows, ranks, rank: min(
        math.ceil(rows / ranks), max(0, rows - rank * math.ceil(rows / ranks))
    )
    held_rows: Callable[[int, int, int], float] = lambda rows, ranks, rank: math.ceil(rows / ranks)
    optimizer_rows: Callable[[int, int, int], float] | None = None
    counters: Callable[[int, int], int] = lambda tensors, value_bytes: 4 * tensors
    gathered: Callable[[list[int]], int] = max
    padded_gather: bool = True
    moments: int = 2
    bytes_of: Callable[[int], int] = lambda value_bytes: value_bytes

    def __call__(self, layers: Layers, ranks: int, value_bytes: int) -> list[dict[str, float]]:
        """
        >>> Way()([[(5, 33)]], 4, 4)[3]
        {'parameters': 264, 'gradients': 264, 'optimizer': 4, 'gathered': 1056}
        """
        each = self.bytes_of(value_bytes)
        shapes = [shape for layer in layers for shape in layer]

        def local(rows: Callable, rank: int, some: Iterable[tuple[int, ...]]) -> float:
            return each * sum(rows(shape[0], ranks, rank) * math.prod(shape[1:]) for shape in some)

        whole = [
            ranks * local(self.held_rows, 0, layer) if self.padded_gather else each * sum(map(math.prod, layer))
            for layer in layers
        ]
        return [
            {
                "parameters": local(self.held_rows, rank, shapes),
                "gradients": local(self.held_rows, rank, shapes),
                "optimizer": self.moments * local(self.optimizer_rows or self.rows, rank, shapes)
                + self.counters(len(shapes), value_bytes),
                "gathered": self.gathered(whole),
            }
            for rank in range(ranks)
        ]


def _even(rows: int, ranks: int, rank: int) -> Fraction:
    return Fraction(rows, ranks)


def _floor(rows: int, ranks: int, rank: int) -> int:
    return rows // ranks


def _ceil(rows: int, ranks: int, rank: int) -> int:
    return math.ceil(rows / ranks)


def _balanced(rows: int, ranks: int, rank: int) -> int:
    return rows // ranks + (rank < rows % ranks)


_real = Way().rows
# The ways to get each purpose wrong.
_SLIPS: dict[str, tuple[Slip, ...]] = {
    "parameters": (
        Slip(Way(held_rows=_real), "collectives want equal sizes: how many rows does a rank allocate that owns fewer?"),
        Slip(Way(held_rows=_even), "half a row is nobody's: FSDP2 cuts whole rows, as torch.chunk does"),
        Slip(Way(held_rows=_floor), "with rows // world_size some rows have no owner: which way must one round?"),
        Slip(
            Way(held_rows=_balanced),
            "torch.chunk does not spread the rest: its first pieces are full, the last short",
        ),
        Slip(Way(held_rows=lambda rows, ranks, rank: rows), "that is the whole model: what of it stays on one rank?"),
        Slip(Way(bytes_of=lambda value_bytes: 4), "is every value four bytes long? see value_bytes"),
    ),
    "optimizer": (
        Slip(Way(counters=lambda tensors, value_bytes: 0), "Adam keeps one thing more for every tensor, on every rank"),
        Slip(
            Way(counters=lambda tensors, value_bytes: value_bytes * tensors),
            "a step counter is an FP32 number, whatever its parameter is",
        ),
        Slip(
            Way(counters=lambda tensors, value_bytes: 8 * tensors),
            "one step counter for each tensor: Adam's two moments share it",
        ),
        Slip(Way(counters=lambda tensors, value_bytes: 4), "a step counter for each tensor, not one for all of them"),
        Slip(
            Way(optimizer_rows=_ceil),
            "padding is there for collectives, and the optimizer has none: of how many rows does it make its state?",
        ),
        Slip(Way(optimizer_rows=_even), "half a row is nobody's: FSDP2 cuts whole rows, as torch.chunk does"),
        Slip(
            Way(optimizer_rows=_balanced),
            "torch.chunk does not spread the rest evenly: its first pieces are full, the last are short or empty",
        ),
        Slip(Way(optimizer_rows=_floor), "with rows // world_size some rows have no owner: which way must one round?"),
        Slip(Way(moments=1), "Adam keeps two moments"),
        Slip(Way(bytes_of=lambda value_bytes: 4), "the moments have the dtype of their parameter: see value_bytes"),
        Slip(
            Way(optimizer_rows=_ceil, counters=lambda tensors, value_bytes: 0),
            "two things: the optimizer's state has no padding, and Adam keeps one thing more for every tensor",
        ),
        Slip(
            Way(optimizer_rows=_even, counters=lambda tensors, value_bytes: 0),
            "two things: whole rows are cut, as torch.chunk does, and Adam keeps one thing more for every tensor",
        ),
    ),
    "gathered": (
        Slip(
            Way(gathered=sum),
            "each layer is freed after its forward, before the next is gathered: what is the most at a time?",
        ),
        Slip(Way(padded_gather=False), "the buffer takes what every rank sends, and every rank sends its padding too"),
        Slip(
            Way(padded_gather=False, gathered=sum),
            "each layer is freed before the next is gathered; and every rank sends its padding too",
        ),
        Slip(
            Way(gathered=lambda whole: 0),
            "a layer can't compute with a slice of its weights: what does FSDP2 make of it first?",
        ),
        Slip(Way(gathered=lambda whole: whole[-1]), "the fullest moment belongs to the largest layer, not to the last"),
        Slip(Way(gathered=lambda whole: whole[0]), "the fullest moment belongs to the largest layer, not to the first"),
        Slip(Way(bytes_of=lambda value_bytes: 4), "is every value four bytes long? see value_bytes"),
    ),
}
_SLIPS["gradients"] = tuple(
    Slip(
        slip.answer,
        slip.hint.replace("that is the whole model: what of it stays", "those are all gradients: what stays"),
    )
    for slip in _SLIPS["parameters"]
)


def _examine_held(fn: Callable, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    cases = {size: [layers_of(size, seed + again) for again in (0, 1)] for size in world_sizes}
    arguments = [(layers, size, each) for size, drawn in cases.items() for layers, each in drawn]
    with World(1, timeout=timeout, device="cpu") as world:
        (answers,) = world.run(calls, fn, arguments)
    for size, drawn in cases.items():
        with World(size, timeout=60, device="cpu") as world:
            for layers, each in drawn:
                answer, where = answers.pop(0), f"held on {_on(size)}, {'BF16' if each == 2 else 'FP32'}"
                wrong = _no_ledger(answer, size)
                if wrong:
                    return Report(False, f"{where}: it returned {wrong}")
                report = _compare(where, answer, world.run(_measured, layers, each), layers, each)
                if not report.passed:
                    return report
    *most, last = map(str, cases)
    on = f"{', '.join(most)} and {last} ranks" if most else _on(*cases)
    return Report(True, f"held is right on {on}, in FP32 and in BF16: every byte that they hold")


def _on(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _no_ledger(answer, world_size: int) -> str:
    """What is wrong with the form of an answer; "" if nothing."""
    if answer is None:
        return "None: is there a return at its end?"
    if not isinstance(answer, list | tuple) or len(answer) != world_size:
        size = f" of {len(answer)}" if isinstance(answer, list | tuple) else ""
        return f"a {type(answer).__name__}{size}: a list of {world_size} dictionaries was expected, one for each rank"
    for rank, held in enumerate(answer):
        if not isinstance(held, dict):
            return f"a {type(held).__name__} for rank {rank}: a dictionary was expected"
        if set(held) != set(PURPOSES):
            keys = ", ".join(map(repr, held)) or "nothing"
            return f"{keys} for rank {rank}: the purposes are {', '.join(map(repr, PURPOSES))}"
        for purpose, value in held.items():
            if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
                return f"a {type(value).__name__} for {purpose} of rank {rank}: a number of bytes was expected"
    return ""


def _compare(where: str, answer: list, counted: list[dict[str, int]], layers: Layers, value_bytes: int) -> Report:
    rows, sick = [], []
    for purpose in PURPOSES:
        yours, ranks = [held[purpose] for held in answer], [held[purpose] for held in counted]
        if yours != ranks:
            sick.append(purpose)
        rows.append(Row(yours == ranks, (purpose, _numbers(ranks), _numbers(yours))))
    if not sick:
        return Report(True, where)
    *most, last = sick
    names = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    return Report(
        False,
        f"{where}: {names} not what the ranks hold",
        ("", "counted, by rank", "yours"),
        tuple(rows),
        detail=f"layers = {layers}",
        hint=_hint(sick[0], answer, layers, value_bytes),
    )


def _numbers(values: list) -> str:
    same = len(set(values)) == 1 and len(values) > 1
    return f"{float(values[0]):,.12g} on all" if same else ", ".join(f"{float(value):,.12g}" for value in values)


def _hint(purpose: str, answer: list, layers: Layers, value_bytes: int) -> str:
    yours = [held[purpose] for held in answer]
    for slip in _SLIPS[purpose]:
        theirs = [held[purpose] for held in slip.answer(layers, len(answer), value_bytes)]
        if all(abs(your - their) < 1 for your, their in zip(yours, theirs)):  # rounded in one way or another
            return slip.hint
    right = [held[purpose] for held in Way()(layers, len(answer), value_bytes)]
    if len(set(yours)) == 1 < len(set(right)):
        return f"the ranks do not hold the same {purpose}: the first have full pieces, the last have what is left"
    return _GENERAL[purpose]


_GENERAL = {
    "parameters": "of every tensor a rank allocates ⌈rows / world_size⌉ rows; a bias has rows too",
    "gradients": "gradients are cut, and padded, as their parameters are",
    "optimizer": "two moments of the rows that the rank really has, and a step counter for every tensor",
    "gathered": "while a layer computes, its parameters are whole on every rank: world_size times what one rank sends",
}

HELD = Judged(
    name="held",
    inputs=tuple(map(Argument, ("layers", "world_size", "value_bytes"))),
    start="for each rank, go through all shapes: how many rows does it own, and how many does it allocate?",
    examine=_examine_held,
)
