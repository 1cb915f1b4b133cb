"""Ranks in the kernel: `launch` runs a function on fresh ranks, `World` keeps its ranks.

Modules, from the outside in: `worlds` (the kernel's side), `arguments` (what may be asked for), `exchange` (one call),
`errors`, `report` (failures in sentences), `output` (what ranks print), `torchrun` (joining a world that exists),
`nursery` and `spawned` (where ranks come from), `rank` (what runs in one), `messages` (a note of what torch keeps none
of), `wire` (what travels), `frames` (whose line is it).
"""

import os

from . import torchrun
from .errors import RankError, RankTimeout
from .nursery import warm as _start_nursery
from .worlds import World, launch

__all__ = ["launch", "World", "RankError", "RankTimeout", "warm"]


def warm() -> None:
    """Start preparing ranks in the background, unless this process is itself a rank or one of `torchrun`'s."""
    if torchrun.present():
        torchrun.quiet()
    elif not (os.environ.get("COURSE_UTILS_RANK") or os.environ.get("COURSE_UTILS_NO_WARM")):
        _start_nursery()
