"""The sentence that cures: which collective, or which change, turns this finding into a healthy one."""

from __future__ import annotations

from collections.abc import Callable

from course_utils.gradients.relations import Finding
from course_utils.gradients.values import HEALTHY, Disease
from course_utils.gradients.views import number


def cure(finding: Finding, world_size: int) -> str:
    """What to do about a finding on `world_size` ranks; "" for a healthy one.

    >>> cure(Finding((Disease.PARTIAL,), (0, 1)), world_size=2)
    'all-reduce (sum) the gradient over the ranks in backward: each rank holds one term of the sum'
    """
    parts = [_SENTENCES[disease](finding, world_size) for disease in finding.diseases if disease not in HEALTHY]
    if finding.diseases[-2:] == (Disease.PARTIAL, Disease.SCALED) and finding.k_name:
        parts[-2:] = [_scaled_partial(finding)]
    return "; then ".join(part for part in parts if part)


def _list(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _scaled(finding: Finding, world_size: int) -> str:
    if finding.k_name == "world_size":
        return (
            "divide by world_size, or better find the sum that should not be there: the backward of a gather or an "
            "all-reduce that adds up the same loss of every rank must hand on this rank's own part instead"
        )
    if finding.k_name == "1/world_size":
        return (
            "multiply by world_size, or better find the mean that should be a sum: DDP, ReduceOp.AVG and a loss "
            "divided by world_size all average (here an all-reduce (sum) gives the reference, too)"
        )
    if finding.k == -1:
        return "turn the sign round: somewhere in backward a minus is missing"
    if abs(finding.k) > 1:
        k = number(finding.k)
        return (
            f"divide by {k} and find what counts {k} times: a second backward, a parameter used or registered twice, "
            "a gradient reduced over too many groups, a loss scale that was not taken out"
        )
    inverse = number(1 / finding.k)
    return f"multiply by {inverse} and find what was averaged or left out: a loss divided by too many tokens or ranks"


def _scaled_partial(finding: Finding) -> str:
    if finding.k_name == "world_size":
        return (
            "all-reduce (mean) the gradient over the ranks: each rank's loss is the mean over its own part of the "
            "batch (as in DDP), or one loss that every rank computes was counted once per rank"
        )
    return (
        "all-reduce (sum) the gradient over the ranks and multiply by world_size: each rank's part was already divided "
        "by it"
    )


def _own_slice(finding: Finding, world_size: int) -> str:
    return (
        f"all-gather the slices along dim {finding.dim} in backward (an all-reduce (sum) gives the same, since all "
        "else is zero)"
    )


def _wrong_shard(finding: Finding, world_size: int) -> str:
    return (
        f"let rank r take piece r along dim {finding.dim}: check the rank that is used as index, and the split's sizes"
    )


def _missing(finding: Finding, world_size: int) -> str:
    everyone = len(finding.ranks) == world_size
    where = "all ranks" if everyone else _list(finding.ranks)
    tail = "" if everyone else ", or all-reduce (sum) the gradient over the ranks if only some of them can compute it"
    return (
        f"find where the graph is cut on {where}: a collective without autograd, detach(), no_grad(), an unused "
        f"parameter{tail}"
    )


def _disagree(finding: Finding, world_size: int) -> str:
    everyone = len(finding.ranks) == world_size
    start = "look at every rank" if everyone else f"look at {_list(finding.ranks)} only"
    if Disease.SCALED in finding.diseases:
        return start
    return (
        f"{start}: replicated parameters need equal values (broadcast from rank 0), equal inputs, and the same "
        "collectives on all ranks"
    )


def _always(text: str) -> Callable[[Finding, int], str]:
    return lambda finding, world_size: text


_SENTENCES = {
    Disease.SCALED: _scaled,
    Disease.PARTIAL: _always(
        "all-reduce (sum) the gradient over the ranks in backward: each rank holds one term of the sum"
    ),
    Disease.OWN_SLICE: _own_slice,
    Disease.WRONG_SHARD: _wrong_shard,
    Disease.MISSING: _missing,
    Disease.STALE: _always(
        "wait for the collective (work.wait()) and use its result before the optimizer steps: this is the gradient of "
        "the step before"
    ),
    Disease.ACCUMULATED: _always("call optimizer.zero_grad() before backward: the step before is still in the sum"),
    Disease.UNEXPECTED: _always(
        "freeze the parameter on the ranks too (requires_grad_(False)), or leave it out of the loss: an optimizer "
        "moves whatever has a gradient, and decays even on a zero one"
    ),
    Disease.NOT_FINITE: lambda finding, world_size: (
        f"look at {_list(finding.ranks)}: an overflow (scale the loss, or use bfloat16), a division by zero, or a "
        "buffer of torch.empty that was read before its collective had filled it"
    ),
    Disease.WRONG_SHAPE: _always(
        "give every rank the whole gradient, or shards along one dimension that add up to the whole; on a mesh with "
        "more dimensions, diagnose the ranks of one group at a time"
    ),
    Disease.RANKS_DISAGREE: _disagree,
    Disease.WRONG: _always(
        "no collective cures this: compare the input, the loss and the formula of backward with the reference"
    ),
    Disease.TOO_SMALL: _always(
        "compare in float64, where rounding is smaller; or, if this gradient is zero by construction (as for the bias "
        "of attention's keys), say so with atol"
    ),
}
