"""The one view of a `Timeline`."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_utils.timeline import Timeline

from .style import COLOURS, HATCHES, INK, figure_of, finished


def gantt(timeline: Timeline, title: str, until: float | None = None) -> Figure:
    """A row for each rank, a bar for each event; where a rank communicates behind other work, in the row's lower half.

    Time starts at 0, in seconds, ms or µs. A bar that is wide enough bears its event's name.

    Args:
        until: seconds at which the axis ends, so that several figures can be compared; None: where the timeline ends.

    >>> from course_utils.timeline import Event, Timeline
    >>> figure = gantt(Timeline((Event(0, 0, 2, "compute", "layer 1"), Event(0, 1, 3, "communication"))), "It overlaps")
    >>> figure.axes[0].get_title(), figure.axes[0].get_xlabel()
    ('It overlaps', 'time (s)')
    """
    figure, axes = figure_of(10, 0.55 * len(timeline.ranks) + 1.6)
    span = timeline.makespan if until is None else until
    unit, scale = _time_unit(span)
    for place, part in enumerate(timeline.by_rank().values()):
        rows = part.rows()
        height = 0.8 / len(rows)
        for row, events in enumerate(rows):
            for event in events:
                left, width = (event.start - timeline.start) * scale, event.seconds * scale
                _bar(axes, left, place - 0.4 + row * height, width, height, event.kind)
                if event.name and width > 0.0095 * len(event.name) * (span * scale):
                    _bar_name(axes, left + width / 2, place - 0.4 + (row + 0.5) * height, event.name, event.kind)
    axes.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in timeline.ranks])
    axes.set(xlim=(0, span * scale or 1), ylim=(len(timeline.ranks) - 0.5, -0.5))
    axes.set_xlabel(f"time ({unit})")
    axes.set_title(title)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [_bar_patch(kind) for kind in timeline.kinds]
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(handles, timeline.kinds, frameon=False, fontsize=9, handlelength=2.4, handleheight=1.2, **place)
    return finished(figure)


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 or seconds == 0 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)


def _bar(axes: Axes, x: float, y: float, width: float, height: float, kind: str) -> None:
    style = {"facecolor": COLOURS[kind], "hatch": HATCHES[kind], "edgecolor": "white", "linewidth": 0.8}
    axes.add_patch(Rectangle((x, y), width, height, **style))


def _bar_patch(kind: str) -> Rectangle:
    return Rectangle((0, 0), 1, 1, facecolor=COLOURS[kind], hatch=HATCHES[kind], edgecolor="white")


def _bar_name(axes: Axes, x: float, y: float, name: str, kind: str) -> None:
    dark = kind == "compute"
    box = {"facecolor": COLOURS[kind], "edgecolor": "none", "pad": 1} if HATCHES[kind] else None
    axes.text(x, y, name, ha="center", va="center", fontsize=8, color="white" if dark else INK, bbox=box)
