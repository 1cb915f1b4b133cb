"""Collectives: the algorithms step by step, what they cost, and how long they take.

    costs       steps and bytes of each operation and algorithm; seconds on a link of α and β; where two cross
    simulate    all-reduce algorithms on numpy arrays, step by step
    bandwidth   algorithm and bus bandwidth by nccl-tests' definitions; `Timings`, the value of a measurement
    fitting     α and β from measured times
    live        timing on live ranks; the only one that needs torch

`torchrun --standalone --nproc-per-node 2 -m course_utils.collectives` prints the table that nccl-tests would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import costs, simulate
from .bandwidth import (
    OPERATIONS,
    Timing,
    Timings,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_factor,
    copy_bandwidth,
)
from .costs import Cost, crossover
from .fitting import Fit, fit

__all__ = [
    "OPERATIONS",
    "Cost",
    "Fit",
    "Timing",
    "Timings",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "bus_factor",
    "copy_bandwidth",
    "costs",
    "crossover",
    "fit",
    "simulate",
    "time_collective",
]


def time_collective(
    op: str | Callable,
    sizes: Sequence[int],
    warmup: int = 2,
    repeats: int = 7,
    operation: str = "all_reduce",
    group=None,
) -> Timings:
    """Time a collective on the ranks that call this, the way it has to be done. Every rank gets the same table.

    For each size: `warmup` calls that don't count, then `repeats` times a barrier and one call on fresh numbers. Of
    each repetition the slowest rank's time counts, and of the repetitions the median. On a GPU the time is that between
    two events on the stream (written for GPUs and NCCL, not yet run on them). The last result is checked on all ranks.

    Args:
        op: one of `OPERATIONS`, for torch's own; or a function that does the work of `operation`, called as torch's is:
            `op(tensor)` for an all-reduce, in place or returning the sum; `op(output, input)` for reduce-scatter,
            all-gather and all-to-all; `op(tensor, root)` for broadcast and reduce, with root 0.
        sizes: bytes, as nccl-tests counts them (see `costs`), of float32; rounded down to what divides evenly.
        operation: what a function `op` does.
        group: a process group; None: the default one, on the current default device.

    Raises:
        TypeError, ValueError: an operation is unknown, a size is no whole number or less than one element for each
            slice, warmup is below 0, or repeats below 1.
        RuntimeError: no process group is up here.

    Source: the definitions of nccl-tests (doc/PERFORMANCE.md); as with its `-a 3`, the slowest rank's time counts.

    >>> from course_utils import launch
    >>> from course_utils.collectives import time_collective
    >>> table = launch(time_collective, "all_reduce", [1024, 4096], repeats=3, world_size=2)[0]
    >>> table.sizes, [row.wrong for row in table]
    ((1024, 4096), [0, 0])
    """
    from .live import time_on_ranks

    return time_on_ranks(op, sizes, warmup, repeats, operation, group)
