"""What runs on the ranks when an exercise is checked: forward in one call, backward in the next.

Two calls, so that the kernel can look at the forward before anything flows back, and so that ranks that part ways are
noticed at the end of the half in which they did.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils.grading.exercises import Case
from course_utils.traffic import count

_held: dict = {}  # between forward and backward: this rank's inputs, output, and the direction of its loss


def forward(case: Case, fn) -> dict:
    """Call `fn` on this rank's inputs; what came out, in plain values."""
    rank = dist.get_rank()
    inputs = {i.name: case.piece(i, rank).requires_grad_() for i in case.exercise.inputs}
    given = {name: value.detach().clone() for name, value in inputs.items()}
    with count() as traffic:
        output = fn(*inputs.values())
    _held.clear()
    _held.update(inputs=inputs, output=output, direction=case.piece(case.exercise.output, rank))
    changed = [name for name, value in inputs.items() if not torch.equal(value.detach(), given[name])]
    found = {"type": type(output).__name__, "changed": changed, "traffic": traffic}
    if isinstance(output, Tensor):
        found |= {"shape": tuple(output.shape), "dtype": output.dtype, "grows": output.requires_grad}
        found["output"] = output.detach()
    return found


def backward() -> dict:
    """The gradients of this rank's inputs; its loss is the sum of output x direction."""
    direction = _held["direction"].clone()
    with count() as traffic, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _held["output"].backward(direction)
    lucky = [w for w in said if "autograd kernel was not registered" in str(w.message)]  # through a c10d operator
    for w in said:
        if w not in lucky:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    return {
        "gradients": {name: value.grad for name, value in _held["inputs"].items()},
        "changed": not torch.equal(direction, _held["direction"]),
        "traffic": traffic,
        "warning": str(lucky[0].message) if lucky else "",
    }
