"""The values `Event` and `Timeline`: what each rank did when, its sums and its parts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from . import views

KINDS = ("compute", "communication", "waiting", "loading", "optimizer")
"""What a rank does with its time; the colours and hatches of these are in `course_utils.plots`."""


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
        return views.text(self, width)

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
        return views.trace(self)

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
