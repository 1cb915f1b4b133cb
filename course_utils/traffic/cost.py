"""The bytes that one rank sends in each operation, by the definition of its standard algorithm.

`size` is S, in bytes, `ranks` is n; each function says of which array S is the size. For all-reduce, reduce-scatter,
all-gather and all-to-all these are the factors of nccl-tests' bus bandwidth (`doc/PERFORMANCE.md`) and the bandwidth
terms of Thakur, Rabenseifner and Gropp 2005. The rooted operations follow a chain, the pipelined ring for which
nccl-tests gives the factor 1: S passes over each of the n-1 links once. So the sum over the ranks is the data that has
to travel in any case, and one rank alone sends nothing.

A share that isn't a whole number of bytes (of 16 bytes over 3 ranks, say) is an exact `Fraction`, so that sums stay
exact; a whole number is an `int`. A real ring rounds its slices to elements, some up and some down.
"""

from __future__ import annotations

from fractions import Fraction

Bytes = int | Fraction


def tidy(value: Bytes) -> Bytes:
    """The same number, as an `int` where it is whole."""
    return int(value) if value == int(value) else Fraction(value)


def all_reduce(size: int, ranks: int) -> Bytes:
    """2 (n-1)/n S; S is the tensor. A reduce-scatter and an all-gather, each n-1 steps of S/n.

    >>> all_reduce(24, ranks=4)
    36
    """
    _check(size, ranks)
    return tidy(Fraction(2 * (ranks - 1) * size, ranks))


def reduce_scatter(size: int, ranks: int) -> Bytes:
    """(n-1)/n S; S is the whole input of one rank."""
    return _all_but_one_share(size, ranks)


def all_gather(size: int, ranks: int) -> Bytes:
    """(n-1)/n S; S is the whole output of one rank."""
    return _all_but_one_share(size, ranks)


def all_to_all(size: int, ranks: int) -> Bytes:
    """(n-1)/n S; S is the whole input of one rank, split evenly (uneven splits: all but the part it keeps)."""
    return _all_but_one_share(size, ranks)


def broadcast(size: int, ranks: int, position: int) -> Bytes:
    """S, and 0 on the last rank of the chain; S is the tensor, `position` counts from the root (0) along the ring."""
    _check(size, ranks, position)
    return 0 if position == ranks - 1 else size


def reduce(size: int, ranks: int, position: int) -> Bytes:
    """S, and 0 on the root (position 0); S is the tensor. The chain of a broadcast, run backwards."""
    _check(size, ranks, position)
    return 0 if position == 0 else size


def gather(size: int, ranks: int, position: int) -> Bytes:
    """S/n, and 0 on the root (position 0); S is the whole that the root receives."""
    _check(size, ranks, position)
    return 0 if position == 0 else tidy(Fraction(size, ranks))


def scatter(size: int, ranks: int, position: int) -> Bytes:
    """(n-1)/n S on the root (position 0), 0 elsewhere; S is the whole that the root hands out."""
    _check(size, ranks, position)
    return _all_but_one_share(size, ranks) if position == 0 else 0


def _all_but_one_share(size: int, ranks: int) -> Bytes:
    _check(size, ranks)
    return tidy(Fraction((ranks - 1) * size, ranks))


def _check(size: int, ranks: int, position: int = 0) -> None:
    for name, value, least in (("size", size, 0), ("ranks", ranks, 1), ("position", position, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: a whole number was expected, not a {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}={value}: at least {least} was expected")
    if position >= ranks:
        raise ValueError(f"position={position} is not in a group of ranks={ranks}: 0 to {ranks - 1} was expected")
