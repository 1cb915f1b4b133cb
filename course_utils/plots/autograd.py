"""Figures of notebook 05: the sharded module, what each rank holds of a gradient, and two runs that look alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import COMMUNICATION, COMPUTE, FAINT, HEALTHY, INK, SICK, box, figure_of, finished


def sharded_module(world_size: int, tokens: int) -> Figure:
    """The module of notebook 05 on `world_size` ranks: `tokens` are cut, cond and weight whole, the loss on every rank.

    >>> sharded_module(world_size=4, tokens=12).axes[0].get_title().startswith("Only the tokens")
    True
    """
    figure, axes = figure_of(9, 0.72 * world_size + 1.5)
    per_rank = tokens // world_size
    for rank in range(world_size):
        y = world_size - rank - 1
        axes.text(-0.2, y + 0.3, f"rank {rank}", ha="right", va="center", color=INK)
        _token_row(axes, 0, y, tokens, range(rank * per_rank, (rank + 1) * per_rank), 2.4)
        box(axes, 2.7, y, 1.5, "cond, weight", "white")
        box(axes, 4.5, y, 1.2, "multiply", COMPUTE, text="white")
        _token_row(axes, 6.6, y, tokens, range(tokens), 2.4)
        box(axes, 9.3, y, 0.9, "loss", COMPUTE, text="white")
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
    return finished(figure)


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
    return finished(figure)


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
    return finished(figure)


# Lines of a figure that compares runs differ in lightness, dash and marker as well: these are no kinds of work, so they
# take none of the colours above.
_LINES = (
    {"color": "#999999", "linewidth": 5, "solid_capstyle": "round"},
    {"color": "#a8201a", "linestyle": "-", "marker": "o", "markersize": 5},
    {"color": "#56351e", "linestyle": "--", "marker": "s", "markersize": 5},
    {"color": "#7a5195", "linestyle": ":", "marker": "^", "markersize": 6, "linewidth": 2},
    {"color": "#1a6b35", "linestyle": "-", "marker": "D", "markersize": 4},
)


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
