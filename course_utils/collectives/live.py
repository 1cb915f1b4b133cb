"""Timing a collective on live ranks: what `time_collective` does. Needs torch.

Every rank fills its tensor with small whole numbers that depend on the rank and the position, so that every sum is
exact in float32 and a slice in the wrong place is noticed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .bandwidth import Timing, Timings, known_operation
from .costs import whole

ELEMENT = 4  # bytes of a float32


def time_on_ranks(
    op: str | Callable, sizes: Sequence[int], warmup: int, repeats: int, operation: str, group
) -> Timings:
    """See `course_utils.collectives.time_collective`."""
    if isinstance(op, str):
        operation = known_operation(op)
    elif not callable(op):
        raise TypeError(f"op={op!r}: the name of an operation or a function was expected, not a {type(op).__name__}")
    known_operation(operation)
    warmup, repeats = whole("warmup", warmup), whole("repeats", repeats, least=1)
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "time_collective() times the ranks that call it, and no process group is up here: "
            "launch(time_collective, ...) calls it on ranks"
        )
    ranks = dist.get_world_size(group)
    counts = [_elements(size, operation, ranks) for size in sizes]
    # one trial at a time: its tensors are gone before the next size is made
    return Timings(tuple(_timing(_Trial(op, operation, count, group), count, warmup, repeats) for count in counts))


def _elements(size: int, operation: str, ranks: int) -> int:
    slices = 1 if operation in ("all_reduce", "broadcast", "reduce") else ranks
    count = whole("size", size) // ELEMENT // slices * slices
    if count == 0:
        what = "one float32" if slices == 1 else f"one float32 for each of {ranks} ranks"
        raise ValueError(f"size={size} bytes is less than {what}: at least {ELEMENT * slices} were expected")
    return count


class _Trial:
    """One collective on tensors of `count` elements: fill, call, check."""

    def __init__(self, op: str | Callable, operation: str, count: int, group) -> None:
        self.op, self.operation, self.group = op, operation, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.pattern = torch.arange(count, dtype=torch.float32).remainder_(251)
        self.in_place = operation in ("all_reduce", "broadcast", "reduce")
        self.input = torch.empty_like(self._slice() if operation == "all_gather" else self.pattern)
        if self.in_place:
            self.output = self.input
        else:
            self.output = torch.empty_like(self._slice() if operation == "reduce_scatter" else self.pattern)

    def _slice(self) -> torch.Tensor:
        """This rank's part of the pattern."""
        return self.pattern.chunk(self.ranks)[self.rank]

    def fill(self) -> None:
        """Fresh numbers, the pattern plus the rank: an all-reduce in place has replaced them."""
        self.output.fill_(-1.0)
        self.input.copy_(self._slice() if self.operation == "all_gather" else self.pattern).add_(self.rank)

    def expected(self) -> torch.Tensor:
        """What this rank should hold afterwards."""
        ranks, total = range(self.ranks), sum(range(self.ranks))
        if self.operation == "all_reduce" or (self.operation == "reduce" and self.rank == 0):
            return self.ranks * self.pattern + total
        if self.operation == "reduce_scatter":
            return self.ranks * self._slice() + total
        if self.operation == "all_gather":
            return torch.cat([part + r for r, part in zip(ranks, self.pattern.chunk(self.ranks))])
        if self.operation == "all_to_all":
            return torch.cat([self._slice() + r for r in ranks])
        return self.pattern  # broadcast

    def call(self) -> torch.Tensor:
        """The collective, once; gives what holds the result."""
        if isinstance(self.op, str):
            result = _torch_function(self.op, self.group)(self.output, self.input)
        elif self.operation == "all_reduce":
            result = self.op(self.input)
        else:
            result = self.op(self.input, 0) if self.in_place else self.op(self.output, self.input)
        return result if isinstance(result, torch.Tensor) else self.output

    def wrong(self, result: torch.Tensor) -> int:
        """Elements of this rank's result that are not as they should be."""
        if self.operation == "reduce" and self.rank != 0:
            return 0  # only the root's result is defined
        expected = self.expected()
        return int((result != expected).sum()) if result.shape == expected.shape else expected.numel()


def _torch_function(operation: str, group) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """torch's own, called with (output, input), which are the same tensor where it works in place."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch before 2.13
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": lambda output, _: dist.all_reduce(output, group=group),
        "broadcast": lambda output, _: dist.broadcast(output, group=group, group_src=0),
        "reduce": lambda output, _: dist.reduce(output, group=group, group_dst=0),
        "reduce_scatter": lambda output, input: scatter(output, input, group=group),
        "all_gather": lambda output, input: gather(output, input, group=group),
        "all_to_all": lambda output, input: dist.all_to_all_single(output, input, group=group),
    }[operation]


def _timing(trial: _Trial, count: int, warmup: int, repeats: int) -> Timing:
    group = trial.group
    on_gpu = trial.input.is_cuda
    clock = _gpu_seconds if on_gpu else _cpu_seconds
    for _ in range(warmup):
        trial.fill()
        trial.call()
    times, result = [], trial.output
    for _ in range(repeats):
        trial.fill()
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier(group)
        seconds, result = clock(trial.call)
        times.append(seconds)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    wrong = torch.tensor(trial.wrong(result))
    dist.all_reduce(wrong, group=group)
    times = slowest.tolist()
    median = statistics.median(times)
    return Timing(trial.operation, trial.ranks, count * ELEMENT, median, min(times), max(times), int(wrong))


def _cpu_seconds(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _gpu_seconds(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Between two events on the current stream, which a collective makes wait for it. Not yet run on a GPU."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3, result
