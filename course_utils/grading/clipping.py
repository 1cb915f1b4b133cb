"""The second exercise of notebook 04: gradients clipped by their global norm, where each rank has a shard of most.

The right answer is `torch.nn.utils.clip_grad_norm_` on a single process. Enough is one number from each rank: the
square of a norm is a sum, so it may be added up in parts.
"""

from __future__ import annotations

import math
import numbers
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.gradients import diagnose
from course_utils.grading.judged import Argument, Judged, drawn, each_world
from course_utils.grading.reports import Report, Row
from course_utils.grading.wording import failed
from course_utils.traffic import count
from course_utils.world import RankError, World

NUMBER = 8  # bytes of one number, at most: a float64
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """Gradients of a model: the sharded ones are cut along dim 0 as torch.chunk cuts, the others whole on every rank.

    Attributes:
        name: when the learner hears of it, after "where".
        sharded, replicated: shapes of the whole tensors.
        scale: of all values.
        limit: `max_norm`, in units of the global norm; of 1 where that is zero.
        odd: a value that stands in one shard of the last rank that has one.
    """

    name: str
    sharded: Shapes
    replicated: Shapes
    scale: float = 1.0
    limit: float = 0.4
    odd: float | None = None


def cases(world_size: int, seed: int) -> list[Case]:
    """What `clip` is called with, in this order.

    >>> [case.name for case in cases(4, 0)][:2]
    ['the norm is above max_norm', 'the norm is below max_norm']
    >>> cases(4, 0)[0].sharded
    {'embedding': (9, 5), 'weight': (6, 3), 'bias': (6,), 'gate': (3, 2)}
    """
    draw = random.Random(f"clip {world_size} {seed}")
    rows, width = 2 * world_size + draw.randint(1, 3), draw.randint(2, 4)
    sharded = {
        "embedding": (rows, draw.randint(3, 5)),
        "weight": (world_size + 2, width),
        "bias": (world_size + 2,),
        "gate": (world_size - 1, 2),  # the last rank has nothing of it
    }
    replicated = {"norm.weight": (draw.randint(5, 8),), "norm.bias": (draw.randint(2, 4),), "scale": ()}
    return [
        Case("the norm is above max_norm", sharded, replicated),
        Case("the norm is below max_norm", sharded, replicated, limit=3.0),
        Case("all gradients are zero", sharded, replicated, scale=0.0, limit=1.0),
        Case("nothing is replicated", sharded, {}, limit=0.7),
        Case("nothing is sharded", {}, replicated, limit=0.7),
        Case("one shard has an infinity in it", sharded, replicated, odd=math.inf),
        Case("one shard has a NaN in it", sharded, replicated, odd=math.nan),
    ]


