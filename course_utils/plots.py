"""Every matplotlib figure of the course, and the colours that mean one thing through all of it.

A function here takes values that a cell has computed and returns a `Figure`; it computes nothing itself. What a figure
shows is asserted in the notebook, because nbval does not look at pictures. The colours are those of Okabe and Ito
("Color Universal Design", 2008), which the colour-blind can tell apart; a hatch or a word says the same in black and
white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

if TYPE_CHECKING:
    from course_utils.memory import Memory

if TYPE_CHECKING:
    from course_utils.collectives import Timings
    from course_utils.collectives.simulate import Run, Step
    from course_utils.timeline import Timeline

# What a rank does with its time, and the traffic between ranks: colour and hatch of each kind.
COMPUTE, COMMUNICATION, WAITING, LOADING, OPTIMIZER = "#0072B2", "#E69F00", "#BBBBBB", "#009E73", "#CC79A7"
COLOURS = {
    "compute": COMPUTE,
    "communication": COMMUNICATION,
    "waiting": WAITING,
    "loading": LOADING,
    "optimizer": OPTIMIZER,
}
HATCHES = {"compute": "", "communication": "///", "waiting": "...", "loading": "\\\\\\", "optimizer": "xx"}

HEALTHY, SICK = "#1a6b35", "#a8201a"  # as in the doctor's tables
INK, FAINT = "#222222", "#dddddd"


def sharded_module(world_size: int, tokens: int) -> Figure:
    """The module of notebook 05 on `world_size` ranks: `tokens` are cut, cond and weight whole, the loss on every rank.

    >>> sharded_module(world_size=4, tokens=12).axes[0].get_title().startswith("Only the tokens")
    True
    """
    figure, axes = _figure(9, 0.72 * world_size + 1.5)
    per_rank = tokens // world_size
    for rank in range(world_size):
        y = world_size - rank - 1
        axes.text(-0.2, y + 0.3, f"rank {rank}", ha="right", va="center", color=INK)
        _token_row(axes, 0, y, tokens, range(rank * per_rank, (rank + 1) * per_rank), 2.4)
        _box(axes, 2.7, y, 1.5, "cond, weight", "white")
        _box(axes, 4.5, y, 1.2, "multiply", COMPUTE, text="white")
        _token_row(axes, 6.6, y, tokens, range(tokens), 2.4)
        _box(axes, 9.3, y, 0.9, "loss", COMPUTE, text="white")
        for start, stop in ((2.42, 2.68), (4.22, 4.48), (5.72, 5.98), (6.38, 6.58), (9.02, 9.28)):
            axes.annotate("", (stop, y + 0.3), (start, y + 0.3), arrowprops={"arrowstyle": "->", "color": INK})
    axes.add_patch(
        Rectangle((6.0, -0.15), 0.36, world_size - 0.1, facecolor=COMMUNICATION, hatch="///", edgecolor="white")
    )
    for x, label in (
        (1.2, "its slice of the tokens"),
        (3.45, "a copy of each"),
        (6.18, "gather"),
        (7.9, "the whole output"),
        (9.75, "the whole loss"),
    ):
        axes.text(x, -0.55, label, ha="center", va="center", fontsize=9, color=INK)
    axes.set_title("Only the tokens are cut; every rank ends with the whole output and the whole loss")
    axes.set(xlim=(-1.1, 10.4), ylim=(-0.85, world_size))
    axes.axis("off")
    return _finished(figure)


def gradient_map(ratios: Mapping[str, Sequence[Sequence[float]]], title: str) -> Figure:
    """For each name a grid, ranks × tokens: what a rank holds of a token's gradient, as a multiple of the right one.

    >>> figure = gradient_map({"cut": [[2.0, 0.0], [0.0, 2.0]]}, "Each rank has its own token only, twice")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['2', '0', '0', '2']
    """
    figure, grid = plt.subplots(len(ratios), 1, figsize=(9, 1.42 * len(ratios) + 0.8), sharex=True, squeeze=False)
    for axes, (name, rows) in zip(grid[:, 0], ratios.items(), strict=True):
        for rank, row in enumerate(rows):
            for token, ratio in enumerate(row):
                _ratio_cell(axes, token, rank, ratio)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set(xlim=(0, len(rows[0])), ylim=(len(rows), 0), ylabel="rank")
        axes.set_xticks([token + 0.5 for token in range(len(rows[0]))], range(len(rows[0])))
        axes.set_yticks([rank + 0.5 for rank in range(len(rows))], range(len(rows)))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    grid[-1, 0].set_xlabel("token")
    figure.suptitle(title, fontsize=12)
    return _finished(figure)


def training_curves(
    losses: Mapping[str, Sequence[float]], drift: Mapping[str, Sequence[float]], titles: tuple[str, str]
) -> Figure:
    """Left the loss that each run logs, by step; right how far apart the ranks' parameters are, by step.

    Args:
        losses: name -> loss at every step (no unit).
        drift: name -> distance between two ranks' copies of a parameter as a share of its size, at every step; the
            names are among those of `losses`.
        titles: the finding of either half.

    >>> figure = training_curves({"a": [2.0, 1.0]}, {"a": [0.1, 0.2]}, ("It falls", "It grows"))
    >>> [axes.get_title() for axes in figure.axes]
    ['It falls', 'It grows']
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    styles = {name: _LINES[index % len(_LINES)] for index, name in enumerate(losses)}
    for axes, curves, title in ((left, losses, titles[0]), (right, drift, titles[1])):
        for index, (name, values) in enumerate(curves.items()):
            axes.plot(range(1, len(values) + 1), values, label=name, markevery=(2 * index, 10), **styles[name])
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5)
    left.set(ylabel="loss (no unit, logarithmic)", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    right.set_ylabel("distance of the ranks' weights / their size")
    return _finished(figure)


# Lines of a figure that compares runs differ in lightness, dash and marker as well: these are no kinds of work, so they
# take none of the colours above.
_LINES = (
    {"color": "#999999", "linewidth": 5, "solid_capstyle": "round"},
    {"color": "#a8201a", "linestyle": "-", "marker": "o", "markersize": 5},
    {"color": "#56351e", "linestyle": "--", "marker": "s", "markersize": 5},
    {"color": "#7a5195", "linestyle": ":", "marker": "^", "markersize": 6, "linewidth": 2},
    {"color": "#1a6b35", "linestyle": "-", "marker": "D", "markersize": 4},
)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(width, height))


