"""Every matplotlib figure of the course, and the colours that mean one thing through all of it.

A function here takes values that a cell has computed and returns a `Figure`; it computes nothing itself. What a figure
shows is asserted in the notebook, because nbval does not look at pictures. The colours are those of Okabe and Ito
("Color Universal Design", 2008), which the colour-blind can tell apart; a hatch or a word says the same in black and
white.

Modules: `timelines`, `collectives`, `memory`, `scaling` and `autograd` (figures of one value or one notebook each),
`style` (what they share).
"""

from __future__ import annotations

from .autograd import gradient_map, sharded_module, training_curves
from .collectives import bandwidth_by_size, collective_steps, predicted_times
from .memory import PURPOSE_COLOURS, PURPOSE_HATCHES, memory_bars
from .scaling import data_parallel, throughput
from .style import COLOURS, HATCHES
from .timelines import gantt

__all__ = [
    "COLOURS", "HATCHES", "PURPOSE_COLOURS", "PURPOSE_HATCHES", "bandwidth_by_size", "collective_steps",
    "data_parallel", "gantt", "gradient_map", "memory_bars", "predicted_times", "sharded_module", "throughput",
    "training_curves",
]  # fmt: skip
