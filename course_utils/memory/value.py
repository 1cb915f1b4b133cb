"""The value `Memory`: bytes of one rank by purpose. The arithmetic and the live half produce it, `views` show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from course_utils.memory import views
from course_utils.memory.checks import size

if TYPE_CHECKING:
    import pandas

Bytes = int | Fraction  # shares that aren't whole stay exact
PURPOSES = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True, repr=False)
class Memory:
    """Bytes that one rank holds, by purpose.

    Attributes:
        parameters: the weights that the forward pass uses.
        gradients: as long as the parameters.
        optimizer: moments, and the FP32 copy of the weights where there is one.
        activations: what the forward pass keeps for the backward pass.
        extra: more, by name ("optimizer's step counters", "DDP's bucket copies"); a term of 0 bytes is left out.

    A share that is no whole number of bytes is an exact `Fraction`. Two are equal if all their terms are. They add
    up, with `+` and `sum`.

    Raises:
        TypeError, ValueError: bytes that are negative, not finite, or no number; an extra term without a name, or
            with the name of a purpose.

    >>> mixed = Memory(parameters=2 * 70e9, gradients=2 * 70e9, optimizer=12 * 70e9)
    >>> print(mixed)
    purpose          bytes
    parameters    140.0 GB
    gradients     140.0 GB
    optimizer     840.0 GB
    total       1,120.0 GB
    1 GB = 10^9 B
    """

    parameters: Bytes = 0
    gradients: Bytes = 0
    optimizer: Bytes = 0
    activations: Bytes = 0
    extra: Mapping[str, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for purpose in PURPOSES:
            object.__setattr__(self, purpose, size(purpose, getattr(self, purpose)))
        if not isinstance(self.extra, Mapping):
            raise TypeError(f"extra={self.extra!r}: a mapping from the name of a term to its bytes was expected")
        for name in self.extra:
            if not isinstance(name, str) or not name or name in (*PURPOSES, "total"):
                raise ValueError(f"extra has a term named {name!r}: a name of its own was expected")
        terms = {name: size(name, value) for name, value in self.extra.items()}
        object.__setattr__(self, "extra", {name: value for name, value in terms.items() if value})

    @property
    def total(self) -> Bytes:
        """All bytes.

        >>> Memory(parameters=2, extra={"buffers": 3}).total
        5
        """
        return size("total", sum(self.terms().values()))

    def terms(self) -> dict[str, Bytes]:
        """Bytes by purpose, then the extra terms by name.

        >>> Memory(parameters=8, extra={"buffers": 1}).terms()
        {'parameters': 8, 'gradients': 0, 'optimizer': 0, 'activations': 0, 'buffers': 1}
        """
        return {purpose: getattr(self, purpose) for purpose in PURPOSES} | dict(self.extra)

    def minus(self, other: Memory) -> dict[str, Bytes]:
        """By how much this exceeds the other, term by term, without the terms in which they agree; may be negative.

        Raises:
            TypeError: the other is no `Memory`.

        >>> Memory(parameters=8, extra={"padding": 4}).minus(Memory(parameters=9))
        {'parameters': -1, 'padding': 4}
        """
        if not isinstance(other, Memory):
            raise TypeError(f"minus({other!r}): a Memory was expected, not a {type(other).__name__}")
        mine, its = self.terms(), other.terms()
        differences = {name: mine.get(name, 0) - its.get(name, 0) for name in mine | its}
        return {name: int(d) if d == int(d) else d for name, d in differences.items() if d}

    def __add__(self, other: Memory) -> Memory:
        if not isinstance(other, Memory):
            return NotImplemented
        extra = {name: self.extra.get(name, 0) + other.extra.get(name, 0) for name in {**self.extra, **other.extra}}
        return Memory(**{one: getattr(self, one) + getattr(other, one) for one in PURPOSES}, extra=extra)

    def __radd__(self, other: int) -> Memory:
        return self if other == 0 else NotImplemented  # sum() starts with 0

    def __str__(self) -> str:
        return views.text(self)

    __repr__ = __str__  # a notebook keeps it as plain text

    def _repr_html_(self) -> str:
        return views.html(self)

    def to_frame(self) -> pandas.DataFrame:
        """A table with one row per purpose and extra term, in bytes (needs pandas).

        >>> Memory(parameters=8, optimizer=16).to_frame()["bytes"].to_dict()
        {'parameters': 8, 'optimizer': 16, 'total': 24}
        """
        return views.frame({"bytes": self})


def side_by_side(memories: Mapping[str, Memory]) -> pandas.DataFrame:
    """A table with one column for each name, in bytes: a formula beside its measurement (needs pandas).

    Raises:
        TypeError: this is no mapping from names to `Memory`.

    >>> side_by_side({"formula": Memory(parameters=8), "measured": Memory(parameters=8, gradients=8)})
                formula  measured
    parameters        8         8
    gradients         0         8
    total             8        16
    """
    if not isinstance(memories, Mapping):
        raise TypeError(f"side_by_side({memories!r}): a mapping from names to Memory was expected")
    for name, memory in memories.items():
        if not isinstance(memory, Memory):
            raise TypeError(f"side_by_side: {name!r} is a {type(memory).__name__}, and a Memory was expected")
    return views.frame(memories)