def _shard(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """Rows of `torch.chunk`, and none for the ranks that it leaves out."""
    rows = math.ceil(len(whole) / world_size)
    return whole[rank * rows : (rank + 1) * rows].clone()


def _whole(case: Case, seed: int, world_size: int) -> dict[str, Tensor]:
    shapes = case.sharded | case.replicated
    found = {name: case.scale * drawn(f"clip {case.name} {seed} {name}", *shape) for name, shape in shapes.items()}
    if case.odd is not None:
        found["bias"][-1] = case.odd
    return found


def _pieces(case: Case, seed: int, rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    whole = _whole(case, seed, world_size)
    sharded = [_shard(whole[name], rank, world_size) for name in case.sharded]
    return sharded, [whole[name] for name in case.replicated]


def _max_norm(case: Case, whole: dict[str, Tensor]) -> float:
    finite = [one[one.isfinite()].flatten() for one in whole.values()]
    return case.limit * (float(torch.cat(finite).norm()) or 1.0)


def _clip(fn: Callable, case: Case, seed: int, max_norm: float) -> dict:
    """Runs on a rank: what `fn` returns, what it leaves in the tensors and in its lists, and what it communicated.

    Returns:
        "type" and "shape" of what it returned, and "norm": its value, None if it isn't one number; "left": by name what
        is in the tensors afterwards; "replaced": whether the lists have other tensors now; "traffic": a `Traffic`.
    """
    sharded, replicated = _pieces(case, seed, dist.get_rank(), dist.get_world_size())
    lists = list(sharded), list(replicated)
    with count() as traffic:
        returned = fn(*lists, max_norm)
    names = [*case.sharded, *case.replicated]
    same = [len(a) == len(b) and all(map(lambda x, y: x is y, a, b)) for a, b in zip(lists, (sharded, replicated))]
    return {
        "type": type(returned).__name__,
        "norm": _number(returned),
        "shape": list(returned.shape) if isinstance(returned, Tensor) else [],
        "left": {name: one.detach().clone() for name, one in zip(names, [*sharded, *replicated])},
        "replaced": not all(same),
        "traffic": traffic,
    }


def _number(returned) -> float | None:
    """The one real number that this is, in a tensor or not; None if it isn't one."""
    if isinstance(returned, Tensor):
        return float(returned.detach()) if returned.numel() == 1 and not returned.is_complex() else None
    return float(returned) if isinstance(returned, numbers.Real) else None


def _reference(whole: dict[str, Tensor], max_norm: float) -> tuple[float, dict[str, Tensor]]:
    """torch's own, on a single process."""
    parameters = [nn.Parameter(torch.zeros_like(one)) for one in whole.values()]
    for parameter, gradient in zip(parameters, whole.values()):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm), {name: parameter.grad for name, parameter in zip(whole, parameters)}


# ---------------------------------------------------------------- the judgement


def _on(fn: Callable, world: World, seed: int) -> Report | None:
    for case in cases(world.size, seed):
        whole = _whole(case, seed, world.size)
        max_norm = _max_norm(case, whole)
        try:
            found = world.run(_clip, fn, case, seed, max_norm)
        except RankError as error:
            empty = not (case.sharded and case.replicated)
            hint = "either list may be empty: then nothing is to be added" if empty else ""
            return failed(error, f"where {case.name}", hint)
        wrong = _no_norm(found) or _wrong_norm(case, whole, max_norm, found, seed)
        if not wrong and case.odd is None:
            wrong = _wrong_gradients(case, whole, max_norm, found, seed) or _wrong_lists(found)
            wrong = wrong or _unseen(case, found) or _too_dear(found)
        if wrong:
            headline = f"{wrong.headline} (where {case.name})"
            return Report(False, headline, wrong.columns, wrong.rows, wrong.detail, wrong.hint)
    return None


def _no_norm(found: list[dict]) -> Report | None:
    for rank, one in enumerate(found):
        if one["type"] == "NoneType":
            return Report(False, f"it returned None on rank {rank}: is there a return at its end?")
        if one["norm"] is None:
            what = f"a tensor of shape {one['shape']}" if one["type"] == "Tensor" else f"a {one['type']}"
            return Report(False, f"it returned {what} on rank {rank}: the global norm, one number, was expected")
    return None


def _squares(tensors: Sequence[Tensor]) -> float:
    return float(sum(one.double().square().sum() for one in tensors))


def _norms(tensors: Sequence[Tensor]) -> float:
    return float(sum(one.double().norm() for one in tensors))


# By what each rank has (its shards, and what is replicated) and max_norm: what one gets who takes it for the norm.
Pieces = list[tuple[list[Tensor], list[Tensor]]]
_SLIPS: tuple[tuple[str, Callable[[Pieces, int, float], float], str], ...] = (
    (
        "the norm of what this rank has",
        lambda p, r, m: (_squares(p[r][0]) + _squares(p[r][1])) ** 0.5,
        "the ranks have to add up something: norms don't add, and their squares do",
    ),
    (
        "the norm of this rank's shards",
        lambda p, r, m: _squares(p[r][0]) ** 0.5,
        "the ranks have to add up the squares of their shards, and what is replicated counts too",
    ),
    (
        "the norm of the shards alone",
        lambda p, r, m: sum(_squares(s) for s, _ in p) ** 0.5,
        "what is replicated is a part of the model too: its squares count, once",
    ),
    (
        "what is replicated counted N times",
        lambda p, r, m: sum(_squares(s) + _squares(w) for s, w in p) ** 0.5,
        "every rank has all of what is replicated: it counts once, so add it after the all-reduce, or 1/N of it before",
    ),
    (
        "sharded and replicated confused",
        lambda p, r, m: (_squares(p[r][0]) + sum(_squares(w) for _, w in p)) ** 0.5,
        "the shards' squares are to be added over the ranks, and those of the replicated are not",
    ),
    (
        "the sum of the ranks' norms",
        lambda p, r, m: sum((_squares(s) + _squares(w)) ** 0.5 for s, w in p),
        "norms don't add, their squares do: all-reduce the square, and take the root afterwards",
    ),
    (
        "the sum of the ranks' norms",
        lambda p, r, m: sum(_squares(s) ** 0.5 for s, _ in p) + _squares(p[r][1]) ** 0.5,
        "norms don't add, their squares do: all-reduce the square, and take the root afterwards",
    ),
    (
        "the norm, with the shards' norms added up",
        lambda p, r, m: (sum(_squares(s) ** 0.5 for s, _ in p) ** 2 + _squares(p[r][1])) ** 0.5,
        "norms don't add, their squares do: all-reduce the square, and take the root afterwards",
    ),
    (
        "the sum of all tensors' norms",
        lambda p, r, m: sum(_norms(s) for s, _ in p) + _norms(p[r][1]),
        "norms don't add, not those of tensors either: add up squares, and take the root at the end",
    ),
    (
        "the square of the norm",
        lambda p, r, m: sum(_squares(s) for s, _ in p) + _squares(p[r][1]),
        "the root is missing",
    ),
    (
        "the norm, with the mean of the shards' squares",
        lambda p, r, m: (sum(_squares(s) for s, _ in p) / len(p) + _squares(p[r][1])) ** 0.5,
        "the squares of the shards are to be added, not averaged",
    ),
    (
        "the largest norm of a rank",
        lambda p, r, m: max((_squares(s) + _squares(w)) ** 0.5 for s, w in p),
        "the square of the global norm is the sum of all squares, not the largest",
    ),
    (
        "the norm after clipping",
        lambda p, r, m: min(m, (sum(_squares(s) for s, _ in p) + _squares(p[r][1])) ** 0.5),
        "return the norm that there was before clipping: that is what one watches in training",
    ),
    (
        "the coefficient",
        lambda p, r, m: min(1.0, m / ((sum(_squares(s) for s, _ in p) + _squares(p[r][1])) ** 0.5 + 1e-6)),
        "return the norm, not what the gradients were multiplied by",
    ),
)


def _close(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=2e-5)


def _wrong_norm(case: Case, whole: dict[str, Tensor], max_norm: float, found: list[dict], seed: int) -> Report | None:
    right, _ = _reference(whole, max_norm)
    ranks, norms = len(found), [one["norm"] for one in found]
    if all(_close(norm, right) for norm in norms):
        if len(set(map(str, norms))) == 1:
            return None
        hint = "the ranks would drift apart: let all of them compute with the same all-reduced number"
        return Report(False, "the norms are right, but not the same on all ranks to the last bit", hint=hint)
    pieces = [_pieces(case, seed, rank, ranks) for rank in range(ranks)]
    off = [rank for rank, norm in enumerate(norms) if not _close(norm, right)]
    fitting = {slip: [r for r in off if _close(norms[r], slip[1](pieces, r, max_norm))] for slip in _SLIPS}
    best = sorted(_SLIPS, key=lambda slip: -len(fitting[slip]))  # what explains most ranks comes first
    hint = next((slip[2] for slip in best if fitting[slip]), "")
    rows = []
    for rank, norm in enumerate(norms):
        words = next((slip[0] for slip in best if rank in fitting[slip]), "something else") if rank in off else "right"
        rows.append(Row(rank not in off, (f"rank {rank}", f"{norm:.5g}", f"{right:.5g}", words)))
    if not math.isfinite(right):
        hint = f"torch returns {right:g} here, on every rank, so that all can leave out this step: let it pass through"
    elif not right:
        hint = "the norm of zeros is 0, and dividing by it gives NaN: torch adds 1e-6 to the norm that it divides by"
    elif any(map(math.isnan, norms)) and min(map(len, (case.sharded, case.replicated))) == 0:
        hint = "a list may be empty, and so may be a shard: the sum of no squares is 0"
    hint = hint or "which squares does a rank have that no other has? those are added up over the ranks, once"
    return Report(
        False, "the norm is not that of all gradients", ("", "yours", "right", "that is"), tuple(rows), hint=hint
    )


def _wrong_gradients(case: Case, whole: dict[str, Tensor], max_norm: float, found, seed: int) -> Report | None:
    _, right = _reference(whole, max_norm)
    given = [_named(case, _pieces(case, seed, rank, len(found))) for rank in range(len(found))]
    left = [one["left"] for one in found]
    for rank, (before, after) in enumerate(zip(given, left)):
        odd = next((name for name in before if before[name].shape != after[name].shape), "")
        if odd:
            text = f"the norm is right, but on rank {rank} the shape of {odd!r} has changed"
            return Report(False, text, hint="only the values are to change")
    diagnosis = diagnose(right, left)
    if diagnosis:
        return None
    rows = []
    for verdict in diagnosis:
        where = "all" if len(verdict.ranks) == len(found) else ", ".join(map(str, verdict.ranks))
        rows.append(Row(verdict.healthy, (verdict.name, verdict.words, where)))
    say, hint = "the gradients are not what clip_grad_norm_ leaves", "every tensor is multiplied by the same number"
    sick = {verdict.name for verdict in diagnosis.sick}
    nan = any(one.isnan().any() for after in left for one in after.values())
    unchanged = all(torch.equal(a[name], b[name]) for a, b in zip(given, left) for name in a)
    if nan:
        say = "the gradients are NaN now"
        hint = "torch divides by norm + 1e-6, so that nothing is divided by zero"
    elif unchanged:
        say = "the gradients are as they were"
        hint = "they are to be multiplied in place: g.mul_(coefficient), not g = g * coefficient"
        if any(one["replaced"] for one in found):
            hint = (
                "your lists have other tensors now, and the optimizer has the old ones: write with g.mul_(coefficient)"
            )
    elif case.limit > 1:
        say = "gradients have changed although their norm is below max_norm"
        hint = "clipping only makes smaller: the coefficient is max_norm / norm, and 1 at most"
    elif sick <= set(case.replicated) or sick <= set(case.sharded):
        kind = "replicated" if sick <= set(case.replicated) else "sharded"
        hint = f"only {kind} ones are wrong: both lists are multiplied by the same coefficient"
    elif any(verdict.k_name for verdict in diagnosis.sick):
        hint = "the coefficient is max_norm / norm, with the norm of all gradients, on every rank"
    return Report(False, f"the norm is right, but {say}", ("", "afterwards", "wrong on ranks"), tuple(rows), hint=hint)


def _named(case: Case, pieces: tuple[list[Tensor], list[Tensor]]) -> dict[str, Tensor]:
    return dict(zip([*case.sharded, *case.replicated], [*pieces[0], *pieces[1]]))


def _wrong_lists(found: list[dict]) -> Report | None:
    if not any(one["replaced"] for one in found):
        return None
    return Report(
        False,
        "the norm and the gradients are right, but your function has changed the lists that it was given: the caller "
        "still needs them",
        hint="sharded += replicated and sharded.clear() work on the caller's own list: [*sharded, *replicated] is a "
        "new one",
    )


def _unseen(case: Case, found: list[dict]) -> Report | None:
    """Right on several ranks, and yet some rank seems to have sent nothing."""
    seen = min(sum(row.size for row in one["traffic"]) for one in found)
    if seen or not case.sharded or len(found) == 1:
        return None
    return Report(
        False,
        "the norm and the gradients are right, but only 0 bytes could be seen, where one number has to travel",
        hint="call collectives from the thread that calls you, by the functions of torch.distributed: what goes "
        "another way is not counted",
    )


def _too_dear(found: list[dict]) -> Report | None:
    """More than one number from each rank."""
    ranks = len(found)

    def fits(row) -> bool:
        return row.size <= (ranks * NUMBER if row.operation == "all_gather" else NUMBER)

    traffic = max((one["traffic"] for one in found), key=lambda rows: (len(rows), sum(row.size for row in rows)))
    sent = [row for row in traffic if row.size]
    if len(sent) <= 1 and all(map(fits, sent)):
        return None
    rows = tuple(Row(fits(row), (row.operation, str(row.size), str(row.line or ""))) for row in sent)
    bytes_sent = sum(row.size for row in sent)
    say = f"a rank takes part in {len(sent)} collective{'s' if len(sent) > 1 else ''} of {bytes_sent} bytes"
    hint = "add up on each rank first, and let one number travel for all tensors together"
    if not all(map(fits, sent)):
        hint = "tensors travel, or a number for each of them: the square of a shard's norm is all that the others need"
    if len(sent) == 2 and all(row.operation == "all_gather" and row.line == sent[0].line for row in sent):
        hint = "objects are pickled, and their lengths travel first: put the number into a tensor"
    headline = f"norm and gradients are right, but {say}, where one all-reduce of one number is enough"
    return Report(False, headline, ("", "bytes", "called from"), rows, hint=hint)


def _examine(fn: Callable, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    praise = "torch's norm and torch's gradients, with one number from each rank"
    return each_world("clip", world_sizes, seed, timeout, lambda world, s: _on(fn, world, s), praise)


CLIP = Judged(
    name="clip",
    inputs=tuple(map(Argument, ("sharded", "replicated", "max_norm"))),
    start="what can be added up over the ranks so that the norm of all gradients follows from it?",
    examine=_examine,
)
