"""What the figures share: the colours that mean one thing through the whole course, and how a figure is finished."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

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

# Curves that compare algorithms or backends, told apart by lightness, dash and marker: none is the colour of a kind.
CURVES = [
    {"color": "#a8201a", "linestyle": "-", "marker": "o", "markersize": 5},
    {"color": "#333333", "linestyle": "--", "marker": "s", "markersize": 5},
    {"color": "#7a5195", "linestyle": ":", "marker": "^", "markersize": 6, "linewidth": 2},
    {"color": "#1a6b35", "linestyle": "-.", "marker": "D", "markersize": 4},
    {"color": "#999999", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v", "markersize": 6},
]


def figure_of(width: float, height: float) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(width, height))


def finished(figure: Figure) -> Figure:
    """Lay out and close the figure, so that a notebook shows it once: where the cell returns it."""
    figure.tight_layout()
    plt.close(figure)
    return figure


def box(axes: Axes, x: float, y: float, width: float, label: str, colour: str, text: str = INK) -> None:
    axes.add_patch(Rectangle((x, y), width, 0.6, facecolor=colour, edgecolor=INK))
    axes.text(x + width / 2, y + 0.3, label, ha="center", va="center", color=text, fontsize=9)
