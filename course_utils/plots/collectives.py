"""Figures of collectives: step by step, and against size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import COMMUNICATION, CURVES, FAINT, INK, figure_of, finished

if TYPE_CHECKING:
    from course_utils.collectives import Timings
    from course_utils.collectives.simulate import Run, Step


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
    return finished(figure)


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
    figure, axes = figure_of(8.5, 4.6)
    for (name, timings), style in zip(measured.items(), CURVES * len(measured)):
        look = {key: value for key, value in style.items() if key != "linestyle"}
        axes.plot(timings.sizes, [rate / 1e9 for rate in timings.busbw], linestyle="none", label=name, **look)
    for (name, (sizes, rates)), style in zip((models or {}).items(), CURVES * len(models or {})):
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
    figure, axes = figure_of(8.5, 4.6)
    for (name, values), style in zip(seconds.items(), CURVES * len(seconds)):
        axes.plot(sizes, values, label=name, markevery=max(1, len(sizes) // 8), **style)
    for name, size in (crossings or {}).items():
        axes.axvline(size, color=INK, linewidth=0.8, linestyle=":")
        note = {"rotation": 90, "fontsize": 8.5, "ha": "right", "va": "top", "color": INK}
        axes.text(size, 0.98, f"{name}: {_bytes(size)} ", transform=axes.get_xaxis_transform(), **note)
    axes.set_ylabel("time (s)")
    return _by_size(figure, axes, title)


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
    return finished(figure)


def _bytes(size: float) -> str:
    """`512`, `64 KiB`, `1.5 MiB`"""
    unit = min(4, max(0, (int(size).bit_length() - 1) // 10))
    return f"{size / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


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
