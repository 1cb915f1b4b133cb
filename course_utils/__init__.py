"""Distributed Training, Live: what the notebooks need and don't teach.

Importing the package is light. `launch`, `World` and `check` are reached lazily, and their first use starts the
preparation of the ranks in the background, while the reader reads on.
"""

_LAZY = {
    "launch": "course_utils.world",
    "World": "course_utils.world",
    "RankError": "course_utils.world",
    "RankTimeout": "course_utils.world",
    "check": "course_utils.grading",
}
__all__ = list(_LAZY)


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'course_utils' has no attribute {name!r}")
    import importlib

    if name in ("launch", "World", "check"):
        importlib.import_module("course_utils.world").warm()
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__():
    return sorted([*globals(), *_LAZY])
