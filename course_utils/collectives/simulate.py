"""All-reduce algorithms step by step: who sends which slice to whom, and what every rank holds after each step.

Each function takes the ranks' tensors and returns a `Run`: the steps one after another, as values that a figure, a
table or a test can look at. Within a step a rank sends one message at most and receives one at most, both at once (the
full-duplex, one-port model of the α–β costs), so a run's `cost` can be compared with `course_utils.collectives.costs`.

Source: the ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009); recursive doubling and the
binomial tree: Thakur, Rabenseifner, Gropp (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from course_utils.timeline import Event, Timeline

from .costs import Cost, amount


@dataclass(frozen=True)
class Message:
    """One slice on its way.

    Attributes:
        source, target: ranks.
        chunk: which of the run's slices: elements `start` to `stop` (not included) of the tensor.
        carries: the ranks whose numbers are summed in it.
        adds: True if the target adds it to its own slice, False if it replaces that.
        bytes: its size.
    """

    source: int
    target: int
    chunk: int
    start: int
    stop: int
    carries: tuple[int, ...]
    adds: bool
    bytes: int


@dataclass(frozen=True, eq=False)
class Step:
    """One round: its messages, and what the ranks hold after it.

    Attributes:
        messages: all sent at the same time.
        holds: `holds[rank][chunk]`: the ranks whose numbers are in that rank's sum of the chunk.
        values: `values[rank]`: its tensor, `[elements]`, read-only.
    """

    messages: tuple[Message, ...]
    holds: tuple[tuple[tuple[int, ...], ...], ...]
    values: tuple[np.ndarray, ...]

    @property
    def bytes(self) -> int:
        """Of the largest message: the others travel at the same time."""
        return max((message.bytes for message in self.messages), default=0)


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """An algorithm, carried out.

    Attributes:
        name: of the algorithm.
        chunks: into how many slices it cuts the tensor.
        start: what the ranks hold before, as a `Step` without messages.
        steps: the rounds.
    """

    name: str
    chunks: int
    start: Step
    steps: tuple[Step, ...]

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.start.values)

    @property
    def result(self) -> tuple[np.ndarray, ...]:
        """Each rank's tensor at the end, `[elements]`."""
        return (self.start, *self.steps)[-1].values

    @property
    def cost(self) -> Cost:
        """Steps and bytes, counted: of each step its largest message."""
        return Cost(len(self.steps), sum(step.bytes for step in self.steps))

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends in all steps together."""
        messages = [message for step in self.steps for message in step.messages]
        return tuple(sum(m.bytes for m in messages if m.source == rank) for rank in range(self.ranks))

    def timeline(self, alpha: float, beta: float) -> Timeline:
        """The run on links of `alpha` seconds and `beta` seconds per byte; a step ends with its largest message.

        >>> run = ring_all_reduce([[1, 2], [3, 4]])
        >>> run.timeline(alpha=1.0, beta=0.0).makespan
        2.0
        """
        alpha, beta = amount("alpha", alpha), amount("beta", beta)
        events, now = [], 0.0
        for step in self.steps:
            end = now + alpha + step.bytes * beta
            for rank in range(self.ranks):
                mine = [m for m in step.messages if rank in (m.source, m.target)]
                if not mine:
                    events.append(Event(rank, now, end, "waiting"))
                    continue
                done = now + alpha + max(m.bytes for m in mine) * beta
                names = [f"→{m.target}" if m.source == rank else f"←{m.source}" for m in mine]
                events.append(Event(rank, now, done, "communication", " ".join(sorted(names, reverse=True))))
                if done < end:
                    events.append(Event(rank, done, end, "waiting"))
            now = end
        return Timeline(tuple(events))

    def to_frame(self):
        """A pandas DataFrame with one line per message: step (from 1), source, target, chunk, carries, adds, bytes."""
        import pandas as pd

        columns = ("source", "target", "chunk", "carries", "adds", "bytes")
        lines = [
            [number, *(getattr(message, name) for name in columns)]
            for number, step in enumerate(self.steps, 1)
            for message in step.messages
        ]
        return pd.DataFrame(lines, columns=("step", *columns))

    def __repr__(self) -> str:
        return f"<{self.name} on {self.ranks} ranks: {self.cost.steps} steps, {self.cost.bytes:,} bytes>"


def ring_all_reduce(tensors: ArrayLike | Sequence[ArrayLike]) -> Run:
    """The ring: a reduce-scatter and an all-gather, p-1 steps each, in which every rank sends one of p slices on.

    After the first half rank r holds slice r of the sum. Where p doesn't divide the elements, the first slices have one
    element more, and the bytes are those of the larger ones.

    Args:
        tensors: one for each rank, `[ranks, elements]`; ints or floats.

    Raises:
        TypeError, ValueError: there is no rank, the tensors are no numbers, or they differ in shape or dtype.

    >>> run = ring_all_reduce([[1, 2, 3, 4], [10, 20, 30, 40]])
    >>> run.result[0].tolist(), run.result[1].tolist()
    ([11, 22, 33, 44], [11, 22, 33, 44])
    >>> run                                       # 2 (p-1) steps, 2 (p-1)/p of 32 bytes
    <ring on 2 ranks: 2 steps, 32 bytes>
    """
    values = _tensors(tensors)
    p = len(values)
    halves = [
        [[(r, (r + 1) % p, (r - 1 - step) % p, True) for r in range(p)] for step in range(p - 1)],
        [[(r, (r + 1) % p, (r - step) % p, False) for r in range(p)] for step in range(p - 1)],
    ]
    return _run("ring", values, p, halves[0] + halves[1])


def naive_ring_all_reduce(tensors: ArrayLike | Sequence[ArrayLike]) -> Run:
    """Whole tensors passed on round the ring p-1 times; every rank adds what comes by to its own.

    The ranks add in different orders, so with floats their results can differ in the last bit.

    Args and raises: as for `ring_all_reduce`.

    >>> naive_ring_all_reduce([[1, 2, 3, 4], [10, 20, 30, 40], [0, 0, 0, 1]])
    <naive ring on 3 ranks: 2 steps, 64 bytes>
    """
    values = _tensors(tensors)
    p = len(values)
    schedule = [[(r, (r + 1) % p, 0, True, (r - step) % p) for r in range(p)] for step in range(p - 1)]
    return _run("naive ring", values, 1, schedule)


def recursive_doubling_all_reduce(tensors: ArrayLike | Sequence[ArrayLike]) -> Run:
    """Whole tensors exchanged with the rank at distance 1, 2, 4, …: after step k, a rank has the sum of 2^k ranks.

    If p is no power of two, the first ranks pair up before and after, as in MPICH: the odd ones take part for both.

    Args and raises: as for `ring_all_reduce`.

    >>> recursive_doubling_all_reduce([[1], [2], [3], [4]]).result[0].tolist()
    [10]
    """
    values = _tensors(tensors)
    p = len(values)
    doublings = p.bit_length() - 1
    extra = p - 2**doublings  # ranks too many: 0, 2, …, 2 extra - 2 sit out
    active = [*range(1, 2 * extra, 2), *range(2 * extra, p)]
    schedule = [[(r, active[i ^ 2**k], 0, True) for i, r in enumerate(active)] for k in range(doublings)]
    if extra:
        before = [(r, r + 1, 0, True) for r in range(0, 2 * extra, 2)]
        after = [(r + 1, r, 0, False) for r in range(0, 2 * extra, 2)]
        schedule = [before, *schedule, after]
    return _run("recursive doubling", values, 1, schedule)


def tree_all_reduce(tensors: ArrayLike | Sequence[ArrayLike]) -> Run:
    """Up a binomial tree to rank 0, adding, and down again.

    Args and raises: as for `ring_all_reduce`.

    >>> run = tree_all_reduce([[1], [2], [3], [4]])
    >>> [[(m.source, m.target) for m in step.messages] for step in run.steps]
    [[(1, 0), (3, 2)], [(2, 0)], [(0, 2)], [(0, 1), (2, 3)]]
    """
    values = _tensors(tensors)
    p = len(values)
    levels = [2**k for k in range((p - 1).bit_length())]
    up = [[(r, r - d, 0, True) for r in range(d, p, 2 * d)] for d in levels]
    down = [[(r - d, r, 0, False) for r in range(d, p, 2 * d)] for d in reversed(levels)]
    return _run("tree", values, 1, up + down)


def _run(name: str, values: list[np.ndarray], chunks: int, schedule: list[list[tuple]]) -> Run:
    """Carry out a schedule: steps of `(source, target, chunk, adds)`, and a fifth for whose original tensor is sent."""
    bounds = np.cumsum([0] + [len(part) for part in np.array_split(values[0], chunks)]).tolist()
    original, state = values, [value.copy() for value in values]
    holds = [[(rank,)] * chunks for rank in range(len(values))]
    start, steps = _after((), holds, state), []
    for sends in schedule:
        for end in (0, 1):  # one port each way
            assert len({send[end] for send in sends}) == len(sends), f"{name}: a rank sends or receives twice in a step"
        packed = []
        for source, target, chunk, adds, *origin in sends:
            cut = slice(bounds[chunk], bounds[chunk + 1])
            payload = (original[origin[0]] if origin else state[source])[cut].copy()
            carries = tuple(origin) or holds[source][chunk]
            message = Message(source, target, chunk, cut.start, cut.stop, carries, adds, payload.nbytes)
            packed.append((message, payload))
        for message, payload in packed:
            cut, mine = slice(message.start, message.stop), holds[message.target]
            if message.adds:
                assert not set(message.carries) & set(mine[message.chunk]), f"{name}: something is added twice"
                state[message.target][cut] += payload
                mine[message.chunk] = tuple(sorted(mine[message.chunk] + message.carries))
            else:
                state[message.target][cut] = payload
                mine[message.chunk] = message.carries
        steps.append(_after(tuple(message for message, _ in packed), holds, state))
    return Run(name, chunks, start, tuple(steps))


def _after(messages: tuple[Message, ...], holds: list[list[tuple]], state: list[np.ndarray]) -> Step:
    values = tuple(value.copy() for value in state)
    for value in values:
        value.flags.writeable = False
    return Step(messages, tuple(tuple(chunks) for chunks in holds), values)


def _tensors(tensors: ArrayLike | Sequence[ArrayLike]) -> list[np.ndarray]:
    try:
        values = [np.array(tensor) for tensor in tensors]
    except TypeError:
        raise TypeError(f"tensors={tensors!r}: one tensor for each rank was expected, [ranks, elements]") from None
    if not values:
        raise ValueError("tensors is empty: one tensor for each rank was expected, and zero ranks have none")
    for rank, value in enumerate(values):
        if value.ndim != 1 or value.dtype.kind not in "iuf":
            raise TypeError(
                f"the tensor of rank {rank} is {value.dtype}{list(value.shape)}: one dimension of ints or floats was "
                "expected"
            )
        if value.shape != values[0].shape or value.dtype != values[0].dtype:
            raise ValueError(
                f"the tensor of rank {rank} is {value.dtype}{list(value.shape)} and that of rank 0 "
                f"{values[0].dtype}{list(values[0].shape)}: an all-reduce needs the same on every rank"
            )
    return values
