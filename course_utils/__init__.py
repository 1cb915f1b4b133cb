"""Distributed Training, Live: what the notebooks need and don't teach.

Importing the package is light. `launch` and `World` are reached lazily, and their first use starts the preparation of
the ranks in the background, while the reader reads on.
"""

_LAZY = {
    "launch": "course_utils.world",
    "World": "course_utils.world",
    "RankError": "course_utils.world",
    "RankTimeout": "course_utils.world",
}
__all__ = list(_LAZY)


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'course_utils' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_LAZY[name])
    if name in ("launch", "World"):
        module.warm()
    return getattr(module, name)


def __dir__():
    return sorted([*globals(), *_LAZY])
