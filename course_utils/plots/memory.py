"""The view of `Memory` as bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from .style import INK, OPTIMIZER, figure_of, finished

if TYPE_CHECKING:
    from course_utils.memory import Memory

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

    Raises:
        ValueError: there is nothing to draw.

    >>> from course_utils.memory import Memory
    >>> figure = memory_bars({"weights": Memory(parameters=140e9)}, "They don't fit", {"H100": 80e9})
    >>> figure.axes[0].get_xlabel()
    'GB per rank (1 GB = 10⁹ bytes)'
    """
    figure, axes = figure_of(9, 0.5 * len(memories) + 1.7)
    if not memories:
        raise ValueError("memories is empty: give at least one name and its Memory")
    largest = max(map(float, [*(memory.total for memory in memories.values()), *(capacity or {}).values()]))
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
    return finished(figure)
