"""The second exercise of notebook 03: gradient accumulation under DDP, when micro-batches have unequal token counts.

Right is the gradient of one mean over all tokens of all ranks and micro-batches that are not ignored. Every plausible
wrong answer weighs the micro-batches in another way (`token_weights`): the one whose gradients it equals is what its
hint is about. What is communicated is counted: each gradient once, and one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_utils.gradients import Diagnosis, Disease, diagnose
from course_utils.grading.data_parallel import failed, gradient_table, operations, traffic_table, within
from course_utils.grading.judged import FLOAT, Argument, Judged, enumerated, times
from course_utils.grading.reports import Report
from course_utils.grading.token_weights import Case, cases, model_of, reference, slip
from course_utils.traffic import count
from course_utils.world import RankError, World

NUMBER = 8  # bytes of a count on each rank, at most

# ---------------------------------------------------------------- on a rank

_held: dict = {}  # between the calls: the model, wrapped


def _accumulate(fn, case: Case, again: bool) -> dict:
    """Call `fn` on this rank's micro-batches; the second time with the model that the first has left."""
    rank = dist.get_rank()
    if not again:
        _held["model"] = DistributedDataParallel(model_of(case.seed))
    model = _held["model"]
    model.zero_grad(set_to_none=True)
    given = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    with count() as traffic:
        fn(model, [case.batch(rank, which) for which in range(case.microbatches)])
    parameters = dict(model.module.named_parameters())
    return {
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        "changed": [name for name, p in parameters.items() if not torch.equal(p.detach(), given[name])],
        "traffic": traffic,
    }


# ---------------------------------------------------------------- what came out


def _on_case(fn, world: World, case: Case, again: bool) -> Report | None:
    where = " in a second call, after a right first one" if again else ""
    try:
        found = world.run(_accumulate, fn, case, again)
    except RankError as error:
        empty = any(not any(counts) for counts in case.counts)
        alike = "every rank must come to the same collectives: one synchronised backward, and the sum of the counts"
        if empty or any(not all(counts) for counts in case.counts):
            alike += "; a rank that has nothing to learn from a micro-batch takes part with a loss of 0"
        return failed(error, (where or " in the first call").strip(), hint="", alike=alike)
    for rank, one in enumerate(found):
        if one["changed"]:
            name = one["changed"][0]
            return Report(False, f"the values of {name} have changed on rank {rank}: only gradients should{where}")
    diagnosis = diagnose(reference(case), [one["gradients"] for one in found])
    if not diagnosis:
        words = {verdict.words for verdict in diagnosis.sick}
        say = f": {words.pop()}" if len(words) == 1 else ""
        return Report(
            False,
            f"the gradients are not those of the mean over all tokens{where}{say}",
            *gradient_table(diagnosis),
            detail=case.table,
            hint=_hint(case, found, diagnosis),
        )
    return None if again else _dear(case, found)


def _hint(case: Case, found: list[dict], diagnosis: Diagnosis) -> str:
    kinds = {disease for verdict in diagnosis.sick for disease in verdict.diseases}
    per_rank = [one["gradients"] for one in found]
    missing = all(value is None for one in per_rank for value in one.values())
    synchronised = [row for row in found[0]["traffic"].only(_own) if not _small(row)]
    if missing:
        return "no gradient has come: every micro-batch needs its backward"
    if Disease.NOT_FINITE in kinds:
        return (
            "a mean over no tokens is 0/0, NaN, and NaN times 0 is NaN too: take the sum over tokens, which is 0 where "
            "every target is ignored, and divide by the number of all tokens"
        )
    if not synchronised:
        return (
            "every rank has its own gradients: DDP averages in the backward of a forward that was outside no_sync(), "
            "and that must be the last"
        )
    known = slip(case, per_rank)
    if known:
        return known
    if kinds & {Disease.RANKS_DISAGREE, Disease.PARTIAL}:
        return (
            "something is added on each rank after the ranks have averaged: the backward that synchronises must be the "
            "last, and all others under no_sync()"
        )
    if Disease.SCALED in kinds:
        return "all tokens have the same weight, but not 1 over their number: what else is multiplied or divided?"
    return (
        "write down by what the loss of one token is divided, in each micro-batch and on each rank: it must be the "
        "same number, that of all tokens that are not ignored"
    )


def _small(row) -> bool:
    """Whether it is one number from each rank."""
    return row.size <= NUMBER * (len(row.group) if row.operation == "all_gather" else 1)


def _own(row) -> bool:
    """Whether it is the learner's, or of gradients: now and then DDP also tells the ranks how its buckets are made."""
    return row.operation != "broadcast" or row.size > 128


def _dear(case: Case, found: list[dict]) -> Report | None:
    """Right gradients that were synchronised more often than once, or with more small messages than one."""
    rank = max(
        range(len(found)), key=lambda r: (sum(row.size for row in found[r]["traffic"]), len(found[r]["traffic"]))
    )
    traffic = found[rank]["traffic"].only(_own)
    small = [row for row in traffic if _small(row)]
    large = [row for row in traffic if not _small(row)]
    whole = FLOAT * sum(p.numel() for p in model_of(case.seed).parameters())
    by_hand = [row for row in large if not row.backward]
    if len(large) > 1:
        say, wrong = f"{operations(large)} of gradients, where one is enough", large
        if by_hand:
            wrong = by_hand
            hint = "DDP has averaged them in the last backward: then there is nothing left to do by hand"
            if len(by_hand) == len(large):
                hint = "leave it to DDP: the backward that is not under no_sync() averages all gradients in one bucket"
        else:
            hint = (
                "a backward synchronises unless its forward was called under model.no_sync(): put forward and backward "
                "of every micro-batch but the last inside"
            )
    elif len(small) > 1:
        say, wrong = f"{operations(small)} of a few bytes, where one for the number of tokens is enough", small
        hint = (
            "the targets are all there before the first forward: count on this rank first, then add up over the ranks"
        )
    elif sum(row.size for row in large) > whole + NUMBER:
        say, wrong = f"{sum(row.size for row in large)} bytes where the gradients have {whole}", large
        hint = "each gradient is to travel once, in its own dtype"
    else:
        return None
    return Report(
        False,
        f"the gradients are right, but it takes {say}",
        *traffic_table(rank, traffic, wrong),
        detail=case.table,
        hint=hint,
    )


# ---------------------------------------------------------------- the exercise

NAME = "accumulate_gradients"


def _examine(fn: Callable, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    for world_size in world_sizes:
        with World(world_size, timeout=timeout, device="cpu") as world:
            for case in cases(world_size, seed):
                wrong = _on_case(fn, world, case, False) or _on_case(fn, world, case, True)
                if wrong:
                    wrong = within(case.what, wrong) if case.what else wrong
                    return within(f"{NAME} on {times(world_size, 'rank')}", wrong)
    return Report(
        True,
        f"{NAME} is right on {enumerated(world_sizes)} ranks: the mean over all tokens, wherever they are, and every "
        "gradient has travelled once",
    )


ACCUMULATE = Judged(
    name=NAME,
    inputs=tuple(map(Argument, ("model", "microbatches"))),
    start="count the tokens that are not ignored, over all micro-batches and all ranks, before the first forward",
    examine=_examine,
)
