"""The first exercise of notebook 04: ZeRO-2, which keeps of gradients and of Adam's moments a share on each rank.

Any partition is right: slices of one flat buffer, slices of each parameter, or whole parameters with an owner each. So
what is judged is what they have in common (Rajbhandari et al. 2020, sections 5 and 7): Adam's parameters on every rank,
what a rank holds between steps and at most during backward, and 2 (N-1) Ψ bytes sent in a step, over all ranks. What is
sent is counted on emulated links, which cost nothing and tell what has been waited for; what is held is looked at
without them, in a second training with another seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from course_utils.gradients import Disease, diagnose
from course_utils.grading.judged import Argument, Judged
from course_utils.grading.reports import Report, Row
from course_utils.grading.wording import ALIKE, ranks, times, verdict_table, within
from course_utils.grading.zero_steps import (
    FLOAT,
    FROZEN,
    LR,
    TIED,
    Enough,
    Network,
    Sizes,
    Way,
    bytes_of,
    one_thread,
    reference,
    sizes_of,
    train,
)
from course_utils.links import Link
from course_utils.traffic import Traffic, merge
from course_utils.world import RankError, RankTimeout, World

_SLIPS = (
    (
        Way(scale=lambda ranks: float(ranks)),
        "the sum of the ranks' gradients does this: divide by the number of ranks. With Adam's usual eps of 1e-8 "
        "nobody would notice, until gradients are clipped",
    ),
    (Way(scale=lambda ranks: 1 / ranks), "the gradients have been divided by the number of ranks twice"),
    (Way(eps=1e-8), "eps is an argument: hand it on to Adam"),
    (Way(lr=1e-3), "lr is an argument: hand it on to Adam"),
    (Way(corrects=False), "Adam divides its moments by 1 - beta^t: both begin at zero"),
    (Way(forgets=True, counts=False), "Adam starts anew in every step: make it once, and its moments stay"),
    (Way(counts=False), "Adam's step counter stays at 1: t grows by one in every step"),
    (Way(forgets=True), "Adam's moments are forgotten from step to step"),
    (
        Way(accumulates=True),
        "the gradients of earlier steps are still in these: nobody calls zero_grad, so let go of a gradient when it "
        "has been reduced",
    ),
)


def _on(fn: Callable, world: World, seed: int, counted: bool) -> Report | None:
    sizes = sizes_of(world.size, seed)
    try:
        found = world.run(train, fn, sizes, seed, counted)
    except RankError as error:
        return _failed(error)
    for rank, one in enumerate(found):
        if "steps" not in one:
            return Report(False, f"on rank {rank} ZeRO2(model, lr, eps) gives a {one['type']}, which has no step()")
        if one["odd"]:
            own_way = ": fully_shard is not to be used here" if one["odd"] == "DTensors" else ", and they were float32"
            return Report(
                False,
                f"on rank {rank} the model's parameters are {one['odd']}{own_way}",
                hint="ZeRO-2 leaves the parameters whole, plain float32 tensors that they are",
            )
    wrong = _not_awaited(found) if counted else None
    if wrong:
        return wrong
    with one_thread():
        wrong = _wrong_parameters(found, sizes, seed)
    if wrong:
        return wrong
    network = Network(sizes, seed)
    return _sends_too_much(found, network) if counted else _holds_too_much(found, network)


def _failed(error: RankError) -> Report:
    """The report on ranks that failed.

    Raises:
        RankError: the same, where nothing is known about it that `check` doesn't know.
    """
    text = str(error)
    if error.error_type == "NotImplementedError" or "still running" in text or _MANY in text:
        raise error
    if isinstance(error, RankTimeout):
        return Report(False, "the ranks hang", detail=text, hint=ALIKE)
    first, *more = text.splitlines()
    hint = next((hint for sign, hint in _ERRORS.items() if sign in text), "")
    return Report(False, first, detail="\n".join(more), hint=hint)


_MANY = "collectives are under way on this group"  # emulated links keep only so many in mind
_ERRORS = {
    "doesn't require gradient": "one parameter is frozen (requires_grad is False): without a gradient it takes no part",
    "outputShape[0] * worldSize == inputShape[0]": "few of these sizes divide by the number of ranks: fill up with "
    "zeros behind the last element",
    "index out of range": "a parameter of one element has one piece, however many ranks there are, if it is only cut: "
    "fill up with zeros behind the last element first",
    "'NoneType' object has no attribute": "was p.grad None in a hook? One parameter is tied: it has two names, and "
    "registered under both, its second hook finds the gradient gone. model.parameters() gives it once",
}


def _not_awaited(found: list[dict]) -> Report | None:
    """Collectives that were started and not waited for: whether their numbers have arrived is a matter of luck."""
    for rank, one in enumerate(found):
        for number, step in enumerate(one["steps"], 1):
            sent = [row for row in step["traffic"] if row.operation not in ("send", "recv")]
            if step["arrived"] is None:
                continue
            missing = Counter(row.operation for row in sent) - Counter(step["arrived"])
            late = missing.total()
            if not late:
                continue
            calls = Counter(
                (row.operation, "backward" if row.backward else "step", str(row.line or "")) for row in sent
            )
            return Report(
                False,
                f"on rank {rank} step {number} ends before {late} of its {times(len(sent), 'collective')} "
                f"{'has' if late == 1 else 'have'} been waited for",
                ("", "when", "calls", "called from"),
                tuple(Row(name not in missing, (name, when, str(n), line)) for (name, when, line), n in calls.items()),
                hint="async_op=True returns at once, with a Work: keep every one, and call its wait() before you read "
                "what it brings, or write over what it sends. Numbers that are right without it are so by luck",
            )
    return None


def _wrong_parameters(found: list[dict], sizes: Sizes, seed: int) -> Report | None:
    expected = reference(sizes, seed, len(found))
    ranks = [[one["start"], *(step["parameters"] for step in one["steps"])] for one in found]
    theirs = [[{name: torch.from_numpy(a) for name, a in step.items()} for step in one] for one in ranks]
    for step, right in enumerate(expected):
        when = f"after step {step}" if step else "before the first step"
        for rank, one in enumerate(theirs):
            odd = next(
                (name for name in right if name not in one[step] or one[step][name].shape != right[name].shape), ""
            )
            if odd:
                shape = list(one[step][odd].shape) if odd in one[step] else "none"
                text = f"{when} the shape of {odd!r} on rank {rank} is {shape}, and it was {list(right[odd].shape)}"
                return Report(False, text, hint="ZeRO-2 leaves the parameters whole: only what belongs to them is cut")
            if not step and any(not torch.equal(one[0][name], right[name]) for name in right):
                names = ", ".join(repr(name) for name in right if not torch.equal(one[0][name], right[name]))
                return Report(False, f"on rank {rank} the constructor has changed {names}: only step() should")
            if not torch.equal(one[step][FROZEN], right[FROZEN]):
                hint = "it is frozen (requires_grad is False), so no gradient and no update is meant for it"
                return Report(False, f"{when} {FROZEN!r} has another value on rank {rank}", hint=hint)
        if step:
            changes = [_change(one, step) for one in theirs]
            before = _change(expected, step - 1) if step > 1 else None
            diagnosis = diagnose(_change(expected, step), changes, previous=before)
            if not diagnosis:
                say, hint = _what_is_wrong(diagnosis, expected, theirs, step, sizes, seed)
                left = next((name for one in found if step > 1 for name in one["steps"][step - 2]["left"]), "")
                if left and hint == _GENERAL:
                    hint = f"{left}.grad was still there after the step before, so the next gradient was added to it"
                return Report(
                    False,
                    f"{when} {say}",
                    *verdict_table(diagnosis, [verdict.name for verdict in diagnosis], "its change"),
                    hint=hint,
                )
    return None


def _change(steps: list[dict[str, Tensor]], step: int) -> dict[str, Tensor]:
    return {name: after - steps[step - 1][name] for name, after in steps[step].items() if name != FROZEN}


def _flat(steps: list[dict[str, Tensor]], step: int) -> Tensor:
    return torch.cat([change.flatten() for change in _change(steps, step).values()])


def _near(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs() <= LR * 1e-4


def _what_is_wrong(diagnosis, expected, theirs, step: int, sizes: Sizes, seed: int) -> tuple[str, str]:
    """What to say after the step, and the hint."""
    right, changed = _flat(expected, step), torch.stack([_flat(one, step) for one in theirs])
    if not changed.any():
        return (
            "no parameter has changed on any rank",
            "step() updates a share: write it back, and let all ranks have it",
        )
    if not changed.isfinite().all():
        hint = (
            "is something divided by zero, or is a buffer read before anything has arrived in it? Adam counts a step "
            "before its update, and 1 - beta^t is 0 for t = 0"
        )
        return "some parameters are not finite", hint
    world_size = len(theirs)
    if step == 1:
        alone = torch.stack([_flat(Way(ranks=[rank])(sizes, seed, world_size, 1), 1) for rank in range(world_size)])
        if _near(changed, alone).all():
            return "each rank has trained on its own batch alone", "the gradients are to be those of all ranks' batches"
        if _near(changed, changed[0]).all() and _near(changed[0], alone).any(0).all():
            hint = "each part has been updated with one rank's own gradients: they are to be reduced before the update"
            return "every rank has the same parameters, and they are not Adam's on the whole batch", hint
    if not _near(changed, changed[0]).all():
        fresh = _near(changed, right)
        if (fresh | (changed == 0)).all() and fresh.any(0).all():
            hint = "after the update of its own share every rank needs the others' shares: an all-gather, or broadcasts"
            return "each rank has updated a share of its own, and the rest of its parameters is as before", hint
        return (
            "the ranks hold different parameters",
            "every parameter has one owner, and all ranks have to take over what the owner has computed",
        )
    idle = [verdict.name for verdict in diagnosis.sick if Disease.MISSING in verdict.diseases]
    if len(idle) == len(diagnosis.sick):
        hint = "which rank updates them, from which bucket, and how do the others hear of it?"
        return f"some parameters have not changed on any rank: {', '.join(idle)}", hint
    if {verdict.name for verdict in diagnosis.sick} == {TIED}:
        hint = "it is tied: one parameter with two names. model.parameters() gives it once; reduce and update it once"
        return f"{TIED!r} is wrong, and all others are right", hint
    for way, hint in _SLIPS:
        if _near(changed, _flat(way(sizes, seed, world_size, step), step)).all():
            return "the parameters are not Adam's", hint
    return "the parameters are not Adam's on the whole batch, on any rank", _GENERAL


_GENERAL = (
    "which parameters are right? If those that come first are, look at offsets and padding; if none is, at Adam: "
    "betas 0.9 and 0.999, and no weight decay"
)


def _holds_too_much(found: list[dict], network: nn.Module) -> Report | None:
    trained = [p for p in network.parameters() if p.requires_grad]
    psi, ranks, enough = bytes_of(trained), len(found), Enough.on(trained, len(found))

    def worst(key: str) -> tuple[int, int, dict]:
        """Of all ranks and steps the one with the most: what it is, the rank, and everything about it."""
        return max(((s[key], rank, s) for rank, one in enumerate(found) for s in one["steps"]), key=lambda x: x[0])

    def report(key: str, limit: float, say: str, shapes: list, hint: str) -> Report:
        most = [max(step[key] for step in one["steps"]) for one in found]
        rows = tuple(Row(m <= limit, (f"rank {r}", f"{m:,}", f"{limit:,.0f}")) for r, m in enumerate(most))
        listed = ", ".join(str(list(shape)) for shape in shapes[:8]) + (", …" if len(shapes) > 8 else "")
        headline = f"the parameters are right, but {say}"
        return Report(False, headline, ("", "bytes", "enough"), rows, f"shapes of what is alive there: {listed}", hint)

    held, rank, step = worst("between")
    if held > enough.between:
        hint = (
            "is it a copy of all parameters, a buffer for gathering, gradients in a list or in the slices, or a slice "
            "that is a view and keeps the whole alive (clone it)? Let go of it in step()"
        )
        alive = Counter(math.prod(shape) for shape in step["between_shapes"])
        if alive >= Counter(2 * [p.numel() for p in trained]) or alive.total() == 2 and held >= 2 * psi:
            hint = "two moments for every parameter are 2 Ψ: give Adam only what this rank is to update"
        say = f"after a step rank {rank} holds {held:,} bytes besides the model"
        share = f"each of Ψ/N = {psi // ranks:,} and a largest parameter"
        say += f", where {enough.between:,.0f} are enough: three shares, {share}"
        return report("between", enough.between, say, step["between_shapes"], hint)
    held, rank, step = worst("during")
    if held > enough.during:
        say = f"in backward rank {rank} holds gradients of {held:,} bytes at a time, "
        say += f"where {enough.during:,.0f} are enough"
        hint = "reduce a gradient as soon as a bucket is full, keep this rank's share of it, and set p.grad to None"
        if held >= psi:
            say += f": all Ψ = {psi:,} bytes of them, whole to the end, which is ZeRO-1"
            hint = (
                "gradients come one after the other: in a hook (register_post_accumulate_grad_hook) reduce each, keep "
                "this rank's share, and set p.grad to None before the next comes. It is None already? Then the share "
                "is a view, which keeps the whole gradient alive: clone it"
            )
        return report("during", enough.during, say, step["during_shapes"], hint)
    left, rank, step = worst("left")
    if left:
        names = ", ".join(left[:4]) + (", …" if len(left) > 4 else "")
        hint = "zeros take as much room as gradients: set p.grad to None, on every rank"
        return Report(
            False, f"the parameters are right, but after a step rank {rank} still has .grad of {names}", hint=hint
        )
    return None


def _sends_too_much(found: list[dict], network: nn.Module) -> Report | None:
    trained = [p for p in network.parameters() if p.requires_grad]
    psi, ranks, enough = bytes_of(trained), len(found), Enough.on(trained, len(found)).sent
    steps = [merge(part) for part in zip(*([step["traffic"] for step in one["steps"]] for one in found))]
    unit = (ranks - 1) * psi
    least = min(map(Traffic.total, steps))
    if least < 2 * unit:
        return Report(
            False,
            f"the parameters are right, but only {float(least):,.6g} bytes could be seen in a step, where "
            f"2 (N - 1) Ψ = {2 * unit:,} have to travel",
            hint="call collectives from the thread that calls you, by the functions of torch.distributed, and send "
            "float32: what goes another way is not counted",
        )
    sent = max(steps, key=Traffic.total)
    if sent.total() <= enough:
        return None
    rows = []
    for operation, total in sent.by_operation().items():
        where = {("backward" if row.backward else "step") for row in sent if row.operation == operation}
        line = next((str(row.line) for row in sent if row.operation == operation and row.line), "")
        cells = (
            operation,
            " and ".join(sorted(where)),
            str(sent.calls()[operation]),
            f"{float(total):,.6g}",
            f"{float(total / unit):.3g}",
        )
        rows.append(Row(operation != "all_reduce" and total <= enough / 2, (*cells, line)))
    hint = "every gradient has to reach its owner once, and every new parameter all ranks once: what is sent twice?"
    if sent.by_operation().get("all_reduce", 0) > unit:
        hint = (
            "an all-reduce brings the whole sum to every rank, a reduce-scatter and an all-gather in one: here each "
            "rank needs its share, which the first half gives it"
        )
    reduced = sent.only(lambda row: row.operation in ("reduce_scatter", "reduce", "all_to_all")).total()
    excess = reduced - unit, sent.total() - reduced - unit
    padding = enough / 2 - unit + FLOAT * ranks**2
    for parameter, halves, more in (
        (network.positions, (1, 1), f"{FROZEN!r} is frozen: it has no gradient and stays as it is: it need not travel"),
        (
            network.embedding,
            (1, 0),
            f"the gradient of {TIED!r} travels twice: it is tied, one parameter with two names",
        ),
        (network.embedding, (0, 1), f"{TIED!r} is handed out twice: it is tied, one parameter with two names"),
        (network.embedding, (1, 1), f"{TIED!r} travels twice, both ways: it is tied, one parameter with two names"),
    ):
        more_bytes = [half * (ranks - 1) * bytes_of([parameter]) for half in halves]
        if all(0 <= over - much <= padding for over, much in zip(excess, more_bytes)):
            hint = more
    return Report(
        False,
        f"the parameters are right, but in one step all ranks send {float(sent.total()):,.6g} bytes, where {enough:,} "
        f"are enough: 2 (N - 1) Ψ, with Ψ = {psi:,}, and padding",
        ("", "when", "calls", "bytes of all ranks", "in (N - 1) Ψ", "called from"),
        tuple(rows),
        hint=hint,
    )


def _examine(fn: Callable, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    for world_size in world_sizes:
        wrong = _counted(fn, world_size, seed, timeout)
        if not wrong:
            with World(world_size, timeout=timeout, device="cpu") as world:
                wrong = _on(fn, world, seed + 1, counted=False)
        if wrong:
            return within(f"ZeRO2 on {ranks(world_size)}", wrong)
    praise = "Adam's parameters after every step, of gradients and moments a share on each rank, and 2 (N - 1) Ψ sent"
    return Report(True, f"ZeRO2 is right on {ranks(*world_sizes)}: {praise}")


def _counted(fn: Callable, world_size: int, seed: int, timeout: float) -> Report | None:
    """What is wrong with what is computed, sent and waited for; the last of them only where links can be emulated."""
    for links in (Link(0, 0), None):
        try:
            with World(world_size, timeout=timeout, device="cpu", links=links) as world:
                return _on(fn, world, seed, counted=True)
        except RankError as error:
            if _MANY not in str(error) or links is None:
                raise
    return None


ZERO_2 = Judged(
    name="ZeRO2",
    inputs=tuple(map(Argument, ("model", "lr", "eps"))),
    start="begin with the question which rank updates what; then a hook on each parameter that reduces its gradient, "
    "keeps what this rank owns, and lets the rest go",
    examine=_examine,
)
