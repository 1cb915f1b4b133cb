"""Timeline: what each rank did when, from a simulator, a formula or a live run.

A `Timeline` is a tuple of `Event`s `(rank, start, stop, kind, name)`, in seconds. Simulators produce it, and so does
`recording()` in a live rank, by `time.monotonic`, which all processes of one machine share (POSIX, CLOCK_MONOTONIC);
`merge` puts the ranks' parts together. It is shown by `str()` and a notebook as text, by `course_utils.plots.gantt` as
a figure, and by https://ui.perfetto.dev once `write_trace` has written it in Chrome's Trace Event Format.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

KINDS = ("compute", "communication", "waiting", "loading", "optimizer")
"""What a rank does with its time; the colours and hatches of these are in `course_utils.plots`."""

_MARKS = {"compute": "#", "communication": "/", "waiting": ".", "loading": "\\", "optimizer": "x"}


@dataclass(frozen=True)
class Event:
    """One thing that one rank did.

    Attributes:
        rank: global rank.
        start, stop: seconds, of one clock for all events of a timeline.
        kind: one of `KINDS`.
        name: what it was, for the reader: "layer 1", "all-reduce".

    Raises:
        TypeError: rank is no int, a time no number, or the name no text.
        ValueError: rank is negative, a time is not finite, it stops before it starts, or the kind is unknown.

    >>> Event(0, 0.5, 2.0, "compute", "layer 1").seconds
    1.5
    """

    rank: int
    start: float
    stop: float
    kind: str
    name: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise TypeError(f"rank={self.rank!r}: a whole number was expected, not a {type(self.rank).__name__}")
        if self.rank < 0:
            raise ValueError(f"rank={self.rank}: at least 0 was expected")
        for name in ("start", "stop"):
            object.__setattr__(self, name, _seconds(name, getattr(self, name)))
        if self.stop < self.start:
            raise ValueError(f"start={self.start:g}, stop={self.stop:g}: an event can't stop before it starts")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is none of {', '.join(KINDS)}")
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r}: a text was expected, not a {type(self.name).__name__}")

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start


@dataclass(frozen=True, repr=False)
class Timeline:
    """What ranks did, as events in order of rank and start, whatever order they were given in.

    Raises:
        TypeError: one of the events is no `Event`.

    >>> step = Timeline((Event(0, 0, 3, "compute"), Event(0, 3, 4, "communication"), Event(1, 0, 1, "compute")))
    >>> step.makespan, step.busy()
    (4.0, {0: 1.0, 1: 0.25})
    >>> print(step.text(width=20))
    rank 0  ###############/////
    rank 1  #####
            0 s              4 s
    # compute, / communication
    """

    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        events = tuple(self.events)
        for event in events:
            if not isinstance(event, Event):
                raise TypeError(f"a Timeline holds Events, and was given a {type(event).__name__}: {event!r}")
        object.__setattr__(self, "events", tuple(sorted(events, key=lambda e: (e.rank, e.start, e.stop))))

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    # ------------------------------------------------------------ parts of it

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have an event, in order."""
        return tuple(sorted({event.rank for event in self.events}))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that occur, in the order of `KINDS`."""
        present = {event.kind for event in self.events}
        return tuple(kind for kind in KINDS if kind in present)

    def only(self, keep: Callable[[Event], bool]) -> Timeline:
        """The events for which `keep(event)` is true: `timeline.only(lambda event: event.rank == 0)`.

        Raises:
            TypeError: `keep` is no function.
        """
        if not callable(keep):
            raise TypeError(f"only({keep!r}): a function from an event to true or false was expected")
        return Timeline(tuple(event for event in self.events if keep(event)))

    def by_rank(self) -> dict[int, Timeline]:
        """Each rank's own events."""
        return {rank: self.only(lambda event, rank=rank: event.rank == rank) for rank in self.ranks}

    # ------------------------------------------------------------ times

    @property
    def start(self) -> float:
        """When the first event starts, in seconds; 0 if there is none."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def stop(self) -> float:
        """When the last event stops, in seconds; 0 if there is none."""
        return max((event.stop for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last stop."""
        return self.stop - self.start

    def seconds(self, *kinds: str) -> dict[int, float]:
        """For each rank the seconds in which it does one of these kinds (all kinds, if none is named).

        Events that overlap count once.

        >>> Timeline((Event(0, 0, 2, "compute"), Event(0, 1, 3, "communication"))).seconds()
        {0: 3.0}
        """
        wanted = _known(kinds)
        return {rank: _length(_union(part, wanted)) for rank, part in self.by_rank().items()}

    def busy(self, *kinds: str) -> dict[int, float]:
        """For each rank the share of the makespan in which it does one of these kinds (any but waiting, if none is).

        >>> Timeline((Event(0, 0, 1, "waiting"), Event(0, 1, 4, "compute"))).busy()
        {0: 0.75}
        """
        wanted = _known(kinds) if kinds else [kind for kind in KINDS if kind != "waiting"]
        return {rank: spent / self.makespan if self.makespan else 0.0 for rank, spent in self.seconds(*wanted).items()}

    def idle(self, *kinds: str) -> dict[int, float]:
        """For each rank the share of the makespan that `busy` leaves: it waits, or has no event.

        >>> Timeline((Event(0, 0, 1, "waiting"), Event(0, 1, 4, "compute"))).idle()
        {0: 0.25}
        """
        return {rank: 1.0 - share for rank, share in self.busy(*kinds).items()}

    def overlap(self, first: str = "compute", second: str = "communication") -> dict[int, float]:
        """For each rank the seconds in which it does both kinds at once.

        >>> Timeline((Event(0, 0, 2, "compute"), Event(0, 1, 3, "communication"))).overlap()
        {0: 1.0}
        """
        one, other = self.seconds(first), self.seconds(second)
        return {rank: one[rank] + other[rank] - both for rank, both in self.seconds(first, second).items()}

    def shift(self, seconds: float) -> Timeline:
        """The same, so much later (earlier, where it is negative).

        >>> Timeline((Event(0, 1, 2, "compute"),)).shift(-1).start
        0.0
        """
        by = _seconds("seconds", seconds)
        return Timeline(tuple(replace(event, start=event.start + by, stop=event.stop + by) for event in self.events))

    # ------------------------------------------------------------ views

    def to_frame(self):
        """A pandas DataFrame with one line per event: rank, start, stop, seconds, kind, name."""
        import pandas as pd

        columns = ("rank", "start", "stop", "seconds", "kind", "name")
        return pd.DataFrame([[getattr(event, name) for name in columns] for event in self.events], columns=columns)

    def text(self, width: int = 80) -> str:
        """A picture in characters, one line per rank; where kinds overlap, a second line shows the communication.

        Raises:
            ValueError: width is below 20.
        """
        if not isinstance(width, int) or width < 20:
            raise ValueError(f"width={width!r}: at least 20 characters were expected")
        if not self.events:
            return "no events"
        margin = len(f"rank {self.ranks[-1]}") + 2
        lines = []
        for rank, part in self.by_rank().items():
            label = f"rank {rank}".ljust(margin)
            for row in part.rows():
                lines.append((label + self._line(row, width)).rstrip())
                label = " " * margin
        left, right = _readable(0.0), _readable(self.makespan)
        lines.append(" " * margin + left + right.rjust(width - len(left)))
        return "\n".join([*lines, ", ".join(f"{_MARKS[kind]} {kind}" for kind in self.kinds)])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def rows(self) -> list[Timeline]:
        """Of one rank: what is drawn in one row; two, the second for communication, where that overlaps the rest."""
        other, communication = (self.only(lambda e, c=c: (e.kind == "communication") == c) for c in (False, True))
        together = sum(_length(_union(part, KINDS)) for part in (other, communication))
        if together > _length(_union(self, KINDS)) + 1e-9 * (self.makespan or 1):
            return [other, communication]
        return [self]

    def _line(self, part: Timeline, width: int) -> str:
        """One character for each slot of time: of the event that fills most of it."""
        slot = (self.makespan or 1.0) / width
        share: list[dict[str, float]] = [{} for _ in range(width)]
        for event in part:
            first, last = ((at - self.start) / slot for at in (event.start, event.stop))
            for index in range(min(int(first), width - 1), min(math.ceil(last), width)):
                filled = min(last, index + 1) - max(first, index)
                share[index][event.kind] = share[index].get(event.kind, 0.0) + filled
        return "".join(_MARKS[max(kinds, key=kinds.get)] if sum(kinds.values()) > 0.5 else " " for kinds in share)

    def to_trace(self) -> dict:
        """The timeline in Chrome's Trace Event Format (JSON object format), which Perfetto reads.

        A rank is a process, and each kind of work in it a thread, two where events of a kind overlap, because the
        events of one thread may not cross. Complete events ("ph": "X"), times in microseconds from the first start.

        Source: "Trace Event Format", Chromium project, sections "JSON Object Format", "Complete Events", "Metadata
        Events".

        >>> trace = Timeline((Event(1, 5.0, 5.5, "compute", "layer 1"),)).to_trace()
        >>> trace["traceEvents"][-1]
        {'name': 'layer 1', 'cat': 'compute', 'ph': 'X', 'ts': 0.0, 'dur': 500000.0, 'pid': 1, 'tid': 1}
        """
        described, complete, tid = [], [], 0
        for rank, part in self.by_rank().items():
            described.append(_metadata("process_name", rank, 0, name=f"rank {rank}"))
            described.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
            for kind in part.kinds:
                for lane in _lanes(event for event in part if event.kind == kind):
                    tid += 1
                    described.append(_metadata("thread_name", rank, tid, name=kind))
                    described.append(_metadata("thread_sort_index", rank, tid, sort_index=tid))
                    for event in lane:
                        ts, end = (round(1e6 * (at - self.start), 3) for at in (event.start, event.stop))
                        what = {"name": event.name or kind, "cat": kind, "ph": "X", "ts": ts, "dur": end - ts}
                        complete.append({**what, "pid": rank, "tid": tid})
        return {"displayTimeUnit": "ms", "traceEvents": described + complete}

    def write_trace(self, path: str | os.PathLike) -> Path:
        """Write `to_trace()` as a JSON file, to be opened at https://ui.perfetto.dev; returns its path.

        Raises:
            OSError: the file can't be written.
        """
        file = Path(path)
        file.write_text(json.dumps(self.to_trace(), ensure_ascii=False), encoding="utf-8")
        return file