def _finished(figure: Figure) -> Figure:
    """Lay out and close the figure, so that a notebook shows it once: where the cell returns it."""
    figure.tight_layout()
    plt.close(figure)
    return figure


def _box(axes: Axes, x: float, y: float, width: float, label: str, colour: str, text: str = INK) -> None:
    axes.add_patch(Rectangle((x, y), width, 0.6, facecolor=colour, edgecolor=INK))
    axes.text(x + width / 2, y + 0.3, label, ha="center", va="center", color=text, fontsize=9)


def _token_row(axes: Axes, x: float, y: float, tokens: int, present: range, width: float) -> None:
    step = width / tokens
    for token in range(tokens):
        style = {"facecolor": "#444444", "edgecolor": "white"} if token in present else {"facecolor": "none"}
        axes.add_patch(Rectangle((x + token * step, y), step, 0.6, **({"edgecolor": FAINT} | style)))


def _ratio_cell(axes: Axes, token: int, rank: int, ratio: float) -> None:
    right = abs(ratio - 1) < 1e-6
    zero = abs(ratio) < 1e-6
    face = "white" if right else FAINT if zero else SICK
    hatch = "///" if zero else ""
    edge = FAINT if right else "white"
    axes.add_patch(Rectangle((token, rank), 1, 1, facecolor=face, edgecolor=edge, hatch=hatch))
    colour = HEALTHY if right else INK if zero else "white"
    box = {"facecolor": FAINT, "edgecolor": "none", "pad": 1} if zero else None
    axes.text(token + 0.5, rank + 0.5, f"{ratio:.3g}", ha="center", va="center", color=colour, fontsize=9, bbox=box)


# ---------------------------------------------------------------- timelines and collectives


