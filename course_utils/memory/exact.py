"""Predictions to the byte: what torch 2.13 holds beyond the formulas, each difference a named term.

Model states, from the shapes of the parameters:

    optimizer's step counters    Adam keeps a step counter, one FP32 number, for every parameter tensor
    DDP's bucket copies          the buckets that are all-reduced are a second copy of the gradients; with
                                 gradient_as_bucket_view=True the gradients are views of them, and the term is 0
    whole tensors                `ZeroRedundancyOptimizer` hands out whole tensors, the largest first, each to the rank
                                 that has least; the formula's even share is exceeded by whoever got more
    rows that don't divide       FSDP2 cuts the first dimension: the first ranks get ceil(rows/N) rows, a later one what
                                 is left, which may be nothing
    padding of parameters        and of gradients: all ranks allocate ceil(rows/N) rows, because collectives need equal
                                 sizes; the optimizer's state is not padded
    gathered parameters          FSDP2 between forward and backward, where reshard_after_forward is False

Activations, for the layer of Korthikanti et al. 2022 (`torch_terms`): dropout masks in the values' type on the CPU, the
statistics of the layer norms, the causal mask, and what `scaled_dot_product_attention` does instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .activations import Recompute, which_recompute
from .checks import divides, flag, whole
from .optimizers import ADAM, FP32, Optimizer, Precision
from .states import check_kinds
from .value import Memory

STEP_COUNTERS = "optimizer's step counters"
BUCKETS = "DDP's bucket copies"
PARAMETER_PADDING = "padding of parameters"
GRADIENT_PADDING = "padding of gradients"
GATHERED = "gathered parameters"
BUFFERS = "buffers"

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape] | Sequence[Shape]


def ddp_states(
    shapes: Shapes, *, optimizer: Optimizer = ADAM, precision: Precision = FP32, gradient_as_bucket_view: bool = False
) -> Memory:
    """Bytes of one rank under DistributedDataParallel, after its first step: the formula and two named terms.

    Args:
        shapes: of the parameters, in the order of `model.parameters()`; from a live model, `shapes_of(model)`.
        precision: FP32, or BF16 where parameters, gradients and moments are all BF16.

    Raises:
        TypeError, ValueError: no shapes, or shapes that are no tuples of whole numbers.

    Source: measured on torch 2.13; `torch/nn/parallel/distributed.py` on `gradient_as_bucket_view`.

    >>> ddp_states([(33, 7), (33,)]).extra
    {"optimizer's step counters": 8, "DDP's bucket copies": 1056}
    """
    sizes = [math.prod(shape) for shape in _shapes(shapes)]
    check_kinds(optimizer, precision)
    gradients = sum(sizes) * precision.gradients
    copies = 0 if flag("gradient_as_bucket_view", gradient_as_bucket_view) else gradients
    return Memory(
        parameters=sum(sizes) * precision.parameters,
        gradients=gradients,
        optimizer=sum(sizes) * optimizer.bytes_per_parameter(precision),
        extra={STEP_COUNTERS: optimizer.step_bytes * len(sizes), BUCKETS: copies},
    )


def zero_redundancy_states(
    shapes: Shapes,
    world_size: int,
    *,
    optimizer: Optimizer = ADAM,
    precision: Precision = FP32,
    gradient_as_bucket_view: bool = False,
) -> list[Memory]:
    """Bytes of every rank under DDP with `ZeroRedundancyOptimizer`, after its first step.

    Args: as for `ddp_states`; the parameters are one group.

    Raises:
        TypeError, ValueError: as for `ddp_states`; `world_size` is no whole number of at least 1.

    Source: `ZeroRedundancyOptimizer._partition_parameters` of torch 2.13: sorted by size, largest first, equal ones in
    their order, each to the rank with the fewest parameters so far.

    >>> [rank.optimizer for rank in zero_redundancy_states([(33, 7), (33,), (5, 33), (5,)], world_size=2)]
    [1848, 1624]
    """
    sizes = [math.prod(shape) for shape in _shapes(shapes)]
    held: list[list[int]] = [[] for _ in range(whole("world_size", world_size))]
    for size in sorted(sizes, reverse=True):
        min(held, key=sum).append(size)
    everywhere = ddp_states(
        shapes, optimizer=optimizer, precision=precision, gradient_as_bucket_view=gradient_as_bucket_view
    )
    each = optimizer.bytes_per_parameter(precision)
    return [
        Memory(
            parameters=everywhere.parameters,
            gradients=everywhere.gradients,
            optimizer=sum(mine) * each,
            extra=dict(everywhere.extra) | {STEP_COUNTERS: optimizer.step_bytes * len(mine)},
        )
        for mine in held
    ]


def fsdp_states(
    shapes: Shapes,
    world_size: int,
    *,
    optimizer: Optimizer = ADAM,
    precision: Precision = FP32,
    gathered: Iterable[str] | bool = False,
    gathered_bytes: int | None = None,
) -> list[Memory]:
    """Bytes of every rank under FSDP2 (`fully_shard`), after its first step.

    Args: as for `ddp_states`, and
        gathered: the names of the parameters that are gathered at the moment, or True for all: with
            reshard_after_forward=False (and by default for the outermost module), all of that module between forward
            and backward. A tensor's buffer has N × ceil(rows/N) rows.
        gathered_bytes: of a gathered value; None for the parameters' own, 2 with `MixedPrecisionPolicy(param_dtype=
            torch.bfloat16)`, under which shards, gradients and state remain FP32.

    Raises:
        TypeError, ValueError: as for `zero_redundancy_states`; a name in `gathered` that isn't in `shapes`; a
            parameter without dimensions, which FSDP2 refuses.

    Source: measured on torch 2.13; `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`.

    >>> for rank in fsdp_states([(5, 33)], world_size=4):
    ...     print(rank.parameters, rank.extra["optimizer's step counters"], rank.extra.get("padding of parameters", 0))
    264 4 0
    264 4 0
    132 4 132
    0 4 264
    """
    shapes = dict(shapes) if isinstance(shapes, Mapping) else dict(enumerate(shapes))
    if () in _shapes(shapes):
        raise ValueError("a parameter has no dimensions: FSDP2 cuts the first one, and refuses it")
    ranks = whole("world_size", world_size)
    check_kinds(optimizer, precision)
    if not isinstance(gathered, bool):
        gathered = set(gathered)
        if unknown := gathered - set(shapes):
            raise ValueError(f"gathered names {sorted(map(str, unknown))}, which are not among the parameters' names")
    whole_again = [shape for name, shape in shapes.items() if gathered is True or gathered and name in gathered]
    padded = [math.prod(_padded(shape, ranks)) for shape in shapes.values()]
    each_gathered = precision.parameters if gathered_bytes is None else whole("gathered_bytes", gathered_bytes)
    buffers = ranks * sum(math.prod(_padded(shape, ranks)) for shape in whole_again) * each_gathered
    each = optimizer.bytes_per_parameter(precision)
    found = []
    for rank in range(ranks):
        mine = [math.prod(_rows(shape, ranks, rank)) for shape in shapes.values()]
        spare = sum(padded) - sum(mine)
        found.append(
            Memory(
                parameters=sum(mine) * precision.parameters,
                gradients=sum(mine) * precision.gradients,
                optimizer=sum(mine) * each,
                extra={
                    STEP_COUNTERS: optimizer.step_bytes * len(shapes),
                    PARAMETER_PADDING: spare * precision.parameters,
                    GRADIENT_PADDING: spare * precision.gradients,
                    GATHERED: buffers,
                },
            )
        )
    return found


def torch_terms(
    sequence: int,
    microbatch: int,
    hidden: int,
    heads: int,
    *,
    recompute: Recompute | str = Recompute.NONE,
    flash: bool = False,
    dropout: bool = True,
    attention_dropout: bool | None = None,
    value_bytes: int = 2,
    mask_bytes: int | None = None,
    statistics_bytes: int | None = None,
) -> dict[str, int]:
    """What autograd saves beyond `layer_terms` of the same arguments, in `transformer_layer`, by torch 2.13 on the CPU.

    dropout masks      the CPU's dropout multiplies by a mask in the values' type (already divided by 1 - p), where the
                       paper, and torch on a GPU, keep a byte: (mask_bytes - 1) × (2 sbh + as²b)
    layer norms        mean and 1/standard deviation, one pair per token and norm: 4 sb values, in the values' type
                       (on a GPU in FP32)
    causal mask        `masked_fill` keeps the mask that it was given: s² bytes (the paper's softmax is fused with it)
    SDPA, dropout      on the CPU there is no flash kernel for dropout: `scaled_dot_product_attention` computes in FP32
                       and keeps queries, keys, values and three times all scores, 12 sbh + 12 as²b, instead of 6 sbh.
                       If b or a is 1 and the values are FP32 already, they are still a slice of the QKV result, which
                       stays whole: 8 sbh more

    That the input of a matrix is the output of the norm or of the function before it is counted once, in the paper as
    in torch: they share their storage. Full recomputation has no further terms: the layer's input, 2 sbh. (Besides,
    `torch.utils.checkpoint` remembers the state of the random number generator, 5,056 bytes on the CPU, outside
    autograd.)

    Args: as for `layer_terms`, with attention_dropout possible with `flash`, and
        mask_bytes: of a value in a dropout mask; None for value_bytes, as on the CPU. 1 on a GPU.
        statistics_bytes: of the layer norms' mean and 1/std; None for value_bytes, as on the CPU. 4 on a GPU.

    Raises:
        TypeError, ValueError: no whole number of at least 1, `heads` does not divide `hidden`, an unknown `recompute`.

    Source: measured (tests/test_memory_live.py), and read in torch 2.13, `aten/src/ATen/native/Dropout.cpp`.

    >>> torch_terms(sequence=16, microbatch=2, hidden=32, heads=4)
    {'dropout masks: more than a byte': 4096, 'layer norms: mean and 1/std': 256, 'causal mask': 256}
    """
    sizes = {"sequence": sequence, "microbatch": microbatch, "hidden": hidden, "heads": heads}
    for name, value in (sizes | {"value_bytes": value_bytes}).items():
        whole(name, value)
    divides("heads", heads, "hidden", hidden, "a head is a slice of hidden")
    mask = value_bytes if mask_bytes is None else whole("mask_bytes", mask_bytes)
    statistic = value_bytes if statistics_bytes is None else whole("statistics_bytes", statistics_bytes)
    flag("flash", flash)
    on_weights = flag("dropout", dropout) if attention_dropout is None else flag("attention_dropout", attention_dropout)
    recompute = which_recompute(recompute)
    if recompute == Recompute.FULL:
        return {}
    values, rows = sequence * microbatch * hidden, sequence * microbatch * heads  # sbh, asb
    scores = rows * sequence  # as²b
    keeps_scores = recompute == Recompute.NONE and not flash
    masked = 2 * values * dropout + scores * (on_weights and keeps_scores)
    terms = {
        "dropout masks: more than a byte": (mask - 1) * masked,
        "layer norms: mean and 1/std": 4 * sequence * microbatch * statistic,
        "causal mask": sequence**2 * keeps_scores,
    }
    if flash and on_weights and recompute == Recompute.NONE:
        terms["SDPA with dropout: in FP32, with all scores"] = 12 * scores + 3 * (4 - value_bytes) * values - 4 * rows
        terms["SDPA with dropout: QKV's whole result"] = 8 * values * (value_bytes == 4 and 1 in (microbatch, heads))
    return {name: value for name, value in terms.items() if value}


def _shapes(shapes: Shapes) -> list[Shape]:
    """The shapes of a mapping or a sequence, checked."""
    if isinstance(shapes, str) or not isinstance(shapes, Mapping | Sequence):
        raise TypeError(f"shapes={shapes!r}: the parameters' shapes were expected, by name or in order")
    found = list(shapes.values() if isinstance(shapes, Mapping) else shapes)
    if not found:
        raise ValueError("shapes is empty: there are no parameters")
    for shape in found:
        if not isinstance(shape, tuple):
            raise TypeError(f"the shape {shape!r} is a {type(shape).__name__}: a tuple of whole numbers was expected")
        for length in shape:
            whole("a length in a shape", length)
    return found


def _rows(shape: Shape, ranks: int, rank: int) -> Shape:
    """The piece of a rank by `torch.chunk`: ceil(rows/N) rows as long as there are any."""
    rows = math.ceil(shape[0] / ranks)
    return (min(rows, max(0, shape[0] - rank * rows)), *shape[1:])


def _padded(shape: Shape, ranks: int) -> Shape:
    return (math.ceil(shape[0] / ranks), *shape[1:])
