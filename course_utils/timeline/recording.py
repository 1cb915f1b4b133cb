"""Recording what a live rank does, as a `Timeline`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .value import Event, Timeline


class Recorder:
    """Notes what this rank does: `with recorder("compute", "layer 1"): …` times a block. `recording()` makes one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []

    @contextmanager
    def __call__(self, kind: str, name: str = "") -> Iterator[None]:
        """Time the block; it is noted when it ends, by an error too. Blocks may nest.

        On a GPU the block ends when its kernels are enqueued: end it with `torch.cuda.synchronize()`.

        Raises:
            ValueError: the kind is none of `KINDS` (said before the block runs).
        """
        Event(self.rank, 0.0, 0.0, kind, name)
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, name, start, time.monotonic())

    def add(self, kind: str, name: str, start: float, stop: float) -> None:
        """Note what was timed elsewhere, in seconds of `time.monotonic`: an asynchronous collective, say."""
        self.events.append(Event(self.rank, start, stop, kind, name))

    def timeline(self) -> Timeline:
        """What has been noted so far, in seconds of `time.monotonic`: what a rank returns."""
        return Timeline(tuple(self.events))


_open: list[Recorder] = []


@contextmanager
def recording(rank: int | None = None) -> Iterator[Recorder]:
    """Record what this rank does, as a `Timeline`.

    Args:
        rank: whose events these are; None: the rank of the default process group, or else of the variable RANK, or 0.

    >>> from course_utils.timeline import merge, recording
    >>> def step():
    ...     with recording() as recorder:
    ...         with recorder("compute", "layer 1"):
    ...             sum(range(1000))
    ...     return recorder.timeline()
    >>> [(event.rank, event.kind, event.name) for event in merge([step()])]      # on ranks: merge(launch(step, ...))
    [(0, 'compute', 'layer 1')]
    """
    recorder = Recorder(_rank() if rank is None else rank)
    _open.append(recorder)
    try:
        yield recorder
    finally:
        _open.remove(recorder)


def note(kind: str, name: str, start: float, stop: float) -> None:
    """Add an event to every recording that is open in this process: for code that knows when a collective ran.

    Times are seconds of `time.monotonic`; nothing happens where nobody records.

    >>> with recording(rank=3) as recorder:
    ...     note("communication", "all-reduce", start=1.0, stop=2.0)
    >>> recorder.timeline().seconds("communication")
    {3: 1.0}
    """
    for recorder in list(_open):
        recorder.add(kind, name, start, stop)


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")  # not imported here: without it there is no group either
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", 0))