def gantt(timeline: Timeline, title: str) -> Figure:
    """A row for each rank, a bar for each event; where a rank communicates behind other work, in the row's lower half.

    Time starts at 0, in seconds, ms or µs. A bar that is wide enough bears its event's name.

    >>> from course_utils.timeline import Event, Timeline
    >>> figure = gantt(Timeline((Event(0, 0, 2, "compute", "layer 1"), Event(0, 1, 3, "communication"))), "It overlaps")
    >>> figure.axes[0].get_title(), figure.axes[0].get_xlabel()
    ('It overlaps', 'time (s)')
    """
    figure, axes = _figure(10, 0.55 * len(timeline.ranks) + 1.6)
    unit, scale = _time_unit(timeline.makespan)
    for place, part in enumerate(timeline.by_rank().values()):
        rows = part.rows()
        height = 0.8 / len(rows)
        for row, events in enumerate(rows):
            for event in events:
                left, width = (event.start - timeline.start) * scale, event.seconds * scale
                _bar(axes, left, place - 0.4 + row * height, width, height, event.kind)
                if event.name and width > 0.0095 * len(event.name) * (timeline.makespan * scale):
                    _bar_name(axes, left + width / 2, place - 0.4 + (row + 0.5) * height, event.name, event.kind)
    axes.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in timeline.ranks])
    axes.set(xlim=(0, timeline.makespan * scale or 1), ylim=(len(timeline.ranks) - 0.5, -0.5))
    axes.set_xlabel(f"time ({unit})")
    axes.set_title(title)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [_bar_patch(kind) for kind in timeline.kinds]
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(handles, timeline.kinds, frameon=False, fontsize=9, handlelength=2.4, handleheight=1.2, **place)
    return _finished(figure)


