"""Views of a `Timeline`: a picture in characters, and a file for Perfetto. Nothing here computes a value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .value import Event, Timeline

_MARKS = {"compute": "#", "communication": "/", "waiting": ".", "loading": "\\", "optimizer": "x"}


def text(timeline: Timeline, width: int) -> str:
    """See `Timeline.text`."""
    if not isinstance(width, int) or width < 20:
        raise ValueError(f"width={width!r}: at least 20 characters were expected")
    if not timeline.events:
        return "no events"
    margin = len(f"rank {timeline.ranks[-1]}") + 2
    lines = []
    for rank, part in timeline.by_rank().items():
        label = f"rank {rank}".ljust(margin)
        for row in part.rows():
            lines.append((label + _line(row, timeline, width)).rstrip())
            label = " " * margin
    left, right = _readable(0.0), _readable(timeline.makespan)
    lines.append(" " * margin + left + right.rjust(width - len(left)))
    return "\n".join([*lines, ", ".join(f"{_MARKS[kind]} {kind}" for kind in timeline.kinds)])


def _line(row: Timeline, timeline: Timeline, width: int) -> str:
    """One character for each slot of time: of the event that fills most of it."""
    slot = (timeline.makespan or 1.0) / width
    share: list[dict[str, float]] = [{} for _ in range(width)]
    for event in row:
        first, last = ((at - timeline.start) / slot for at in (event.start, event.stop))
        for index in range(min(int(first), width - 1), min(math.ceil(last), width)):
            filled = min(last, index + 1) - max(first, index)
            share[index][event.kind] = share[index].get(event.kind, 0.0) + filled
    return "".join(_MARKS[max(kinds, key=kinds.get)] if sum(kinds.values()) > 0.5 else " " for kinds in share)


def trace(timeline: Timeline) -> dict:
    """See `Timeline.to_trace`."""
    described, complete, tid = [], [], 0
    for rank, part in timeline.by_rank().items():
        described.append(_metadata("process_name", rank, 0, name=f"rank {rank}"))
        described.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        for kind in part.kinds:
            for lane in _lanes(event for event in part if event.kind == kind):
                tid += 1
                described.append(_metadata("thread_name", rank, tid, name=kind))
                described.append(_metadata("thread_sort_index", rank, tid, sort_index=tid))
                for event in lane:
                    ts, end = (round(1e6 * (at - timeline.start), 3) for at in (event.start, event.stop))
                    what = {"name": event.name or kind, "cat": kind, "ph": "X", "ts": ts, "dur": end - ts}
                    complete.append({**what, "pid": rank, "tid": tid})
    return {"displayTimeUnit": "ms", "traceEvents": described + complete}


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


def _readable(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 or seconds == 0 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * scale:.4g} {unit}"
