"""The value `Diagnosis`: one `Verdict` per gradient. `doctor` produces it, `views` draw it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from course_utils.gradients import views

if TYPE_CHECKING:
    import pandas


class Disease(StrEnum):
    """How the ranks' gradients relate to the reference; the first two are healthy. Each compares equal to its words.

    >>> Disease.OWN_SLICE == "own slice only"
    True
    """

    MATCHES = "matches"  # every rank holds the reference (or, like the reference, no gradient)
    RIGHT_SHARD = "right shard"  # rank r holds the r-th piece of the reference
    SCALED = "scaled"  # k times what it should be, with the same k on every affected rank
    PARTIAL = "partial"  # the ranks differ, and their sum is the reference
    OWN_SLICE = "own slice only"  # full shape, right in the rank's own slice, zero everywhere else
    WRONG_SHARD = "wrong shard"  # a right piece of the reference, on the wrong rank
    MISSING = "missing"  # no gradient, or one that is all zero, where the reference has one
    STALE = "stale"  # the gradient of the step before
    ACCUMULATED = "accumulated"  # the right gradient plus that of the step before
    UNEXPECTED = "unexpected"  # a gradient where the reference has none
    NOT_FINITE = "not finite"  # NaN or infinity
    WRONG_SHAPE = "wrong shape"  # neither the reference's shape nor a shard of it
    RANKS_DISAGREE = "ranks disagree"  # some ranks are right and others not, or no two tell the same story
    WRONG = "wrong"  # the ranks agree with each other, and no known relation leads to the reference
    TOO_SMALL = "too small to tell"  # smaller than the rounding error of the model's other gradients


HEALTHY = frozenset({Disease.MATCHES, Disease.RIGHT_SHARD})


@dataclass(frozen=True)
class Verdict:
    """What is known about one tensor's gradient on all ranks.

    Attributes:
        name: the tensor's name.
        diseases: one `Disease`, or several at once, e.g. `(PARTIAL, SCALED)`.
        errors: per rank the largest absolute difference from what this rank should hold; None if incomparable.
        ranks: the affected ranks; empty when healthy.
        k: the factor of `SCALED`, else None. A partial gradient is scaled by k if the *sum* of the ranks is k times
            the reference.
        k_name: "world_size" or "1/world_size" when k is that, else "".
        dim: the dimension along which the gradient is sliced or sharded, else None; `(SCALED,)` with a dim
            means k times the right shard.
        cure: the collective, or the change, that would cure it; "" when healthy.
        note: a detail worth saying, or "".

    >>> Verdict("bias", (Disease.PARTIAL,), errors=(0.5, 0.5), ranks=(0, 1)).words
    'partial'
    """

    name: str
    diseases: tuple[Disease, ...]
    errors: tuple[float | None, ...]
    ranks: tuple[int, ...] = ()
    k: float | None = None
    k_name: str = ""
    dim: int | None = None
    cure: str = ""
    note: str = ""

    @property
    def disease(self) -> Disease:
        """The first of `diseases`."""
        return self.diseases[0]

    @property
    def healthy(self) -> bool:
        """Whether every rank holds what it should."""
        return all(disease in HEALTHY for disease in self.diseases)

    @property
    def error(self) -> float | None:
        """The largest absolute error on any rank; None if no rank could be compared."""
        return max((error for error in self.errors if error is not None), default=None)

    @property
    def words(self) -> str:
        """The diseases in words, with factor and dimension: `'own slice only, dim 0 + scaled by world_size (4)'`."""
        return views.words(self)

    def __str__(self) -> str:
        return views.sentence(self)


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """One `Verdict` per tensor, in the reference's order, and one for the forward output if that was compared too.

    It is true exactly when it is healthy, so that `assert diagnose(…)` means what it says.

    >>> Diagnosis((Verdict("bias", (Disease.MATCHES,), errors=(0.0, 0.0)),), world_size=2).healthy
    True
    """

    verdicts: tuple[Verdict, ...]
    world_size: int
    forward: Verdict | None = None

    @property
    def healthy(self) -> bool:
        """Whether every gradient is right on every rank, and the forward output too, if it was compared."""
        return all(verdict.healthy for verdict in self) and (self.forward is None or self.forward.healthy)

    @property
    def sick(self) -> tuple[Verdict, ...]:
        """The verdicts on gradients that are not healthy."""
        return tuple(verdict for verdict in self if not verdict.healthy)

    def __bool__(self) -> bool:
        return self.healthy

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)

    def __getitem__(self, name: str) -> Verdict:
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise KeyError(f"no gradient named {name!r} was diagnosed: the names are {', '.join(v.name for v in self)}")

    def __str__(self) -> str:
        return views.text(self)

    __repr__ = __str__  # what a notebook keeps as plain text: rounded, so that it reads the same on every machine

    def _repr_html_(self) -> str:
        return views.html(self)

    def to_frame(self) -> pandas.DataFrame:
        """The verdicts as a table with one row per tensor (needs pandas).

        >>> diagnosis = Diagnosis((Verdict("bias", (Disease.MATCHES,), errors=(0.0, 0.0)),), world_size=2)
        >>> diagnosis.to_frame()["verdict"].tolist()
        ['matches']
        """
        return views.frame(self)
