"""The second exercise of notebook 03: gradient accumulation under DDP, when micro-batches have unequal token counts.

Right is the gradient of one mean over all tokens of all ranks and micro-batches that are not ignored. Every plausible
wrong answer weighs the micro-batches in another way (`token_weights`): the one whose gradients it equals is what its
hint is about. What is communicated is counted: each gradient once, and one number; and hooks see whether the
micro-batches come one at a time. The second call of each case has other numbers of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_utils.gradients import Diagnosis, Disease, diagnose
from course_utils.grading.judged import FLOAT, Argument, Judged
from course_utils.grading.reports import Report
from course_utils.grading.token_weights import Case, calls, model_of, reference, slip
from course_utils.grading.wording import (
    failed,
    gradient_table,
    operations,
    ranks,
    resized,
    traffic_table,
    unseen,
    within,
)
from course_utils.traffic import Traffic, count
from course_utils.world import RankError, World

NUMBER = 8  # bytes of a count on each rank, at most

# ---------------------------------------------------------------- on a rank

_held: dict = {}  # between the calls: the model, wrapped


def _accumulate(fn, case: Case, again: bool) -> dict:
    """Call `fn` on this rank's micro-batches; the second time with the model that the first has left.

    Not in its traffic: what DDP itself communicates between the call of it and that of the module in it, when it tells
    the ranks how it has made its buckets.
    """
    rank = dist.get_rank()
    if not again:
        _held["model"] = DistributedDataParallel(model_of(case.weights))
    model = _held["model"]
    model.zero_grad(set_to_none=True)
    given = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    microbatches = [case.batch(rank, which) for which in range(case.microbatches)]
    with count() as traffic, _watched(model, traffic) as seen:
        fn(model, list(microbatches))
    parameters = dict(model.module.named_parameters())
    return {
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        "resized": sorted(parameters.keys() ^ given.keys()),
        "changed": [name for name in parameters if name in given and not torch.equal(parameters[name], given[name])],
        "traffic": Traffic(tuple(row for i, row in enumerate(traffic) if i not in seen.own)),
        "graphs": seen.graphs,
        "tokens": seen.tokens,
        "largest": max(inputs.numel() for inputs, _ in microbatches),
    }


class _Graph:
    """Lives in the first node of a graph, and as long as it; `done` once backward has come through."""

    done = False


@dataclass
class _Seen:
    """What hooks see: the rows that are DDP's own; how many graphs were alive at a time, and tokens in a forward."""

    own: set[int] = field(default_factory=set)
    graphs: int = 0
    tokens: int = 0


@contextmanager
def _watched(model: DistributedDataParallel, traffic: Traffic) -> Iterator[_Seen]:
    seen, alive, before = _Seen(), [], []

    def wrapper_called(*_):
        before[:] = [len(traffic)]

    def module_called(*_):
        seen.own.update(range(before.pop(), len(traffic)) if before else ())

    def module_returns(_, given, out):
        if not out.requires_grad:
            return
        graph = out.grad_fn.metadata["graph"] = _Graph()
        ref = weakref.ref(graph)
        out.register_hook(lambda _: setattr(ref(), "done", True))
        alive.append(ref)
        seen.graphs = max(seen.graphs, sum(one() is not None and not one().done for one in alive))
        seen.tokens = max(seen.tokens, out[..., 0].numel())

    hooks = [
        model.register_forward_pre_hook(wrapper_called),
        model.module.register_forward_pre_hook(module_called),
        model.module.register_forward_hook(module_returns),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


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
    if any(one["resized"] for one in found):
        return resized(found)
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
            hint=_hint(case, found, diagnosis, again),
        )
    return None if again else _at_once(case, found) or unseen(found, _whole(case)) or _dear(case, found)


def _whole(case: Case) -> int:
    return FLOAT * sum(p.numel() for p in model_of(case.weights).parameters())


def _at_once(case: Case, found: list[dict]) -> Report | None:
    """Right gradients of a batch that doesn't fit: several graphs at a time, or one of several micro-batches."""
    graphs = max(one["graphs"] for one in found)
    if graphs > 1:
        return Report(
            False,
            f"the gradients are right, but the graphs of {graphs} micro-batches are alive at a time, where one fits",
            detail=case.table,
            hint="backward frees the graph that forward has built: call it for each micro-batch before the next one's "
            "forward; the gradients add up in p.grad",
        )
    for rank, one in enumerate(found):
        if one["tokens"] > one["largest"]:
            return Report(
                False,
                f"the gradients are right, but a forward takes {one['tokens']} tokens on rank {rank}, where its "
                f"largest micro-batch has {one['largest']}",
                detail=case.table,
                hint="a batch comes in micro-batches because it doesn't fit: a forward and a backward for each",
            )
    return None


def _hint(case: Case, found: list[dict], diagnosis: Diagnosis, again: bool) -> str:
    kinds = {disease for verdict in diagnosis.sick for disease in verdict.diseases}
    per_rank = [one["gradients"] for one in found]
    missing = all(value is None for one in per_rank for value in one.values())
    synchronised = [row for row in found[0]["traffic"] if not _small(row)]
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
    if Disease.SCALED in kinds and again:
        return "the second call has other micro-batches, with another number of tokens: count them anew in every call"
    if Disease.SCALED in kinds:
        return "all tokens have the same weight, but not 1 over their number: what else is multiplied or divided?"
    return (
        "write down by what the loss of one token is divided, in each micro-batch and on each rank: it must be the "
        "same number, that of all tokens that are not ignored"
    )


def _small(row) -> bool:
    """Whether it is one number from each rank."""
    return row.size <= NUMBER * (len(row.group) if row.operation == "all_gather" else 1)


def _dear(case: Case, found: list[dict]) -> Report | None:
    """Right gradients that were synchronised more often than once, or with more small messages than one."""
    rank = max(
        range(len(found)), key=lambda r: (sum(row.size for row in found[r]["traffic"]), len(found[r]["traffic"]))
    )
    traffic: Traffic = found[rank]["traffic"]
    small = [row for row in traffic if _small(row)]
    large = [row for row in traffic if not _small(row)]
    whole = _whole(case)
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
            for both in calls(world_size, seed):
                for again, case in enumerate(both):
                    wrong = _on_case(fn, world, case, bool(again))
                    if wrong:
                        wrong = within(case.what, wrong) if case.what else wrong
                        return within(f"{NAME} on {ranks(world_size)}", wrong)
    return Report(
        True,
        f"{NAME} is right on {ranks(*world_sizes)}: the mean over all tokens, wherever they are, and every "
        "gradient has travelled once",
    )


ACCUMULATE = Judged(
    name=NAME,
    inputs=tuple(map(Argument, ("model", "microbatches"))),
    start="count the tokens that are not ignored, over all micro-batches and all ranks, before the first forward",
    examine=_examine,
)
