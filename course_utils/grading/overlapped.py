"""The first exercise of notebook 03: gradients averaged in buckets, while backward goes on.

Judged on live ranks by their gradients against a single process with the whole batch, in three steps; by `Traffic`:
how many all-reduces of how many bytes, and whether they start in backward; and, on links that are slower than the whole
backward, by the order of events in the second step's `Timeline`: an order, not a number of seconds, so that a busy
machine doesn't matter. Buckets, and why: Li et al., "PyTorch Distributed" (2020), section 3.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils.gradients import Diagnosis, Disease, diagnose
from course_utils.grading.bucketed import Case, Net, loss, paced, plain, special
from course_utils.grading.judged import Argument, Judged
from course_utils.grading.reports import Report, Row
from course_utils.grading.wording import (
    Table,
    enumerated,
    failed,
    gradient_table,
    operations,
    ranks,
    resized,
    times,
    traffic_table,
    unseen,
    within,
)
from course_utils.links import Link
from course_utils.timeline import Timeline, merge, recording
from course_utils.traffic import Traffic, count
from course_utils.world import RankError, World

STEPS = 3
LATE = 0.03  # seconds by which the last rank comes later to its backward: whoever doesn't wait for it is found out
TRAVEL = 0.09  # seconds of a bucket on the slow link: several times what all layers' backward takes
TRIES = 3  # on a machine that is very busy a right answer may miss its moment once

# ---------------------------------------------------------------- on a rank

_held: dict = {}  # between the calls: what `fn` has made of the model


def _begin(fn, case: Case) -> str:
    """Give `fn` its model; the type of what it returned, "" if that can be called."""
    model = Net(case)
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    finish = fn(model, case.bucket_bytes)
    _held.clear()
    _held.update(case=case, model=model, finish=finish, given=given)
    return "" if callable(finish) else type(finish).__name__


def _step(number: int) -> dict:
    """Forward, backward and `finish`: the gradients, what was sent, and when."""
    case, model, given, rank = _held["case"], _held["model"], _held["given"], dist.get_rank()
    model.zero_grad(set_to_none=True)
    x, y = case.batch(number, rank)
    with count() as traffic, recording() as recorder:
        value = loss(model(x), y)
        if rank == dist.get_world_size() - 1 and case.kind != "paced":
            time.sleep(LATE)
        value.backward()
        _held["finish"]()
        returned = time.monotonic()
    timeline = recorder.timeline()
    arrived = _events(timeline, "communication").only(lambda event: event.stop <= returned)
    values = {name: p.detach() for name, p in model.named_parameters()}
    return {
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "resized": sorted(values.keys() ^ given.keys()),
        "changed": [name for name in values if name in given and not torch.equal(values[name], given[name])],
        "traffic": traffic,
        "timeline": timeline,
        "arrived": len(arrived),
    }


# ---------------------------------------------------------------- what is wrong with a step


def _run(fn, world: World, case: Case, steps: int) -> tuple[list[dict], Report | None]:
    """What the ranks found in the last step, and the report on the first that went wrong."""
    try:
        kinds = world.run(_begin, fn, case)
    except RankError as error:
        frozen = "doesn't require" in str(error)
        return [], failed(error, "before the first step", hint=_FROZEN if frozen else "")
    rank, kind = next(((rank, kind) for rank, kind in enumerate(kinds) if kind), (0, ""))
    if kind:
        what = "None: is there a return at its end?" if kind == "NoneType" else f"a {kind}"
        return [], Report(False, f"rank {rank} returned {what}{'' if kind == 'NoneType' else ', expected a function'}")
    found: list[dict] = []
    for number in range(1, steps + 1):
        where = f"in step {number}" + (", after a right first one" if number > 1 else "")
        try:
            found = world.run(_step, number)
        except RankError as error:
            hint = _AGAIN if number > 1 else "a hook is called with the parameter whose gradient has become ready"
            return [], failed(error, where, hint, alike=_AGAIN if number > 1 else _ALIKE)
        wrong = _wrong(case, number, found)
        if wrong:
            return [], wrong
    return found, None


_FROZEN = "a frozen parameter has no gradient: leave out what doesn't ask for one (p.requires_grad)"
_AGAIN = (
    "the second step meets what the first has left: whatever was counted, collected or set has to begin anew, at the "
    "end of finish()"
)
_ALIKE = (
    "all ranks must start the same buckets in the same order: fill them by the order of model.parameters(), not by "
    "that of a set, of a hash, or of one rank's own; and finish() must start those that aren't complete"
)
_ON_ITS_WAY = "between all_reduce(async_op=True) and wait() the tensor isn't yours: don't divide it, nor fill it again"


def _wrong(case: Case, number: int, found: list[dict]) -> Report | None:
    """A step after which the gradients are not what a single process has."""
    where = "" if number == 1 else f" in step {number}, after a right first one"
    if any(one["resized"] for one in found):
        return resized(found)
    for rank, one in enumerate(found):
        if one["changed"]:
            return Report(
                False, f"the values of {one['changed'][0]} have changed on rank {rank}: only gradients should"
            )
        sent = len(one["traffic"].only(_collective))
        if one["arrived"] < sent:
            late = sent - one["arrived"]
            return Report(
                False,
                f"on rank {rank} finish() returns before {late} of {times(sent, 'collective')} "
                f"{'has' if late == 1 else 'have'} been waited for{where}",
                *traffic_table(rank, one["traffic"]),
                hint="async_op=True returns at once, with a Work: keep it, and let finish() call its wait(), before it "
                "reads what has come. Numbers that are right without it are so by luck",
            )
    everyone = range(len(found))
    reference = case.gradients(number, everyone)
    previous = case.gradients(number - 1, everyone) if number > 1 else None
    per_rank = [{name: _or_none(value, reference[name]) for name, value in one["gradients"].items()} for one in found]
    diagnosis = diagnose(reference, per_rank, previous=previous)
    if diagnosis:
        return None
    sick = [verdict.name for verdict in diagnosis.sick]
    which = f"the gradients of {enumerated(sick)} are" if len(sick) == 2 else "the gradients are"
    which = f"the gradient of {sick[0]} is" if len(sick) == 1 else which
    words = {verdict.words for verdict in diagnosis.sick}
    say = ": this is the sum" if _the_sum(diagnosis) else f": {words.pop()}" if len(words) == 1 else ""
    return Report(
        False,
        f"{which} not the mean over the ranks{where}{say}",
        *gradient_table(diagnosis),
        detail=case.layout,
        hint=_hint(case, number, found, diagnosis),
    )


def _collective(row) -> bool:
    return row.operation not in ("send", "recv")


def _or_none(value: Tensor | None, reference: Tensor | None) -> Tensor | None:
    """Where no gradient was to come, zeros are as good as none."""
    return None if value is None or reference is None and not value.any() else value


def _the_sum(diagnosis: Diagnosis) -> bool:
    return all(v.diseases == (Disease.SCALED,) and v.k_name == "world_size" for v in diagnosis.sick)


def _hint(case: Case, number: int, found: list[dict], diagnosis: Diagnosis) -> str:
    kinds = {disease for verdict in diagnosis.sick for disease in verdict.diseases}
    sick = {verdict.name for verdict in diagnosis.sick}
    own = _own(case, number, found)
    alike = len({tuple((row.operation, row.size) for row in one["traffic"]) for one in found}) == 1
    sent = min(sum(row.size for row in one["traffic"]) for one in found)
    if not sent:
        return _AGAIN if number > 1 else "every rank still has its own gradients: nothing was sent"
    if Disease.STALE in kinds:
        return "the numbers of the step before are still in the bucket: put the new gradients in, in every step"
    if Disease.ACCUMULATED in kinds:
        return (
            "the bucket still held the step before when the new gradients were added to it: write over it, with copy_"
        )
    if Disease.NOT_FINITE in kinds:
        return (
            "NaN or infinity: is there anything in a bucket that nobody has written? torch.empty has whatever was there"
        )
    if Disease.UNEXPECTED in kinds:
        return (
            "no gradient comes for a parameter that forward doesn't use: its place in the bucket must be zero, or None"
        )
    unsent = sum(case.trained.values()) - sent
    if own and (sent < case.gradients_exist() or sum(case.trained[name] for name in own) <= unsent):
        if number > 1:
            return f"some gradients have not been sent. {_AGAIN}"
        return (
            f"on some rank {enumerated(sorted(own))} never left it: a bucket in which a gradient doesn't come is not "
            "complete when backward ends, and finish() must start it"
        )
    if own and sick:
        return (
            "a rank still has its own gradient, though everything was sent: what arrives is in the bucket, and "
            "it is there only after wait(); then it has to be put into p.grad"
        )
    if _the_sum(diagnosis):
        return "all-reduce adds up; the mean is the sum divided by the number of ranks"
    if Disease.MISSING in kinds:
        return "what the optimizer reads is p.grad: the mean has to stand there when finish() returns"
    if kinds == {Disease.SCALED}:
        return "how often is each gradient divided, and how often is it reduced? once is enough"
    if Disease.RANKS_DISAGREE in kinds:
        return (
            f"every bucket travelled alike on all ranks, so one was changed on its way: {_ON_ITS_WAY}"
            if alike
            else _ALIKE
        )
    if number > 1:
        return _AGAIN
    return (
        "all ranks hold the same wrong numbers: does each gradient get its own place in the bucket, and come back from "
        f"there? is it complete when it is put in? and {_ON_ITS_WAY}"
    )


def _own(case: Case, number: int, found: list[dict]) -> set[str]:
    """The parameters of which some rank still has its own gradient, or its part of the mean."""
    own = set()
    for rank, one in enumerate(found):
        for name, local in case.gradients(number, [rank]).items():
            held = one["gradients"][name]
            if local is None or held is None or held.shape != local.shape:
                continue
            if any(torch.allclose(held, local / k, rtol=1e-4, atol=1e-6) for k in {1, len(found)}):
                own.add(name)
    return own


# ---------------------------------------------------------------- what it took


def _dear(case: Case, found: list[dict]) -> Report | None:
    """Right gradients, with more communication than is needed, in larger pieces, or later."""
    most = case.enough()
    rank = max(range(len(found)), key=lambda r: _cost(found[r]["traffic"]))
    traffic: Traffic = found[rank]["traffic"]
    rows, sizes, whole = list(traffic), list(case.trained.values()), sum(case.trained.values())
    large = [row for row in rows if row.size > case.bucket_bytes and row.size not in sizes]
    outside = [row for row in rows if not row.backward]
    if sum(row.size for row in rows) > whole:
        extra = sum(row.size for row in rows) - whole
        say, wrong = f"{times(extra, 'byte')} more are reduced than the {whole} that are trained", ()
        frozen = any(not p.requires_grad for p in case.twin.parameters())
        hint = _FROZEN if frozen else "is anything reduced twice, or padded?"
    elif large:
        largest, wrong = max(row.size for row in large), large
        say = f"an all-reduce takes {largest} bytes, where a bucket holds {case.bucket_bytes} at most"
        hint = "before a gradient goes into a bucket: does it still fit? if not, the bucket is full: open the next"
        if len(rows) == 1:
            hint = "with all gradients in one bucket nothing can start before the last of them is there: fill several"
    elif len(rows) > most:
        say, wrong = (
            f"a step takes {operations(rows)}, where {times(most, 'all-reduce')} of full buckets are enough",
            (),
        )
        hint = "let gradients wait for each other in a bucket, and start it when the next one doesn't fit any more"
        if {row.operation for row in rows} != {"all_reduce"}:
            hint = "nothing is needed but an all-reduce for each bucket"
    elif len(outside) > case.left_to_finish():
        started = len(rows) - len(outside)
        say = f"only {started} of {times(len(rows), 'all-reduce')} start during backward" if started else ""
        say = say or "no all-reduce starts during backward"
        wrong = outside
        hint = (
            "p.register_post_accumulate_grad_hook(hook) has backward call hook(p) as soon as p.grad is there: start a "
            "bucket when its last gradient has come, and leave to finish() what is not complete"
        )
        if case.kind == "special":
            hint = (
                "a gradient that never comes holds up its own bucket and those behind it, but none before it: a frozen "
                "parameter is in none, and backward begins at the last parameter, so the first bucket does, too"
            )
    else:
        return None
    return Report(
        False,
        f"the gradients are right, but {say}",
        *traffic_table(rank, traffic, wrong),
        detail=case.layout,
        hint=hint,
    )


def _cost(traffic: Traffic) -> tuple[int, ...]:
    """Calls, bytes, and calls outside backward."""
    return len(traffic), sum(row.size for row in traffic), sum(not row.backward for row in traffic)


# ---------------------------------------------------------------- does backward go on?


def _stands_still(fn, world_size: int, seed: int, timeout: float) -> Report | None:
    """On a link on which one bucket takes longer than all of backward: does it go on, on every rank, in a second step?

    A rank that went on in one of the tries can do it; on a busy machine another may have missed its moment.
    """
    if world_size == 1:
        return None
    link = Link(TRAVEL / (2 * (world_size - 1)), 0)  # seconds per step of the ring
    wrong, still = None, set(range(world_size))
    for _ in range(TRIES):
        with World(world_size, timeout=timeout, device="cpu", links=link) as world:
            found, wrong = _run(fn, world, paced(seed), steps=2)
        if wrong:
            return wrong
        wrong = _in_line(found, still)
        if wrong is None:
            return None
    return wrong


def _in_line(found: list[dict], still: set[int]) -> Report | None:
    """What is wrong with the order of events; the ranks that go on are taken out of those that stand `still`."""
    ranks = [one["timeline"] for one in found]
    compute = [_events(timeline, "compute", "′").events for timeline in ranks]
    if not all(compute):
        raise AssertionError("Paced has recorded no backward: what are its events called?")
    travel = [_events(timeline, "communication").events for timeline in ranks]
    if not all(travel):  # nothing that could be judged
        return None
    last = [events[-1] for events in compute]
    picture = "\n".join(["layers that take their time, on a slow link, in a second step:", merge(ranks).text(90)])
    if all(events[0].start >= end.stop for events, end in zip(travel, last)):
        return Report(
            False,
            "the gradients are right, but the first bucket starts when backward is over",
            *_order_table(0, compute[0], travel[0], "started"),
            detail=picture,
            hint="backward begins at the last layer: so must the first bucket, and a bucket must start without waiting "
            "for those of earlier layers. reversed(list(model.parameters()))",
        )
    still -= {rank for rank, end in enumerate(last) if end.start < travel[rank][0].stop}
    if not still:
        return None
    rank = min(still)
    return Report(
        False,
        "the gradients are right, but backward stands still while a bucket travels"
        + ("" if len(still) == len(found) else f", on rank {rank}"),
        *_order_table(rank, compute[rank], travel[rank], "arrived"),
        detail=picture,
        hint="whoever waits in a hook keeps the layers before it waiting: start with async_op=True, keep the Work that "
        "it returns, and call wait() in finish()",
    )


def _events(timeline: Timeline, kind: str, end: str = "") -> Timeline:
    """In order of start; without messages from one rank to another. The name of a backward ends in a prime."""
    return timeline.only(lambda e: e.kind == kind and e.name.endswith(end) and not e.name.startswith("send"))


def _order_table(rank: int, compute: Sequence, travel: Sequence, verb: str) -> Table:
    """How many buckets have started, or arrived, when each layer's backward starts."""
    rows = []
    for place, event in enumerate(compute):
        number = sum((bucket.stop if verb == "arrived" else bucket.start) <= event.start for bucket in travel)
        ok = number == 0 if verb == "arrived" else number > 0 or place == 0
        rows.append(
            Row(
                ok,
                (
                    f"{event.name.removesuffix('′')}, backward",
                    f"{times(number, 'bucket')} {'has' if number == 1 else 'have'} {verb}",
                ),
            )
        )
    return ("", f"when it starts, on rank {rank}"), tuple(rows)


