"""α and β from measured times: weighted least squares, with uncertainties.

The value is a `Fit` of time = steps·α + bytes·β, where steps and bytes of each size come from a cost function. Sizes
span decades, and so do times: what is made small is the sum of squared *relative* errors, so a point weighs 1/time².
The uncertainties are the usual standard errors: the square roots of the diagonal of s² (XᵀWX)⁻¹, s² being the weighted
sum of squared residuals over n - 2 degrees of freedom.

Source: any text on weighted linear regression; Hockney, "The communication challenge for MPP" (1994), for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .costs import Cost, amount, send, whole


@dataclass(frozen=True, repr=False)
class Fit:
    """A link, as a measurement saw it.

    Attributes:
        alpha, beta: seconds per step, and per byte; noise can make one of them negative.
        alpha_error, beta_error: their standard errors.
        sizes: bytes, as fitted. residuals: (predicted - measured) / measured for each.
        r_squared: the share of the (weighted) variance of the times that the line explains.
        cost: the function of size by which a size was turned into steps and bytes.
    """

    alpha: float
    beta: float
    alpha_error: float
    beta_error: float
    sizes: tuple[int, ...]
    residuals: tuple[float, ...]
    r_squared: float
    cost: Callable[[int], Cost]

    def predict(self, size: int) -> float:
        """Seconds for a size in bytes, measured or not.

        >>> round(fit([1000, 2000, 3000], [2.0, 3.0, 4.0]).predict(9000), 6)
        10.0
        """
        cost = self.cost(whole("size", size))
        return cost.steps * self.alpha + float(cost.bytes) * self.beta

    @property
    def bandwidth(self) -> float:
        """1 / beta, bytes per second."""
        return 1 / self.beta

    def __str__(self) -> str:
        """Plain text: `α = 1.00 ± 0.01 µs per step, β = 0.100 ± 0.002 ns per byte (10 GB/s), R² = 0.999`."""
        alpha = f"{_rounded(1e6 * self.alpha, 1e6 * self.alpha_error)} µs per step"
        beta = f"{_rounded(1e9 * self.beta, 1e9 * self.beta_error)} ns per byte"
        speed = f" ({self.bandwidth / 1e9:.3g} GB/s)" if self.beta > 0 else ""
        return f"α = {alpha}, β = {beta}{speed}, R² = {self.r_squared:.4f}"

    __repr__ = __str__


def fit(sizes: Sequence[int], seconds: Sequence[float], cost: Callable[[int], Cost] = send) -> Fit:
    """Fit α and β to times measured at several sizes.

    Args:
        sizes: bytes; three at least, two of them different.
        seconds: the time of each, above 0.
        cost: the `Cost` of a size: `lambda size: ring_all_reduce(size, ranks=4)` for a ring of four. By default that
            of one message, which makes α the time of an empty call, and β the time of a byte of the size.

    Raises:
        TypeError, ValueError: there are too few points, as many times as sizes are not given, a size is no whole number
            of bytes, or a time is not above 0.

    >>> found = fit([1000, 2000, 3000, 4000], [1.0, 2.0, 3.0, 4.0])
    >>> round(found.beta, 6), abs(found.alpha) < 1e-9, round(found.r_squared, 6)
    (0.001, True, 1.0)
    """
    sizes = tuple(whole("size", size) for size in sizes)
    times = np.array([amount("seconds", value) for value in seconds])
    if len(sizes) != len(times):
        raise ValueError(f"{len(sizes)} sizes and {len(times)} times: one time for each size was expected")
    if len(sizes) < 3 or len(set(sizes)) < 2:
        raise ValueError(
            f"{len(sizes)} points at {len(set(sizes))} different sizes are too few to fit α and β with an uncertainty: "
            "three points at two sizes, at least, were expected"
        )
    if not times.all():
        raise ValueError("seconds=0: times above 0 were expected")
    costs = [cost(size) for size in sizes]
    design = np.array([[c.steps, float(c.bytes)] for c in costs]) / times[:, None]  # rows weighted by 1/time
    scale = np.linalg.norm(design, axis=0)
    if not scale.all() or np.linalg.matrix_rank(design / scale) < 2:
        raise ValueError("α and β can't be told apart: at these sizes steps and bytes grow alike, or are all zero")
    factors, *_ = np.linalg.lstsq(design / scale, np.ones(len(times)), rcond=None)
    residuals = design @ (factors / scale) - 1
    spread = residuals @ residuals / (len(times) - 2)
    errors = np.sqrt(spread * np.diag(np.linalg.inv((design / scale).T @ (design / scale)))) / scale
    weights = times**-2.0
    mean = np.average(times, weights=weights)
    variation = np.sum(weights * (times - mean) ** 2)
    r_squared = 1 - residuals @ residuals / variation if variation else 1.0
    alpha, beta = factors / scale
    return Fit(
        *(float(value) for value in (alpha, beta, *errors)),
        sizes,
        tuple(float(value) for value in residuals),
        float(r_squared),
        cost,
    )


def _rounded(value: float, error: float) -> str:
    """`12.3 ± 0.4`: as many digits as the error leaves."""
    digits = max(0, 1 - int(np.floor(np.log10(error)))) if error > 0 else 3
    return f"{value:.{min(digits, 6)}f} ± {error:.{min(digits, 6)}f}"
