"""Paced: a module whose forward and backward take a chosen time, on however few cores.

On a laptop with two cores, four ranks that compute take turns. Four ranks that sleep do not: so a demo about time gives
each layer a time of its own, as `course_utils.links` does for each message. The module computes what it always does,
bit for bit; then the rank sleeps until the time has passed. Each forward and backward becomes an event of kind
"compute" in the recordings that are open (`course_utils.timeline.recording`).
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn

from course_utils.timeline import note


class Paced(nn.Module):
    """`module`, with a forward of at least `forward` and a backward of at least `backward` seconds.

    The backward's time passes before the gradients of the module's parameters come out, as it does in a real layer:
    hooks on the parameters, and whoever waits for the gradient of the input, come after it. The event of the backward
    is that time; what the module itself then computes is not in it.

    Args:
        module: of one tensor, or of several of which the output depends on; its output is one tensor.
        forward, backward: seconds; a backward takes about twice as long as its forward, so that is the default.
        name: of the forward's events; those of the backward get a prime: "layer 1′".

    Raises:
        TypeError: `module` is no module, a time is no number, or the name no text; in forward: the output is not one
            tensor.
        ValueError: a time is negative or not finite.

    >>> from course_utils.timeline import recording
    >>> layer = Paced(nn.Linear(3, 3), forward=0.002, name="layer 1")
    >>> with recording() as recorder:
    ...     layer(torch.ones(1, 3)).sum().backward()
    >>> [(event.kind, event.name, event.seconds >= 0.002) for event in recorder.timeline()]
    [('compute', 'layer 1', True), ('compute', 'layer 1′', True)]
    """

    def __init__(self, module: nn.Module, forward: float, backward: float | None = None, name: str = ""):
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}: a torch module was expected")
        if not isinstance(name, str):
            raise TypeError(f"name={name!r}: a text was expected, not a {type(name).__name__}")
        super().__init__()
        self.module = module
        self.forward_seconds = _seconds("forward", forward)
        self.backward_seconds = _seconds("backward", 2 * self.forward_seconds if backward is None else backward)
        self.name = name

    def forward(self, *args, **kwargs) -> Tensor:
        start = time.monotonic()
        output = self.module(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(f"the module that is paced returned a {type(output).__name__}: one tensor was expected")
        _sleep(start, self.forward_seconds, self.name)
        return _Pause.apply(output, self.backward_seconds, f"{self.name}′" if self.name else "backward")

    def extra_repr(self) -> str:
        return f"forward={self.forward_seconds:g} s, backward={self.backward_seconds:g} s"


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(context, x: Tensor, seconds: float, name: str) -> Tensor:
        context.seconds, context.name = seconds, name
        return x.clone()  # a view would make FSDP2 warn

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None, None]:
        _sleep(time.monotonic(), context.seconds, context.name)
        return gradient, None, None


def _sleep(start: float, seconds: float, name: str) -> None:
    """Until so long after `start`; the time is noted as compute."""
    time.sleep(max(0.0, start + seconds - time.monotonic()))
    note("compute", name, start, time.monotonic())


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: seconds were expected, not a {type(value).__name__}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value}: a finite number of seconds, at least 0, was expected")
    return float(value)
