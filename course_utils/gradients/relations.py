"""How do the ranks' values relate to the reference? Produces a `Finding` for one tensor.

Everything here works on finite float64 tensors that were divided by the reference's largest magnitude, with one entry
per rank that holds something. The relations are tried from the one that claims most to the one that claims least:
right; the same simple fault on some ranks; times k; own slice; sum; another rank's shard; and, if none holds, whether
the ranks at least agree with each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from course_utils.gradients.tolerance import Target, fits, piece, root_mean_square, scaled, target
from course_utils.gradients.values import Disease


@dataclass(frozen=True)
class Finding:
    """The diseases of one tensor, with the ranks, factor and dimension they concern (see `Verdict`)."""

    diseases: tuple[Disease, ...]
    ranks: tuple[int, ...] = ()
    k: float | None = None
    k_name: str = ""
    dim: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Layout:
    """Which piece of the reference each rank should hold: the whole (`dim` None) or `sizes[r]` from `starts[r]`."""

    dim: int | None
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """This rank's piece of a tensor of the reference's shape."""
        return whole if self.dim is None else whole.narrow(self.dim, self.starts[rank], self.sizes[rank])

    def target(self, whole: Target, rank: int) -> Target:
        """This rank's piece of a target."""
        return whole if self.dim is None else piece(whole, self.dim, self.starts[rank], self.sizes[rank])


def chunk_sizes(size: int, world_size: int) -> list[int]:
    """Rows per rank of `torch.chunk` (and of FSDP and DTensor): full chunks first, then the rest, then none.

    >>> chunk_sizes(5, 4)
    [2, 2, 1, 0]
    """
    full = math.ceil(size / world_size)
    return [max(0, min(full, size - rank * full)) for rank in range(world_size)]


