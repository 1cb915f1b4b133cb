"""Whose line is it? Naming places in code the way a learner would: the line of the cell."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    _PACKAGE,
    "<frozen ",
)
_COMPILED = re.compile(
    r"[/\\]torchinductor_[^/\\]*[/\\]|[/\\][a-z0-9]{2}[/\\]c[a-z0-9]{51}\.py$"
)  # torch.compile wrote it
_DISTRIBUTED = os.path.join("torch", "distributed", "")
_TORCH = f"{os.sep}torch{os.sep}"


def is_mine(filename: str) -> bool:
    """True for the learner's own code: neither a library's nor the course's."""
    if filename.startswith(_LIBRARIES) or filename == "<string>":
        return False
    return _TORCH not in filename and not _COMPILED.search(filename)


def where(place: dict) -> str:
    """`line 3 of the cell, in work: dist.all_reduce(x)`: the function tells which cell it is."""
    filename, line, name = place["file"], place["line"], place.get("name", "<module>")
    source = linecache.getline(filename, line).strip()
    home = os.path.basename(filename) if os.path.exists(filename) else "the cell"
    inside = "" if name.startswith("<") else f", in {name}"
    return f"line {line} of {home}{inside}" + (f": {source}" if source else "")


def excerpt(place: dict, before: int = 2, after: int = 1) -> str:
    """The lines around a place, with an arrow at it; empty when the source is not to be had."""
    lines = linecache.getlines(place["file"])
    here = place["line"]
    if not 0 < here <= len(lines):
        return ""
    numbers = range(max(1, here - before), min(len(lines), here + after) + 1)
    return "\n".join(f"{'-->' if n == here else '   '} {n:3} {lines[n - 1].rstrip()}".rstrip() for n in numbers)


def mine(stack: list[dict]) -> list[dict]:
    """The learner's part of a stack; where there is none, its innermost place."""
    return [place for place in stack if is_mine(place["file"])] or stack[-1:]


def called_in_torch(stack: list[dict]) -> str | None:
    """The function of `torch.distributed` that the learner's innermost line has called; None if it called none."""
    for place in stack[len(stack) - 1 - next((i for i, p in enumerate(stack[::-1]) if is_mine(p["file"])), 0) + 1 :]:
        hidden = place["name"].startswith(("_", "<")) or place["name"] == "wrapper"
        if _DISTRIBUTED in place["file"] and not hidden:
            return None if place["name"].startswith(("get_", "is_")) else place["name"]
    return None


def of_crash(text: str) -> list[dict]:
    """The stack in what `faulthandler` wrote, outermost first."""
    found = re.findall(r'File "(.*)", line (\d+) in (.*)', text)
    return [{"file": file, "line": int(line), "name": name} for file, line, name in reversed(found)]
