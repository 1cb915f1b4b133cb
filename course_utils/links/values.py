"""`Link` and `Node`: which link two ranks have, and what it costs. Pure values; they say which backend to start."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from course_utils import hardware


def _number(name: str, value, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, expected {what}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: expected {what}, finite and at least 0")
    return float(value)


@dataclass(frozen=True)
class Link:
    """A link as the α-β model sees it: a message of n bytes takes α + n·β seconds.

    Attributes:
        alpha: seconds per message, however small.
        beta: seconds per byte, in one direction; 1 / bandwidth.
        name: for tables.

    Raises:
        TypeError, ValueError: alpha or beta is no finite number of at least 0.

    >>> round(Link(alpha=1e-3, beta=2e-8).seconds(steps=6, bytes=1_500_000), 6)
    0.036
    """

    alpha: float
    beta: float
    name: str = ""

    def __post_init__(self):
        object.__setattr__(self, "alpha", _number("alpha", self.alpha, "seconds per message"))
        object.__setattr__(self, "beta", _number("beta", self.beta, "seconds per byte"))

    @property
    def bandwidth(self) -> float:
        """Bytes per second in one direction.

        >>> f"{NVLINK.bandwidth:.3g}"
        '4.5e+11'
        """
        return 1 / self.beta if self.beta else math.inf

    def seconds(self, steps: float, bytes: float) -> float:
        """The time of an operation with so many steps one after the other, and so many bytes per rank in all."""
        return steps * self.alpha + bytes * self.beta

    def slower(self, times: float) -> Link:
        """The same link in slow motion: α and β multiplied, so that every ratio stays.

        >>> Link(1e-6, 2e-9).slower(1024)
        Link(alpha=0.001024, beta=2.048e-06, name='')
        """
        times = _number("times", times, "a factor")
        return replace(self, alpha=self.alpha * times, beta=self.beta * times)

    def kind(self, ranks: Sequence[int]) -> tuple[str, Link]:
        """Every two ranks have this link."""
        return self.name, self

    def check(self, world_size: int) -> None:
        """Any number of ranks will do."""

    def backend(self, board) -> str:
        """Called by a rank that joins a world on this link: the backend that keeps the time."""
        from .live import register

        return register(self, board)


@dataclass(frozen=True)
class Node:
    """Ranks in nodes: rank r is on node r // size. A group inside one node has one link, any other group the other.

    Each rank has a link of either kind to itself, as a GPU with a network card of its own has: what it does on one does
    not wait for the other, and what two groups do on the same one, waits.

    Attributes:
        size: ranks per node.
        inside, between: the links within a node and across nodes.

    Raises:
        TypeError, ValueError: size is no whole number of at least 1, or inside or between is no `Link`.

    >>> cluster = Node(4, inside=Link(1e-6, 1e-9), between=Link(1e-5, 1e-8))
    >>> cluster.kind([0, 3])[0], cluster.kind([3, 4])[0]
    ('inside', 'between')
    """

    size: int
    inside: Link
    between: Link

    def __post_init__(self):
        try:
            if isinstance(self.size, bool):
                raise TypeError
            object.__setattr__(self, "size", operator.index(self.size))
        except TypeError:
            raise TypeError(f"size={self.size!r}: expected a whole number of ranks per node") from None
        if self.size < 1:
            raise ValueError(f"size={self.size}: a node has at least one rank")
        for name in ("inside", "between"):
            if not isinstance(getattr(self, name), Link):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected a Link, such as Link(alpha=1e-6, beta=1e-9)")

    def slower(self, times: float) -> Node:
        """The same cluster in slow motion: all links slower by the same factor."""
        return replace(self, inside=self.inside.slower(times), between=self.between.slower(times))

    def kind(self, ranks: Sequence[int]) -> tuple[str, Link]:
        """Which kind of link a group of these ranks has, and the link: the slowest that its members need."""
        alone = len({rank // self.size for rank in ranks}) <= 1
        return ("inside", self.inside) if alone else ("between", self.between)

    def check(self, world_size: int) -> None:
        """Raises ValueError if the ranks don't fill their nodes."""
        if world_size % self.size:
            raise ValueError(
                f"nodes of {self.size} ranks don't divide world_size={world_size}: choose a node size that does"
            )

    def backend(self, board) -> str:
        """Called by a rank that joins a world on these links: the backend that keeps the time."""
        from .live import register

        return register(self, board)


def _published(link: hardware.Link, name: str) -> Link:
    """A published link, with the latency that NCCL's tuner assumes for a ring under its Simple protocol."""
    return Link(link.latency("ring", "Simple"), 1 / link.bytes_per_second, name)


NVLINK = _published(hardware.NVLINK_H100, "NVLink")
PCIE = Link(5.7e-6, 1 / hardware.PCIE_5.bytes_per_second, "PCIe")  # the tuner's PCI, ring, Simple
INFINIBAND = _published(hardware.INFINIBAND_NDR, "InfiniBand")