def collective_steps(run: Run, title: str) -> Figure:
    """What every rank holds before and after each step of a simulated all-reduce: a panel per step, ranks × slices.

    A cell says whose numbers are in that sum: the ranks, up to five of them, else how many. It is dark once it is the
    whole sum. A thick frame and an arrow mark what has just arrived.

    >>> from course_utils.collectives import simulate
    >>> figure = collective_steps(simulate.ring_all_reduce([[1, 2], [3, 4]]), "Two steps")
    >>> [axes.get_title() for axes in figure.axes]
    ['before', 'step 1', 'step 2']
    """
    panels = [run.start, *run.steps]
    columns = min(len(panels), 4 if run.chunks > 1 else 8)
    lines = -(-len(panels) // columns)
    width, height = max(0.5 * run.chunks, 0.9) + 0.7, 0.42 * run.ranks + 0.75
    size = (max(width * columns, 5), height * lines + 0.6)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.remove()
            continue
        _held(axes, run, panels[number])
        axes.set_title(f"step {number}" if number else "before", fontsize=10)
        if number % columns == 0:
            axes.set_ylabel("rank")
        if run.chunks > 1 and number >= len(panels) - columns:
            axes.set_xlabel("slice")
    figure.suptitle(title, fontsize=12)
    return _finished(figure)


def bandwidth_by_size(
    measured: Mapping[str, Timings],
    title: str,
    models: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    ceilings: Mapping[str, float] | None = None,
) -> Figure:
    """Bus bandwidth against size, both logarithmic: measured points, a model's curves, and ceilings as level lines.

    Args:
        measured: name -> what `time_collective` gave.
        models: name -> sizes in bytes, and the bus bandwidth in bytes per second that a model predicts for each.
        ceilings: name -> bytes per second: what a link, or this machine's memory, can do.

    >>> from course_utils.collectives import Timing, Timings
    >>> table = Timings((Timing("all_reduce", ranks=2, size=1024, seconds=2e-4, fastest=1e-4, slowest=3e-4),))
    >>> figure = bandwidth_by_size({"Gloo": table}, "It levels off", ceilings={"memory": 1e10})
    >>> figure.axes[0].get_ylabel()
    'bus bandwidth (GB/s, GB = 10⁹ bytes)'
    """
    figure, axes = _figure(8.5, 4.6)
    for (name, timings), style in zip(measured.items(), _CURVES * len(measured)):
        look = {key: value for key, value in style.items() if key != "linestyle"}
        axes.plot(timings.sizes, [rate / 1e9 for rate in timings.busbw], linestyle="none", label=name, **look)
    for (name, (sizes, rates)), style in zip((models or {}).items(), _CURVES * len(models or {})):
        line = {"color": style["color"], "linestyle": style["linestyle"]}
        axes.plot(sizes, [rate / 1e9 for rate in rates], label=name, **line)
    for number, (name, rate) in enumerate((ceilings or {}).items()):
        axes.axhline(rate / 1e9, color=INK, linestyle=("-.", (0, (1, 3)), (0, (6, 2)))[number % 3], label=name)
    axes.set_ylabel("bus bandwidth (GB/s, GB = 10⁹ bytes)")
    return _by_size(figure, axes, title)


def predicted_times(
    sizes: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    title: str,
    crossings: Mapping[str, float] | None = None,
) -> Figure:
    """The time of each algorithm against size, both logarithmic, and where they cross.

    Args:
        sizes: bytes. seconds: name -> the time at each size.
        crossings: name -> size in bytes at which two of the lines cross (`course_utils.collectives.crossover`).

    >>> figure = predicted_times([1, 10], {"ring": [2.0, 2.0], "tree": [1.0, 4.0]}, "The tree wins", {"equal": 3.3})
    >>> [line.get_label() for line in figure.axes[0].lines[:2]]
    ['ring', 'tree']
    """
    figure, axes = _figure(8.5, 4.6)
    for (name, values), style in zip(seconds.items(), _CURVES * len(seconds)):
        axes.plot(sizes, values, label=name, markevery=max(1, len(sizes) // 8), **style)
    for name, size in (crossings or {}).items():
        axes.axvline(size, color=INK, linewidth=0.8, linestyle=":")
        note = {"rotation": 90, "fontsize": 8.5, "ha": "right", "va": "top", "color": INK}
        axes.text(size, 0.98, f"{name}: {_bytes(size)} ", transform=axes.get_xaxis_transform(), **note)
    axes.set_ylabel("time (s)")
    return _by_size(figure, axes, title)


# Curves that compare algorithms or backends, told apart by lightness, dash and marker: none is the colour of a kind.
_CURVES = [
    {"color": "#a8201a", "linestyle": "-", "marker": "o", "markersize": 5},
    {"color": "#333333", "linestyle": "--", "marker": "s", "markersize": 5},
    {"color": "#7a5195", "linestyle": ":", "marker": "^", "markersize": 6, "linewidth": 2},
    {"color": "#1a6b35", "linestyle": "-.", "marker": "D", "markersize": 4},
    {"color": "#999999", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v", "markersize": 6},
]


def _by_size(figure: Figure, axes: Axes, title: str) -> Figure:
    """What the figures against size share."""
    axes.set(xscale="log", yscale="log", xlabel="size (bytes)", title=title)
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    ticks = [2.0**power for power in range(0, 60, 2) if low <= 2.0**power <= high]
    axes.set_xticks(ticks, [_bytes(tick) for tick in ticks], rotation=45 if len(ticks) > 10 else 0)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return _finished(figure)


def _bytes(size: float) -> str:
    """`512`, `64 KiB`, `1.5 MiB`"""
    unit = min(4, max(0, (int(size).bit_length() - 1) // 10))
    return f"{size / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


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


def _held(axes: Axes, run: Run, step: Step) -> None:
    """One panel of `collective_steps`."""
    arrived = {(message.target, message.chunk): message.source for message in step.messages}
    for rank, chunks in enumerate(step.holds):
        for chunk, ranks in enumerate(chunks):
            whole = len(ranks) == run.ranks
            grey = 0.27 if whole else 1.0 - 0.4 * (len(ranks) - 1) / run.ranks
            axes.add_patch(Rectangle((chunk, rank), 1, 1, facecolor=str(grey), edgecolor="#888888", linewidth=0.6))
            said = "".join(map(str, ranks)) if run.ranks <= 5 else str(len(ranks))
            style = {"color": "white" if whole else INK, "fontsize": 8.5, "ha": "center", "va": "center"}
            axes.text(chunk + 0.5, rank + 0.5, said, **style)
    for (target, chunk), source in arrived.items():
        frame = {"fill": False, "edgecolor": COMMUNICATION, "linewidth": 2.5, "zorder": 3}
        axes.add_patch(Rectangle((chunk + 0.06, target + 0.06), 0.88, 0.88, **frame))
        down, distance = target > source, abs(target - source)
        x = chunk + (0.86 if down else 0.14)
        bend = 0 if distance == 1 else 0.35 / distance
        arrow = {"arrowstyle": "-|>", "color": COMMUNICATION, "linewidth": 1.6, "mutation_scale": 11}
        arrow |= {"connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 0}
        ends = ((x, target + (0.3 if down else 0.7)), (x, source + 0.5))
        axes.annotate("", *ends, arrowprops=arrow, zorder=4)
    axes.set(xlim=(-0.1, run.chunks + 0.1), ylim=(run.ranks + 0.1, -0.1))
    axes.set_xticks([chunk + 0.5 for chunk in range(run.chunks)], range(run.chunks) if run.chunks > 1 else [""])
    axes.set_yticks([rank + 0.5 for rank in range(run.ranks)], range(run.ranks))
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


# What a rank holds in memory: the optimizer keeps its colour from above, the others take what Okabe and Ito left.
PURPOSE_COLOURS = {
    "parameters": "#56B4E9",
    "gradients": "#D55E00",
    "optimizer": OPTIMIZER,
    "activations": "#F0E442",
}
PURPOSE_HATCHES = {"parameters": "", "gradients": "///", "optimizer": "xx", "activations": "..."}
_EXTRA = "#8c8c8c"
_BYTE_UNITS = (("GB", 9), ("MB", 6), ("kB", 3))


def memory_bars(memories: Mapping[str, Memory], title: str, capacity: Mapping[str, float] | None = None) -> Figure:
    """One stacked bar for each name: bytes of a rank by purpose, the total at its end; in GB, MB or kB (powers of ten).

    Args:
        memories: name -> `Memory`.
        title: the finding.
        capacity: name -> bytes of what it should fit into, drawn as a line: `{"H100, 80 GB": H100.memory_bytes}`.

    >>> from course_utils.memory import Memory
    >>> figure = memory_bars({"weights": Memory(parameters=140e9)}, "They don't fit", {"H100": 80e9})
    >>> figure.axes[0].get_xlabel()
    'GB per rank (1 GB = 10⁹ bytes)'
    """
    figure, axes = _figure(9, 0.5 * len(memories) + 1.7)
    largest = max((float(memory.total) for memory in memories.values()), default=0.0)
    unit, power = next(((unit, power) for unit, power in _BYTE_UNITS if largest >= 10**power), _BYTE_UNITS[-1])
    labelled: set[str] = set()
    extras = list(dict.fromkeys(name for memory in memories.values() for name in memory.extra))
    for row, memory in enumerate(memories.values()):
        left = 0.0
        for name, value in memory.terms().items():
            width = float(value) / 10**power
            if not width:
                continue
            style = {"facecolor": PURPOSE_COLOURS.get(name, _EXTRA), "hatch": PURPOSE_HATCHES.get(name)}
            if name in extras:
                style["hatch"] = ("\\\\", "++", "oo", "--", "||")[extras.index(name) % 5]
            label = None if name in labelled else name
            axes.barh(row, width, left=left, height=0.6, edgecolor="white", linewidth=0.5, label=label, **style)
            labelled.add(name)
            left += width
        axes.text(left, row, f" {left:.4g}", va="center", ha="left", color=INK, fontsize=9)
    for name, value in (capacity or {}).items():
        axes.axvline(float(value) / 10**power, color=INK, linestyle="--", linewidth=1)
        axes.text(float(value) / 10**power, -0.62, f" {name}", va="center", ha="left", color=INK, fontsize=9)
    axes.set_yticks(range(len(memories)), list(memories))
    axes.set_ylim(len(memories) - 0.5, -0.9 if capacity else -0.5)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.06)
    exponent = str(power).translate(str.maketrans("369", "³⁶⁹"))
    axes.set_xlabel(f"{unit} per rank (1 {unit} = 10{exponent} bytes)")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    if labelled:
        axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _finished(figure)
