"""Refusals in a sentence: what was given, what was expected."""

from __future__ import annotations

import math
from fractions import Fraction


def whole(name: str, value: int, least: int = 1) -> int:
    """The value, if it is a whole number of at least `least`.

    >>> whole("heads", 0)
    Traceback (most recent call last):
    ValueError: heads=0: at least 1 was expected
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: a whole number was expected, not a {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value}: at least {least} was expected")
    return value


def count(name: str, value: int | float, least: int = 1) -> int:
    """The same for large counts, which one likes to write as 7.5e9.

    >>> count("parameters", 7.5e9)
    7500000000
    """
    if isinstance(value, float):
        if not math.isfinite(value) or value != int(value):
            raise ValueError(f"{name}={value!r}: a whole number was expected")
        value = int(value)
    return whole(name, value, least)


def size(name: str, value: int | float | Fraction) -> int | Fraction:
    """Bytes: a finite number of at least 0, exact: an `int` where it is whole, otherwise a `Fraction`.

    >>> size("parameters", 1.5e9), size("optimizer", Fraction(4, 3))
    (1500000000, Fraction(4, 3))
    """
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        raise TypeError(f"{name}={value!r}: a number of bytes was expected, not a {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: a finite number of bytes was expected")
    if value < 0:
        raise ValueError(f"{name}={value!r}: bytes can't be negative")
    exact = Fraction(value)
    return int(exact) if exact == int(exact) else exact


def flag(name: str, value: bool) -> bool:
    """The value, if it is True or False.

    >>> flag("sequence_parallel", True)
    True
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: True or False was expected")
    return value


def divides(name: str, value: int, of_name: str, of: int, why: str) -> None:
    """Refuses a value that does not divide another, in the words of the house.

    >>> divides("tensor_parallel", 3, "heads", 16, "every rank holds whole heads")
    Traceback (most recent call last):
    ValueError: tensor_parallel=3 does not divide heads=16: every rank holds whole heads
    """
    if of % value:
        raise ValueError(f"{name}={value} does not divide {of_name}={of}: {why}")