def merge(parts: Iterable[Timeline]) -> Timeline:
    """One timeline of many, starting at 0: of all ranks, as in `merge(launch(step))`.

    The parts must have one clock: those of live ranks on one machine have, those of different machines have not.

    Raises:
        TypeError: one of the parts is no `Timeline`.

    >>> merge([Timeline((Event(0, 7, 8, "compute"),)), Timeline((Event(1, 9, 10, "compute"),))]).stop
    3.0
    """
    parts = list(parts)
    for i, part in enumerate(parts):
        if not isinstance(part, Timeline):
            kind = "None" if part is None else f"a {type(part).__name__}"
            raise TypeError(
                f"merge() needs the Timeline of each rank, and item {i} is {kind}: "
                "end the function that you launch with `return recorder.timeline()`"
            )
    whole = Timeline(tuple(event for part in parts for event in part))
    return whole.shift(-whole.start)


# ---------------------------------------------------------------- recording a live run


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


# ---------------------------------------------------------------- intervals


def _union(events: Iterable[Event], kinds: Iterable[str]) -> list[list[float]]:
    """The times covered by events of these kinds, as intervals that don't overlap."""
    merged: list[list[float]] = []
    for event in sorted((e for e in events if e.kind in kinds), key=lambda e: e.start):
        if merged and event.start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], event.stop)
        else:
            merged.append([event.start, event.stop])
    return merged


def _length(intervals: list[list[float]]) -> float:
    return sum(stop - start for start, stop in intervals)


def _lanes(events: Iterable[Event]) -> list[list[Event]]:
    """As few lists as possible in none of which two events overlap."""
    lanes: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start, e.stop)):
        lane = next((lane for lane in lanes if lane[-1].stop <= event.start), None)
        if lane is None:
            lanes.append([event])
        else:
            lane.append(event)
    return lanes


def _metadata(what: str, pid: int, tid: int, **args) -> dict:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _known(kinds: Iterable[str]) -> list[str]:
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is none of {', '.join(KINDS)}")
    return list(kinds) or list(KINDS)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r}: seconds were expected, not a {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value}: a finite number of seconds was expected")
    return float(value)


def _readable(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 or seconds == 0 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * scale:.4g} {unit}"
