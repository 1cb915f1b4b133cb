"""Model states by arithmetic: parameters, gradients and optimizer state per rank, under DDP and the stages of ZeRO."""

from __future__ import annotations

from fractions import Fraction

from .checks import count, whole
from .optimizers import ADAM, MIXED_BF16, Optimizer, Precision
from .value import Memory


def model_states(
    parameters: int | float,
    *,
    optimizer: Optimizer = ADAM,
    precision: Precision = MIXED_BF16,
    zero: int = 0,
    data_parallel: int = 1,
    matrices: int | float | None = None,
) -> Memory:
    """Bytes of one of `data_parallel` ranks: with Ψ parameters and K bytes of optimizer state for each,

        DDP (zero=0)   (2 + 2 + K) Ψ
        ZeRO-1         (2 + 2) Ψ + K Ψ / N       the optimizer state is cut
        ZeRO-2         2 Ψ + (2 + K) Ψ / N       the gradients too
        ZeRO-3, FSDP   (2 + 2 + K) Ψ / N         the parameters too

    for 16-bit weights and gradients; K = 12 for Adam with FP32 master weights. The cut is even and to the byte: what
    real optimizers and FSDP2 hold beyond it is `zero_redundancy_states` and `fsdp_states`.

    Args:
        parameters: Ψ, of the part of the model that this rank works on (after tensor and pipeline parallelism).
        zero: the stage, 0 to 3.
        data_parallel: N.
        matrices: how many of the parameters are in matrices of layers; the others get `optimizer.elsewhere` if it has
            one (Muon). None for all.

    Raises:
        TypeError, ValueError: no whole number of at least 1, a stage other than 0, 1, 2, 3, `matrices` above
            `parameters`, or something else than a `Precision` and an `Optimizer`.

    Source: Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, Section 3.1, Sections 5.1 to 5.3, and Figure 1; with
    `MEGATRON_BF16` and zero=1 it is Megatron-LM's distributed optimizer, 6 + 12/d bytes per parameter.

    >>> [float(model_states(7.5e9, zero=stage, data_parallel=64).total / 1e9) for stage in range(4)]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    parameters = count("parameters", parameters)
    whole("data_parallel", data_parallel)
    check_kinds(optimizer, precision)
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r}: ZeRO has the stages 1, 2 and 3, and 0 stands for plain data parallelism")
    matrices = parameters if matrices is None else count("matrices", matrices, least=0)
    if matrices > parameters:
        raise ValueError(f"matrices={matrices} is more than parameters={parameters}: they are a part of them")
    rest = optimizer.elsewhere or optimizer
    moments = matrices * optimizer.bytes_per_parameter(precision)
    moments += (parameters - matrices) * rest.bytes_per_parameter(precision)
    share = Fraction(1, data_parallel)
    return Memory(
        parameters=parameters * precision.parameters * (share if zero >= 3 else 1),
        gradients=parameters * precision.gradients * (share if zero >= 2 else 1),
        optimizer=(parameters * (precision.master + precision.master_gradients) + moments) * (share if zero else 1),
    )


def deepspeed_states(
    parameters: int | float, *, zero: int, data_parallel: int = 1, largest_layer: int | float = 0
) -> Memory:
    """What DeepSpeed's documentation estimates per GPU: 4 P + 16 P/N for ZeRO-2, 4 L + 18 P/N for ZeRO-3.

    It differs from the paper's 2 P + 14 P/N and 16 P/N because it counts FP32 gradients at the update, and, for
    ZeRO-2, whole 16-bit gradients beside their shares; for ZeRO-3 the weights and gradients of the layer that is being
    worked on.

    Args:
        parameters: P.
        zero: 2 or 3.
        data_parallel: N.
        largest_layer: L, parameters of the largest layer.

    Raises:
        TypeError, ValueError: no whole numbers, or another stage.

    Source: DeepSpeed documentation, Memory Requirements, Discussion.

    >>> deepspeed_states(3e9, zero=2, data_parallel=8).total
    18000000000
    """
    parameters, layer = count("parameters", parameters), count("largest_layer", largest_layer, least=0)
    share = Fraction(parameters, whole("data_parallel", data_parallel))
    if zero == 2:
        return Memory(parameters=2 * parameters, gradients=2 * parameters, optimizer=16 * share)
    if zero == 3:
        return Memory(parameters=2 * share, optimizer=16 * share, extra={"largest layer, gathered": 4 * layer})
    raise ValueError(f"zero={zero!r}: DeepSpeed's documentation has formulas for 2 and 3")


def check_kinds(optimizer: Optimizer, precision: Precision) -> None:
    """Refuses what is no `Optimizer` and no `Precision`.

    >>> check_kinds("adam", MIXED_BF16)
    Traceback (most recent call last):
    TypeError: optimizer='adam': an Optimizer was expected, such as course_utils.memory.ADAM
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={optimizer!r}: an Optimizer was expected, such as course_utils.memory.ADAM")
    if not isinstance(precision, Precision):
        raise TypeError(f"precision={precision!r}: a Precision was expected, such as course_utils.memory.MIXED_BF16")
