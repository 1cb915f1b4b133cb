"""Measured times of a collective, and the two bandwidths by which nccl-tests reports them.

The value is `Timings`: one `Timing` for each size, produced by `time_collective` on live ranks. Algorithm bandwidth is
size / time; bus bandwidth multiplies it by the share of the size that one rank has to send at least, so that it can be
held against a link's speed, whatever the number of ranks. GB is 10^9 bytes.

Source: NVIDIA nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import html
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from course_utils.traffic import cost as traffic

from .costs import amount, whole

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
"""The operations that nccl-tests has a factor for, and that can be timed here."""

_ROOTED = ("broadcast", "reduce")


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth: 2 (n-1)/n for all-reduce, (n-1)/n or 1 for the others.

    It is the share of the size that one rank sends (`course_utils.traffic.cost`); of the rooted operations, the root of
    a broadcast, and any other rank in a reduce. On one rank it is 0, except for these two.

    Args:
        operation: one of `OPERATIONS`.

    Raises:
        TypeError, ValueError: the operation is unknown, or ranks is no whole number or below 1.

    >>> bus_factor("all_reduce", ranks=8), bus_factor("all_gather", ranks=8), bus_factor("broadcast", ranks=8)
    (1.75, 0.875, 1.0)
    """
    known_operation(operation)
    ranks = whole("ranks", ranks, least=1)
    if operation in _ROOTED:
        return 1.0
    return float(getattr(traffic, operation)(1, ranks))


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Bytes per second: size / seconds, of the array that nccl-tests takes as the size (see `costs`).

    Raises:
        TypeError, ValueError: size is no whole number of bytes, or seconds is not above 0.

    >>> algorithm_bandwidth(1_000_000, seconds=0.5)
    2000000.0
    """
    if amount("seconds", seconds) == 0:
        raise ValueError("seconds=0: a time above 0 was expected")
    return whole("size", size) / float(seconds)


def bus_bandwidth(operation: str, size: int, ranks: int, seconds: float) -> float:
    """Bytes per second: algorithm bandwidth · `bus_factor`.

    Raises:
        TypeError, ValueError: as for `algorithm_bandwidth` and `bus_factor`.

    >>> bus_bandwidth("all_reduce", 1_000_000, ranks=4, seconds=0.5)
    3000000.0
    """
    return algorithm_bandwidth(size, seconds) * bus_factor(operation, ranks)


@dataclass(frozen=True)
class Timing:
    """One size, timed.

    Attributes:
        operation: one of `OPERATIONS`.
        ranks: in the group.
        size: bytes, as nccl-tests counts them (see `costs`).
        seconds, fastest, slowest: median, minimum and maximum over the repetitions of the slowest rank's time.
        wrong: elements that were not right in the last repetition, summed over the ranks.
    """

    operation: str
    ranks: int
    size: int
    seconds: float
    fastest: float
    slowest: float
    wrong: int = 0

    def __post_init__(self) -> None:
        known_operation(self.operation)
        for name, least in (("ranks", 1), ("size", 0), ("wrong", 0)):
            whole(name, getattr(self, name), least)
        for name in ("seconds", "fastest", "slowest"):
            amount(name, getattr(self, name))

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, bytes per second."""
        return algorithm_bandwidth(self.size, self.seconds)

    @property
    def busbw(self) -> float:
        """Bus bandwidth, bytes per second."""
        return bus_bandwidth(self.operation, self.size, self.ranks, self.seconds)


@dataclass(frozen=True, repr=False)
class Timings:
    """A collective timed at several sizes. `str()` and a notebook show it as a table.

    >>> table = Timings((Timing("all_reduce", ranks=4, size=1_000_000, seconds=0.5, fastest=0.4, slowest=0.7),))
    >>> table.sizes, table.seconds, table.busbw
    ((1000000,), (0.5,), (3000000.0,))
    >>> print(table)
    operation   ranks     size (B)    time (µs)     min (µs)     max (µs)  algbw (GB/s)  busbw (GB/s)  wrong
    all_reduce      4    1,000,000    500,000.0    400,000.0    700,000.0         0.002         0.003      0
    """

    rows: tuple[Timing, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        for row in self.rows:
            if not isinstance(row, Timing):
                raise TypeError(f"Timings holds Timing rows, and was given a {type(row).__name__}: {row!r}")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Timing]:
        return iter(self.rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes."""
        return tuple(row.size for row in self.rows)

    @property
    def seconds(self) -> tuple[float, ...]:
        """The median of each size."""
        return tuple(row.seconds for row in self.rows)

    @property
    def algbw(self) -> tuple[float, ...]:
        """Bytes per second."""
        return tuple(row.algbw for row in self.rows)

    @property
    def busbw(self) -> tuple[float, ...]:
        """Bytes per second."""
        return tuple(row.busbw for row in self.rows)

    def to_frame(self):
        """A pandas DataFrame with one line per size: seconds, and bytes per second."""
        import pandas as pd

        columns = ("operation", "ranks", "size", "seconds", "fastest", "slowest", "algbw", "busbw", "wrong")
        return pd.DataFrame([[getattr(row, name) for name in columns] for row in self.rows], columns=columns)

    def __str__(self) -> str:
        if not self.rows:
            return "no size was timed"
        head, *body = self._table()
        lines = [f"{head[0]:<10}  {head[1]:>5}" + "".join(f"  {cell:>{w}}" for cell, w in zip(head[2:], _WIDTHS))]
        lines += [
            f"{row[0]:<10}  {row[1]:>5}" + "".join(f"  {c:>{w}}" for c, w in zip(row[2:], _WIDTHS)) for row in body
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = self._table()
        rows = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
        rows += ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in body]
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"

    def _table(self) -> list[list[str]]:
        times, rates = ("time (µs)", "min (µs)", "max (µs)"), ("algbw (GB/s)", "busbw (GB/s)")
        table = [["operation", "ranks", "size (B)", *times, *rates, "wrong"]]
        for row in self.rows:
            micro = [f"{1e6 * seconds:,.1f}" for seconds in (row.seconds, row.fastest, row.slowest)]
            giga = [f"{rate / 1e9:.4g}" for rate in (row.algbw, row.busbw)]
            table.append([row.operation, str(row.ranks), f"{row.size:,}", *micro, *giga, str(row.wrong)])
        return table


_WIDTHS = (11, 11, 11, 11, 12, 12, 5)


def copy_bandwidth(size: int = 64 * 2**20, repeats: int = 7) -> float:
    """How fast this machine copies memory, in bytes per second: the ceiling for ranks that share it.

    `size` bytes are copied by one thread from one numpy array to another; the median of the repetitions counts, and a
    byte copied counts once (it is read and written, so the memory moves twice as many). Choose a size above the
    processor's cache.

    Args:
        size: bytes, at least 1. repeats: at least 1; one more is made first and not counted.

    Raises:
        TypeError, ValueError: one of them is no whole number or below 1.

    >>> copy_bandwidth(size=2**20, repeats=3) > 1e6
    True
    """
    import numpy as np

    size, repeats = whole("size", size, least=1), whole("repeats", repeats, least=1)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return size / statistics.median(times[1:])


def known_operation(operation: str) -> str:
    """The operation's name, if it is one of `OPERATIONS`.

    Raises:
        ValueError: it is not.

    >>> known_operation("all_reduce")
    'all_reduce'
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation={operation!r} is none of {', '.join(OPERATIONS)}")
    return operation
