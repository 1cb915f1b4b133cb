"""Figures of data parallelism: what each rank has and does, and throughput against the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import COMMUNICATION, COMPUTE, CURVES, FAINT, INK, OPTIMIZER, box, figure_of, finished


def data_parallel(world_size: int) -> Figure:
    """One step of data parallelism on `world_size` ranks: a share of the batch, the whole model, the reduced gradients.

    >>> data_parallel(4).axes[0].get_title()
    'Each rank has the whole model and a part of the batch; only gradients travel'
    """
    figure, axes = figure_of(9, 0.72 * world_size + 1.5)
    for rank in range(world_size):
        y = world_size - rank - 1
        axes.text(-0.2, y + 0.3, f"rank {rank}", ha="right", va="center", color=INK)
        for part in range(world_size):
            style = {"facecolor": "#444444"} if part == rank else {"facecolor": "none"}
            width = 2.0 / world_size
            axes.add_patch(Rectangle((part * width, y), width, 0.6, edgecolor=FAINT, **style))
        box(axes, 2.4, y, 2.2, "forward, backward", COMPUTE, text="white")
        box(axes, 5.0, y, 1.5, "gradients", "white")
        box(axes, 7.5, y, 1.2, "update", OPTIMIZER)
        for start, stop in ((2.02, 2.38), (4.62, 4.98), (6.52, 6.78), (7.16, 7.48)):
            axes.annotate("", (stop, y + 0.3), (start, y + 0.3), arrowprops={"arrowstyle": "->", "color": INK})
    style = {"facecolor": COMMUNICATION, "hatch": "///", "edgecolor": "white"}
    axes.add_patch(Rectangle((6.8, -0.15), 0.36, world_size - 0.1, **style))
    labels = ((1.0, "its part of the batch"), (3.5, "the whole model"), (5.75, "of its own part"))
    for x, label in (*labels, (6.98, "all-reduce"), (8.3, "the same for all")):
        axes.text(x, -0.55, label, ha="center", va="center", fontsize=9, color=INK)
    axes.set_title("Each rank has the whole model and a part of the batch; only gradients travel")
    axes.set(xlim=(-1.1, 9.2), ylim=(-0.85, world_size))
    axes.axis("off")
    return finished(figure)


def throughput(
    ranks: Sequence[int],
    linear: Sequence[float],
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    title: str,
) -> Figure:
    """Samples per second against ranks, both logarithmic: a model's lines and measured points, beside linear scaling.

    Args:
        ranks: numbers of ranks. linear: samples per second that each would reach if nothing were lost.
        panels: title -> name of a line -> what the model says for each number of ranks, and what was measured.
        title: the finding.

    >>> figure = throughput([1, 2], [10.0, 20.0], {"weak": {"DDP": ([10.0, 18.0], [10.0, 17.0])}}, "Nearly linear")
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['linear', 'DDP, model', 'DDP, measured']
    """
    figure, axes_of = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), sharey=True, squeeze=False)
    for axes, (panel, lines) in zip(axes_of[0], panels.items()):
        axes.plot(ranks, linear, color="#999999", linewidth=5, alpha=0.5, label="linear")
        for (name, (model, measured)), style in zip(lines.items(), CURVES):
            line = {"color": style["color"], "linestyle": style["linestyle"]}
            point = {"color": style["color"], "marker": style["marker"], "fillstyle": "none", "linestyle": "none"}
            axes.plot(ranks, model, label=f"{name}, model", **line)
            axes.plot(ranks, measured, label=f"{name}, measured", **point)
        axes.set(xscale="log", yscale="log", xlabel="ranks", title=panel)
        axes.set_xticks(ranks, ranks)
        axes.set_yticks(linear, [f"{value:g}" for value in linear])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5)
    axes_of[0][0].set_ylabel("samples per second")
    figure.suptitle(title)
    return finished(figure)
