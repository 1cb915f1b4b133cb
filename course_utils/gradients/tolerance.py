"""When are two gradients equal? Produces a `Target`: what a rank should hold, and how far off rounding may put it.

Two correct programs add the same products in another order, so their gradients differ by rounding: each element by
about eps times the size of the products behind it. That size is not visible in the result, where products may have
cancelled, so it is read off the neighbours. A gradient dW = sum of (delta x activation) has rows and columns of about
one size each; the size at (i, j) is therefore taken as **the smaller of the largest magnitude in row i and in column
j** (in general: over every dimension whose slices have at least 16 elements). Tensors too small or too flat for that
(biases) take the median magnitude of their nonzero elements, the lower one. A small row next to a large one, or a
small number next to a large one, is thus judged by its own size.

`fits` asks for both:
    each element's error               at most 4 · rtol · (that size)  + atol
    the root mean square of the errors at most rtol · (root mean square of the expected)  + atol
                                       (rising to 4 times this as the number of elements falls from 16 to 1)

The first sees one wrong element in a large tensor, the second a small factor on all of them. rtol by dtype is `RTOL`:
40 times what a small GPT's gradients differ by in float32 when its batch is cut into four (measured: 5e-7), and just
above what they differ by in bfloat16 (2.9e-2). A factor like 1.02 can't be seen in bfloat16: compare in
float32.
Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1 (the error of an inner product is
at most n · eps · |x|·|y|, measured with the magnitudes of the terms, not of the sum).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RTOL: dict[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
_ENOUGH = 16  # a slice with so many elements has, for all practical purposes, one of typical size


@dataclass(frozen=True)
class Tolerance:
    """`rtol` (dimensionless), `atol` (in units of the gradient) and `eps` of the coarsest dtype."""

    rtol: float
    atol: float
    eps: float


@dataclass(frozen=True, eq=False)
class Target:
    """An expected `value` (float64), the error `slack` allowed per element, and `rms`, allowed on average."""

    value: Tensor
    slack: Tensor
    rms: float
    tolerance: Tolerance


def tolerance_for(dtypes: set[torch.dtype], rtol: float | None, atol: float) -> Tolerance:
    """The tolerance for comparing tensors of these dtypes: that of the coarsest one.

    >>> tolerance_for({torch.float32, torch.bfloat16}, rtol=None, atol=0.0).rtol
    0.03
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    known = max(RTOL.get(dtype, 4 * torch.finfo(dtype).eps) for dtype in dtypes)
    return Tolerance(known if rtol is None else rtol, atol, eps)


def element_size(magnitude: Tensor) -> Tensor:
    """For each element of `magnitude` (non-negative, any shape) the size its rounding error is measured by.

    >>> element_size(torch.tensor([1000.0, 1.0, 2.0, 3.0, 0.0])).tolist()
    [2.0, 2.0, 2.0, 2.0, 2.0]
    """
    dims = [d for d, size in enumerate(magnitude.shape) if size > 1 and magnitude.numel() // size >= _ENOUGH]
    if dims:
        size = torch.full_like(magnitude, math.inf)
        for d in dims:
            others = [other for other in range(magnitude.ndim) if other != d]
            size = torch.minimum(size, magnitude.amax(dim=others, keepdim=True))
        return size
    nonzero = magnitude[magnitude > 0]
    return torch.full_like(magnitude, float(nonzero.median()) if len(nonzero) else 0.0)


def target(value: Tensor, tolerance: Tolerance, magnitude: Tensor | None = None) -> Target:
    """What a rank should hold. `magnitude` replaces |value| where the value is a sum whose terms were larger."""
    magnitude = value.abs() if magnitude is None else magnitude
    slack = 4 * tolerance.rtol * torch.maximum(element_size(magnitude), magnitude) + tolerance.atol
    return Target(value, slack, tolerance.rtol * root_mean_square(magnitude) + tolerance.atol, tolerance)


def piece(whole: Target, dim: int, start: int, size: int) -> Target:
    """The target of the rank that holds `size` indices from `start` along `dim`."""
    value = whole.value.narrow(dim, start, size)
    rms = max(whole.rms, whole.tolerance.rtol * root_mean_square(value) + whole.tolerance.atol)
    return Target(value, whole.slack.narrow(dim, start, size), rms, whole.tolerance)


def scaled(whole: Target, k: float) -> Target:
    """The target times k; its tolerance grows and shrinks with it, except for atol."""
    atol = whole.tolerance.atol
    return Target(
        k * whole.value, abs(k) * (whole.slack - atol) + atol, abs(k) * (whole.rms - atol) + atol, whole.tolerance
    )


def fits(observed: Tensor, expected: Target) -> bool:
    """Whether `observed` is the expected value up to rounding. NaN fits nothing; an empty tensor fits."""
    error = (observed - expected.value).abs()
    few = max(1.0, 4 / math.sqrt(max(1, error.numel())))
    return bool((error <= expected.slack).all()) and root_mean_square(error) <= few * expected.rms


def root_mean_square(x: Tensor) -> float:
    """The root of the mean square of x, 0 for an empty tensor.

    >>> root_mean_square(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    2.5
    """
    return float(x.norm()) / math.sqrt(x.numel()) if x.numel() else 0.0
