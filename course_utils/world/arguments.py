"""What may be asked of `launch` and `World`: anything else is refused in a sentence that names it."""

from __future__ import annotations

import contextlib
import inspect
import operator

from . import wire

MOST_RANKS = 120


def check_size(size) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        size = operator.index(size)
    except TypeError:
        raise TypeError(
            f"world_size={size!r} is a {type(size).__name__}: expected a whole number of ranks, such as world_size=4"
        ) from None
    if size < 1:
        raise ValueError(f"world_size={size}: a world has at least one rank; try world_size=4")
    if size > MOST_RANKS:
        raise ValueError(
            f"world_size={size}: at most {MOST_RANKS} ranks can be started on one machine from a notebook, and a few "
            "per core run well; for more, export the notebook and run it under torchrun on several machines"
        )
    return size


def check_device(device) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"device={device!r}: expected 'auto' (GPUs if there are enough, otherwise the CPU), 'cpu' or 'cuda'"
        )
    return device


def check_links(links, size: int, device: str) -> None:
    if not hasattr(links, "backend"):
        raise TypeError(
            f"links={links!r:.60}: expected a Link or a Node of course_utils.links, such as Link(alpha=1e-3, beta=1e-8)"
        )
    if device == "cuda":
        raise ValueError(
            "links are emulated between CPU ranks: leave device='cuda' out, or measure the GPUs' own links"
        )
    links.check(size)


def check_timeout(timeout) -> float | None:
    if timeout is None:
        return None
    try:
        if isinstance(timeout, (bool, str)):
            raise TypeError
        seconds = float(timeout)
    except (TypeError, ValueError):
        raise TypeError(f"timeout={timeout!r}: expected a number of seconds, or None for no limit") from None
    if not seconds > 0:
        raise ValueError(f"timeout={timeout!r}: expected a positive number of seconds, or None for no limit")
    return seconds


def check_function(fn, args, kwargs) -> None:
    if not callable(fn):
        raise TypeError(
            f"the first argument is {fn!r:.60}, which is no function: pass the function itself, without calling it, as "
            "in launch(work, world_size=4)"
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(f"{a!r:.30}" for a in args), *(f"{k}={v!r:.30}" for k, v in kwargs.items())]) or "nothing"
        raise TypeError(
            f"{_name(fn)}{signature} is given {given}: {error} (what stands behind the function goes to it; the number "
            "of ranks is world_size=)"
        ) from None


def culprit(fn, args, kwargs) -> str:
    """Which part of a call can't be sent, in words."""

    def sendable(value) -> bool:
        try:
            wire.dumps(value)
        except wire.Unsendable:
            return False
        return True

    for i, value in enumerate(args):
        if not sendable(value):
            return f"argument {i + 1} of {_name(fn)}, a {type(value).__name__},"
    for name, value in kwargs.items():
        if not sendable(value):
            return f"the argument {name} of {_name(fn)}, a {type(value).__name__},"
    with contextlib.suppress(TypeError):
        used = inspect.getclosurevars(inspect.unwrap(fn))
        for name, value in {**used.globals, **used.nonlocals}.items():
            if not sendable(value):
                return f"{name}, a {type(value).__name__} that {_name(fn)} uses,"
    return _name(fn)


def _name(fn) -> str:
    return getattr(fn, "__name__", repr(fn))