def split_sizes(size: int, world_size: int) -> list[int]:
    """Rows per rank of `torch.tensor_split` (and of numpy's `array_split`): they differ by one at most.

    >>> split_sizes(5, 4)
    [2, 1, 1, 1]
    """
    return [size // world_size + (rank < size % world_size) for rank in range(world_size)]


def layout(shape: torch.Size, shapes: list[torch.Size | None]) -> Layout | None:
    """The layout that explains the ranks' shapes (None: the rank holds nothing), or None if no layout does."""
    world_size = len(shapes)
    present = [one for one in shapes if one is not None]
    if all(one == shape for one in present):
        return Layout(None, (0,) * world_size, (0,) * world_size)
    for dim in range(len(shape)):
        others = [one[:dim] + one[dim + 1 :] if len(one) == len(shape) else None for one in present]
        if any(one != shape[:dim] + shape[dim + 1 :] for one in others):
            continue
        given = [None if one is None else one[dim] for one in shapes]
        # The pieces that are there may be all of it; if not, the absent ranks' pieces follow from a known rule.
        rules = [
            [size or 0 for size in given],
            chunk_sizes(shape[dim], world_size),
            split_sizes(shape[dim], world_size),
        ]
        for sizes in rules:
            if sum(sizes) == shape[dim] and all(
                one is None or one == size for one, size in zip(given, sizes, strict=True)
            ):
                starts = [sum(sizes[:rank]) for rank in range(world_size)]
                return Layout(dim, tuple(starts), tuple(sizes))
    return None


@dataclass(frozen=True, eq=False)
class Case:
    """One tensor: what was expected of the whole, what each judged rank holds, and who should hold which piece."""

    whole: Target
    held: dict[int, Tensor]  # rank -> values
    layout: Layout
    world_size: int
    previous: Tensor | None = None

    def target(self, rank: int) -> Target:
        return self.layout.target(self.whole, rank)


def relate(case: Case) -> Finding:
    """The finding for ranks that each hold a tensor of the right shape."""
    kinds = {rank: _kind(case, rank) for rank in case.held}
    right = [rank for rank, kind in kinds.items() if kind is Disease.MATCHES]
    off = tuple(rank for rank in case.held if rank not in right)
    dim = case.layout.dim
    if not off:
        return Finding((Disease.MATCHES if dim is None else Disease.RIGHT_SHARD,), dim=dim)
    faults = {kinds[rank] for rank in off}
    if len(faults) == 1 and None not in faults:
        fault = faults.pop()
        return Finding((fault,), off, dim=dim, note="it is all zero" if fault is Disease.MISSING else "")
    if not case.whole.value.any():
        note = "the reference is zero, so that nothing can be said about a factor, a sum or a slice"
        disease = Disease.RANKS_DISAGREE if right or not _agree(case) else Disease.WRONG
        return Finding((disease,), off, dim=dim, note=note)

    k = _common_factor(case, off)
    if k is not None and _telling(case, off, k):
        first = (Disease.RANKS_DISAGREE,) if right else ()
        return Finding((*first, Disease.SCALED), off, *_named(k, case), dim=dim)
    if dim is None and not right and _agree(case):
        return Finding((Disease.WRONG,), off)
    mostly_right = len(right) > len(off)
    if dim is None:
        found = _own_slice(case) or (None if mostly_right else _partial(case))
    else:
        found = _wrong_shard(case, right)
    if found is not None:
        return found
    if right:
        return Finding((Disease.RANKS_DISAGREE,), off, dim=dim)
    factors = [_common_factor(case, [rank]) for rank in off]
    if None not in factors and case.whole.value.count_nonzero() > 1:
        listed = ", ".join(f"rank {rank}: {k:.3g}" for rank, k in zip(off, factors, strict=True))
        return Finding((Disease.RANKS_DISAGREE,), off, dim=dim, note=f"every rank has a factor of its own ({listed})")
    return Finding((Disease.RANKS_DISAGREE if dim is None else Disease.WRONG,), off, dim=dim)


def _kind(case: Case, rank: int) -> Disease | None:
    """What can be said of this rank alone: right, zero, stale, accumulated, or none of them."""
    held, expected = case.held[rank], case.target(rank)
    if fits(held, expected):
        return Disease.MATCHES
    if not held.any():
        return Disease.MISSING
    if case.previous is not None:
        before, tolerance = case.layout.of(case.previous, rank), expected.tolerance
        stale = target(before, tolerance)
        accumulated = target(expected.value + before, tolerance, expected.value.abs() + before.abs())
        nearer = float((held - stale.value).norm()) <= float((held - accumulated.value).norm())  # both may fit
        if fits(held, stale if nearer else accumulated):
            return Disease.STALE if nearer else Disease.ACCUMULATED
    return None


def _factor(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The k that brings k · expected nearest to held, by least squares over all pairs (held, expected)."""
    product = square = 0.0
    for held, expected in pairs:
        product += float((held * expected).sum())
        square += float((expected * expected).sum())
    return product / square if square else 0.0


def _common_factor(case: Case, ranks: Iterable[int]) -> float | None:
    """The k such that each of these ranks holds k times what it should, or None."""
    ranks = list(ranks)
    k = _factor((case.held[rank], case.target(rank).value) for rank in ranks)
    if not k or not all(fits(case.held[rank], scaled(case.target(rank), k)) for rank in ranks):
        return None
    return k


def _named(k: float, case: Case, cancellation: float = 1.0) -> tuple[float, str]:
    """k, made exact if it is world_size, 1/world_size, an integer or 1/integer up to rounding; and its name.

    The rounding errors of many elements average out, so that k is known better than any one of them.
    """
    elements = max(1, int(case.whole.value.count_nonzero()))
    tolerance = case.whole.tolerance
    near = min(0.05, max(tolerance.eps, tolerance.rtol / math.sqrt(elements)) * max(1.0, cancellation))
    size = case.world_size
    names = {float(size): "world_size", 1 / size: "1/world_size"} if size > 1 else {}
    integer, part = float(round(k)), 1 / round(1 / k) if abs(k) < 1 else 0.0
    for exact in (*names, integer, part):
        if exact and abs(k - exact) <= near * abs(exact):
            return exact, names.get(exact, "")
    return k, ""


def _own_slice(case: Case) -> Finding | None:
    """Full shape, but only the rank's own slice is filled: the backward of a gather that forgot the other ranks."""
    reference, ranks = case.whole.value, list(case.held)
    total = sum(case.held.values())
    for dim, size in enumerate(reference.shape):
        if size == 1 or len(ranks) == 1:
            continue
        strength = torch.stack([case.held[rank].abs().movedim(dim, 0).reshape(size, -1).amax(1) for rank in ranks])
        filled = strength.amax(0) > 0
        owner = torch.tensor(ranks)[strength.argmax(0)]
        owners = owner[filled].tolist()
        if len(set(owners)) < 2 or owners != sorted(owners):
            continue
        if not filled.all() and not _follows_a_rule(owner, filled, len(case.layout.starts)):
            continue  # rows that nobody fills leave the borders open: then only a usual split is believed
        k = _factor([(total, reference)])
        expected = scaled(case.whole, k)
        shape = [-1 if d == dim else 1 for d in range(reference.ndim)]
        own = {rank: ((owner == rank) & filled).reshape(shape) for rank in ranks}
        masked = [replace(expected, value=expected.value * own[rank]) for rank in ranks]
        if not k or not fits(total, expected) or not all(map(fits, case.held.values(), masked)):
            continue
        if fits(total, case.whole):
            return Finding((Disease.OWN_SLICE,), tuple(ranks), dim=dim)
        return Finding((Disease.OWN_SLICE, Disease.SCALED), tuple(ranks), *_named(k, case), dim=dim)
    return None


def _follows_a_rule(owner: Tensor, filled: Tensor, world_size: int) -> bool:
    for sizes in (chunk_sizes(len(owner), world_size), split_sizes(len(owner), world_size)):
        usual = torch.repeat_interleave(torch.arange(world_size), torch.tensor(sizes))
        if torch.equal(owner[filled], usual[filled]):
            return True
    return False


def _partial(case: Case) -> Finding | None:
    """The ranks differ and their sum is the reference, or k times it."""
    ranks = tuple(case.held)
    if len(ranks) == 1:
        return None
    total = sum(case.held.values())
    terms = sum(held.abs() for held in case.held.values())
    size, reference = case.world_size, case.whole.value
    best = _factor([(total, reference)])
    for k in (1.0, float(size), 1 / size, best):
        named = k in (1.0, float(size), 1 / size)
        if abs(k - best) > abs(k) / 4:
            continue  # in a coarse dtype the tolerance alone does not tell 1 from 1.5
        if not k or (not named and not _free(case)):
            continue
        # Large terms that cancel leave their rounding error in the sum, so the tolerance is measured by the terms.
        expected = target(k * reference, case.whole.tolerance, torch.maximum(terms, abs(k) * reference.abs()))
        if fits(total, expected) and 2 * expected.rms < root_mean_square(expected.value):  # else anything would fit
            if k == 1.0:
                return Finding((Disease.PARTIAL,), ranks)
            exact, name = _named(k, case, root_mean_square(terms) / root_mean_square(k * reference))
            note = "the mean of the ranks is the reference" if name == "world_size" else ""
            return Finding((Disease.PARTIAL, Disease.SCALED), ranks, exact, name, note=note)
    return None


def _telling(case: Case, ranks: tuple[int, ...], k: float) -> bool:
    """Whether "scaled by k" says something: several numbers share k, or a single one has a k that is no accident."""
    numbers = sum(int(case.target(rank).value.count_nonzero()) for rank in ranks)
    if abs(k - 1) <= case.whole.tolerance.rtol:
        return False
    return numbers > 1 or (len(ranks) == len(case.held) and (_named(k, case)[0] != k or k == round(k)))


def _free(case: Case) -> bool:
    """Whether a sum that is k times the reference, for any k at all, says something: it could have been otherwise."""
    one_number = int(case.whole.value.count_nonzero()) < 2
    return not one_number and any(_common_factor(case, [rank]) is None for rank in case.held)


def _wrong_shard(case: Case, right: list[int]) -> Finding | None:
    """Every rank holds some right piece of the reference, but not its own."""
    held, dim = case.held, case.layout.dim
    norm = math.sqrt(sum(float((one * one).sum()) for one in held.values()))
    whole = float(case.whole.value.norm())
    for k in (1.0, norm / whole, -norm / whole):
        found = {rank: _where(case, rank, k) for rank in held if not (k == 1.0 and rank in right)}
        if None in found.values():
            continue
        off = tuple(rank for rank, start in found.items() if start != case.layout.starts[rank])
        if not off:
            continue
        held_by = [f"rank {rank} holds {_origin(case, found[rank], held[rank].shape[dim])}" for rank in off]
        note = "; ".join(held_by[:3] + ["…"] * (len(off) > 3))
        if k == 1.0:
            return Finding((Disease.WRONG_SHARD,), off, dim=dim, note=note)
        return Finding((Disease.WRONG_SHARD, Disease.SCALED), tuple(held), *_named(k, case), dim=dim, note=note)
    return None


def _where(case: Case, rank: int, k: float) -> int | None:
    """Where along the shard's dimension the rank's tensor fits k times the reference; its own place, if it does."""
    dim, held, own = case.layout.dim, case.held[rank], case.layout.starts[rank]
    size, length = held.shape[dim], case.whole.value.shape[dim]
    if not held.any():
        return None
    rows = case.whole.value.movedim(dim, 0).reshape(length, -1)
    mine = held.movedim(dim, 0).reshape(size, -1) / k
    loudest = int(mine.norm(dim=1).argmax())  # find its most telling row in the reference, then compare all rows there
    distance = (rows - mine[loudest]).norm(dim=1)
    places = (distance.argsort(stable=True)[:16] - loudest).tolist()
    for start in [own, *places]:
        if 0 <= start <= length - size and fits(held, scaled(piece(case.whole, dim, start, size), k)):
            return start
    return None


def _origin(case: Case, start: int, size: int) -> str:
    for rank, place in enumerate(zip(case.layout.starts, case.layout.sizes, strict=True)):
        if place == (start, size):
            return f"the shard of rank {rank}"
    return f"indices {start} to {start + size - 1}"


def _agree(case: Case) -> bool:
    """Whether all ranks hold the same."""
    first, *others = case.held.values()
    same = target(first, case.whole.tolerance)
    return all(other.shape == first.shape and fits(other, same) for other in others)