# ---------------------------------------------------------------- the exercise

NAME = "average_during_backward"


def _examine(fn: Callable, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    for world_size in world_sizes:
        wrong = _on(fn, world_size, seed, timeout)
        if wrong:
            return within(f"{NAME} on {ranks(world_size)}", wrong)
    return Report(
        True,
        f"{NAME} is right on {ranks(*world_sizes)}: the mean of the gradients after every step, in full "
        "buckets, and backward goes on while they travel",
    )


def _on(fn: Callable, world_size: int, seed: int, timeout: float) -> Report | None:
    with World(world_size, timeout=timeout, device="cpu", links=Link(0, 0)) as world:
        wrong = _on_case(fn, world, plain(seed)) or _stands_still(fn, world_size, seed, timeout)
        if wrong:
            return wrong
        wrong = _on_case(fn, world, special(seed))
        return wrong and within("a model with a tied weight, a frozen one and two that forward doesn't use", wrong)


def _on_case(fn, world: World, case: Case) -> Report | None:
    found, wrong = _run(fn, world, case, STEPS)
    return wrong or unseen(found, case.gradients_exist()) or _dear(case, found)


DURING_BACKWARD = Judged(
    name=NAME,
    inputs=tuple(map(Argument, ("model", "bucket_bytes"))),
    start="sort the parameters into buckets first; then a hook on each counts how many of its bucket are there",
    examine=_examine,
)
