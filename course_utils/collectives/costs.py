"""The α–β cost of each collective and algorithm: how many steps, and how many bytes, one after another.

A message of n bytes takes α + n·β: a latency in seconds, and seconds per byte. An algorithm is a sequence of rounds, so
its time is steps·α + bytes·β, where `steps` counts the rounds and `bytes` adds up the largest message of each round.
Where every rank sends alike (ring, recursive doubling) these are the bytes that one rank sends, and the same numbers as
in `course_utils.traffic.cost`; in a tree they are the bytes along its longest path. Adding numbers is taken to be free.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
and for the ring Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009). `ranks` is their p, and `size`
their n, in bytes: of the tensor for all-reduce, broadcast and reduce, else of the whole array of one rank (the
input of a reduce-scatter or an all-to-all, the output of an all-gather, what the root of a gather or a scatter holds).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from course_utils.traffic import cost as traffic
from course_utils.traffic.cost import Bytes, tidy


@dataclass(frozen=True)
class Cost:
    """What an algorithm costs, before the link is known.

    Attributes:
        steps: rounds that follow one another; each costs one latency α.
        bytes: the largest message of each round, summed; an exact Fraction where size isn't a multiple of ranks.

    >>> ring_all_reduce(8_000_000, ranks=8)
    Cost(steps=14, bytes=14000000)
    """

    steps: int
    bytes: Bytes

    def seconds(self, alpha: float, beta: float) -> float:
        """steps·alpha + bytes·beta; alpha in seconds, beta in seconds per byte.

        Raises:
            TypeError, ValueError: one of them is no number, negative, infinite or NaN.

        >>> f"{Cost(steps=14, bytes=14_000_000).seconds(alpha=10e-6, beta=1 / 10e9):.5f}"
        '0.00154'
        """
        return self.steps * amount("alpha", alpha) + float(self.bytes) * amount("beta", beta)

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.steps + other.steps, tidy(self.bytes + other.bytes))


Algorithm = Callable[[int, int], Cost]
"""A function of `(size, ranks)` that gives a `Cost`: every function below but `send`, `barrier` and the hierarchy."""


def ring_all_reduce(size: int, ranks: int) -> Cost:
    """2 (p-1) α + 2 (p-1)/p n β: a reduce-scatter and an all-gather round a ring.

    >>> ring_all_reduce(24, ranks=4)
    Cost(steps=6, bytes=36)
    """
    return ring_reduce_scatter(size, ranks) + ring_all_gather(size, ranks)


def naive_ring_all_reduce(size: int, ranks: int) -> Cost:
    """(p-1) (α + n β): whole tensors passed on p-1 times. It moves p/2 times as much as the ring.

    >>> naive_ring_all_reduce(24, ranks=4)
    Cost(steps=3, bytes=72)
    """
    return _rounds(size, whole("ranks", ranks, least=1) - 1)


def recursive_doubling_all_reduce(size: int, ranks: int) -> Cost:
    """log2(p) (α + n β): whole tensors exchanged with partners at distance 1, 2, 4, …

    For a p that is no power of two, the ranks above the largest one hand their tensor to a neighbour first and get the
    sum back last, as in MPICH: two more rounds.

    >>> recursive_doubling_all_reduce(24, ranks=8), recursive_doubling_all_reduce(24, ranks=6)
    (Cost(steps=3, bytes=72), Cost(steps=4, bytes=96))
    """
    ranks = whole("ranks", ranks, least=1)
    doublings = ranks.bit_length() - 1
    return _rounds(size, doublings + 2 * (ranks != 2**doublings))


def tree_all_reduce(size: int, ranks: int) -> Cost:
    """2 ceil(log2 p) (α + n β): a reduce up a binomial tree and a broadcast down it.

    (NCCL's "tree" is two binary trees through which the tensor flows in pieces: it has the latency of a tree and nearly
    the bandwidth of a ring, and is not this algorithm.)

    >>> tree_all_reduce(24, ranks=8)
    Cost(steps=6, bytes=144)
    """
    return tree_reduce(size, ranks) + tree_broadcast(size, ranks)


def rabenseifner_all_reduce(size: int, ranks: int) -> Cost:
    """2 log2(p) α + 2 (p-1)/p n β: a reduce-scatter by halving and an all-gather by doubling; p a power of two.

    Raises:
        ValueError: ranks is no power of two.

    >>> rabenseifner_all_reduce(24, ranks=8)
    Cost(steps=6, bytes=42)
    """
    ranks = whole("ranks", ranks, least=1)
    if ranks & (ranks - 1):
        raise ValueError(f"ranks={ranks} is no power of two: halving and doubling need 1, 2, 4, 8, … ranks")
    return Cost(2 * (ranks.bit_length() - 1), traffic.all_reduce(whole("size", size), ranks))


def ring_reduce_scatter(size: int, ranks: int) -> Cost:
    """(p-1) α + (p-1)/p n β; n is the whole input of one rank.

    >>> ring_reduce_scatter(24, ranks=4)
    Cost(steps=3, bytes=18)
    """
    size, ranks = whole("size", size), whole("ranks", ranks, least=1)
    return Cost(ranks - 1, traffic.reduce_scatter(size, ranks))


def ring_all_gather(size: int, ranks: int) -> Cost:
    """(p-1) α + (p-1)/p n β; n is the whole output of one rank.

    >>> ring_all_gather(24, ranks=4)
    Cost(steps=3, bytes=18)
    """
    size, ranks = whole("size", size), whole("ranks", ranks, least=1)
    return Cost(ranks - 1, traffic.all_gather(size, ranks))


def pairwise_all_to_all(size: int, ranks: int) -> Cost:
    """(p-1) α + (p-1)/p n β; n is the whole input of one rank, 1/p of which it keeps.

    (The source writes n β, as if all of n were for others.)

    >>> pairwise_all_to_all(24, ranks=4)
    Cost(steps=3, bytes=18)
    """
    size, ranks = whole("size", size), whole("ranks", ranks, least=1)
    return Cost(ranks - 1, traffic.all_to_all(size, ranks))


def tree_broadcast(size: int, ranks: int) -> Cost:
    """ceil(log2 p) (α + n β): in each round, every rank that has the tensor sends it to one that has not.

    >>> tree_broadcast(24, ranks=5)
    Cost(steps=3, bytes=72)
    """
    return _rounds(size, _depth(ranks))


def tree_reduce(size: int, ranks: int) -> Cost:
    """ceil(log2 p) (α + n β): the broadcast's tree, upwards.

    >>> tree_reduce(24, ranks=5)
    Cost(steps=3, bytes=72)
    """
    return _rounds(size, _depth(ranks))


def tree_scatter(size: int, ranks: int) -> Cost:
    """ceil(log2 p) α + (p-1)/p n β: each round hands half of what is left down the tree; n is what the root holds.

    >>> tree_scatter(24, ranks=4)
    Cost(steps=2, bytes=18)
    """
    return Cost(_depth(ranks), traffic.scatter(whole("size", size), whole("ranks", ranks), position=0))


def tree_gather(size: int, ranks: int) -> Cost:
    """ceil(log2 p) α + (p-1)/p n β: the scatter's tree, upwards; n is what the root ends with.

    >>> tree_gather(24, ranks=4)
    Cost(steps=2, bytes=18)
    """
    return tree_scatter(size, ranks)


def send(size: int) -> Cost:
    """α + n β: one message.

    >>> send(24)
    Cost(steps=1, bytes=24)
    """
    return Cost(1, whole("size", size))


def barrier(ranks: int) -> Cost:
    """ceil(log2 p) α: in round k every rank tells the one 2^k further (dissemination; Hensgen, Finkel, Manber 1988).

    >>> barrier(ranks=5)
    Cost(steps=3, bytes=0)
    """
    return Cost(_depth(ranks), 0)


@dataclass(frozen=True)
class TwoLevels:
    """A cost over nodes: `inside` on the links within a node, then or before it `between` on those between nodes."""

    inside: Cost
    between: Cost

    def seconds(self, inside: tuple[float, float], between: tuple[float, float]) -> float:
        """The two together; each argument is the (alpha, beta) of that kind of link, in seconds and seconds per byte.

        >>> f"{hierarchical_all_reduce(8_000_000, 8, 2).seconds((1e-6, 1 / 450e9), (5e-6, 1 / 50e9)):.6f}"
        '0.000075'
        """
        return self.inside.seconds(*inside) + self.between.seconds(*between)


def hierarchical_all_reduce(size: int, ranks_per_node: int, nodes: int, links_per_node: int | None = None) -> TwoLevels:
    """A reduce-scatter within each node, an all-reduce of each slice between the nodes, an all-gather within.

    All rings, of g = ranks_per_node and m = nodes: inside 2 (g-1) α + 2 (g-1)/g n β, between
    2 (m-1) α + 2 (m-1)/m (n/g) β. Between nodes g rings run at once, one for each slice; `links_per_node` links carry
    them (one per rank where it is None), so on one shared link their bytes add up to g times as much.
    Over nodes a flat ring of all g·m ranks takes `ring_all_reduce(size, g * m).seconds(...)` at the α and β of the
    slowest link in it, because every rank waits for its neighbour in every step.

    Source: composed of the two halves of the ring (Patarasuk and Yuan 2009) on either level.

    Raises:
        TypeError, ValueError: a count is no whole number or below 1, or there are more links than ranks in a node.

    >>> hierarchical_all_reduce(32, ranks_per_node=4, nodes=2)
    TwoLevels(inside=Cost(steps=6, bytes=48), between=Cost(steps=2, bytes=8))
    """
    size, nodes = whole("size", size), whole("nodes", nodes, least=1)
    per_node = whole("ranks_per_node", ranks_per_node, least=1)
    links = per_node if links_per_node is None else whole("links_per_node", links_per_node, least=1)
    if links > per_node:
        raise ValueError(f"links_per_node={links} is more than ranks_per_node={per_node}: a ring uses one at most")
    ring = ring_all_reduce(size, nodes)
    rings_per_link = -(-per_node // links)
    return TwoLevels(
        inside=ring_all_reduce(size, per_node),
        between=Cost(ring.steps, tidy(Fraction(ring.bytes) * rings_per_link / per_node)),
    )


def crossover(first: Algorithm, second: Algorithm, ranks: int, alpha: float, beta: float) -> float | None:
    """The size in bytes at which two algorithms take equally long; None where one is at least as quick at every size.

    Both costs are a constant plus a multiple of the size: (s1 - s2) α = (b2 - b1) β · size, with b the bytes per byte.

    Args:
        first, second: cost functions of this module, such as `ring_all_reduce`.
        ranks: p. alpha: seconds per step. beta: seconds per byte, above 0.

    Raises:
        TypeError, ValueError: ranks, alpha or beta is no such number.

    >>> round(crossover(ring_all_reduce, tree_all_reduce, ranks=8, alpha=10e-6, beta=1 / 10e9))
    188235
    """
    alpha, beta = amount("alpha", alpha), amount("beta", beta)
    if beta == 0:
        raise ValueError("beta=0: without a cost per byte no size changes the order; beta above 0 was expected")
    one, two = first(1, ranks), second(1, ranks)
    latency, bandwidth = (two.steps - one.steps) * alpha, float(one.bytes - two.bytes) * beta
    return latency / bandwidth if latency * bandwidth > 0 else None


def whole(name: str, value: int, least: int = 0) -> int:
    """`value` as an int, for an argument called `name`; a float or a numpy integer may be given where it is whole.

    Raises:
        TypeError: it is no number. ValueError: it is no whole number (NaN, say), or below `least`.

    >>> whole("size", 1e6)
    1000000
    """
    number = _number(name, value)
    if not math.isfinite(number) or number != int(number):
        raise ValueError(f"{name}={value}: a whole number was expected")
    if number < least:
        raise ValueError(f"{name}={value}: at least {least} was expected")
    return int(value)


def amount(name: str, value: float) -> float:
    """`value` as a float, for an argument called `name`.

    Raises:
        TypeError: it is no number. ValueError: it is negative, infinite or NaN.

    >>> amount("alpha", 1e-6)
    1e-06
    """
    number = float(_number(name, value))
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={value}: a number that is neither negative nor infinite was expected")
    return number


def _number(name: str, value) -> int | float:
    try:
        number = value if isinstance(value, (int, Fraction)) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, (bool, str, bytes)):
        raise TypeError(f"{name}={value!r}: a number was expected, not a {type(value).__name__}")
    return number


def _depth(ranks: int) -> int:
    """ceil(log2 ranks): rounds until a tree has reached every rank."""
    return (whole("ranks", ranks, least=1) - 1).bit_length()


def _rounds(size: int, rounds: int) -> Cost:
    return Cost(rounds, rounds * whole("size", size))
