"""Activations by arithmetic: what one transformer layer keeps for its backward pass, and how many micro-batches do.

The layer is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv
2205.05198, Figures 2 and 3, with 16-bit values and dropout masks of one byte. s is the sequence, b the micro-batch, h
the hidden size, a the heads, t tensor parallelism.
"""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction

from .checks import divides, flag, whole
from .value import Bytes, Memory


class Recompute(StrEnum):
    """What the backward pass computes again instead of keeping it. Each compares equal to its word.

    >>> Recompute.SELECTIVE == "selective"
    True
    """

    NONE = "none"
    SELECTIVE = "selective"  # the core of attention: scores, softmax, its dropout
    FULL = "full"  # the whole layer: only its input is kept


def layer_terms(
    sequence: int,
    microbatch: int,
    hidden: int,
    heads: int,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
    recompute: Recompute | str = Recompute.NONE,
    flash: bool = False,
    dropout: bool = True,
    attention_dropout: bool | None = None,
    value_bytes: int = 2,
    mask_bytes: int = 1,
) -> dict[str, Bytes]:
    """Bytes that one layer keeps on one rank, term by term, in the order of the forward pass.

    Without parallelism, of 16-bit values, they sum to s b h (34 + 5 a s / h): 11 sbh + 5 as²b for attention, 19 sbh for
    the MLP, 4 sbh for the two layer norms. Tensor parallelism cuts what lies between a column-parallel and a
    row-parallel matrix, 24 sbh and the scores; the rest, 10 sbh, is the same on all its ranks until sequence
    parallelism cuts that too.

    Args:
        sequence: s, tokens of one sequence.
        microbatch: b, sequences.
        hidden: h. heads: a. tensor_parallel: t.
        sequence_parallel: the regions between the tensor-parallel ones are cut along the sequence.
        context_parallel: every rank has s / context_parallel of the tokens, and attends to all s.
        recompute: "none", "selective" (no scores: 34 sbh) or "full" (the input only: 2 sbh; with sequence parallelism
            its slice).
        flash: attention by blocks, which keeps a log-sum-exp (FP32) per head and token instead of the scores.
        dropout: after attention and MLP. attention_dropout: on the attention's weights; None for the same, and never
            with flash.
        value_bytes: of an activation. mask_bytes: of a value in a dropout mask.

    Raises:
        TypeError, ValueError: no whole number of at least 1; `heads` does not divide `hidden`, `tensor_parallel` the
            heads, or a parallelism the sequence; an unknown `recompute`.

    Source: Korthikanti et al. 2022, Section 4.1 (the terms), Section 4.2 (parallelism), Section 5 (selective
    recomputation), Table 2 (the sums). The log-sum-exp: Dao et al. 2022, arXiv 2205.14135, Section 3.1.

    >>> terms = layer_terms(sequence=2048, microbatch=4, hidden=6144, heads=64)
    >>> terms["GELU: input"], sum(terms.values())
    (402653184, 7079985152)
    """
    for name, value in (
        ("sequence", sequence), ("microbatch", microbatch), ("hidden", hidden), ("heads", heads),
        ("tensor_parallel", tensor_parallel), ("context_parallel", context_parallel),
        ("value_bytes", value_bytes), ("mask_bytes", mask_bytes),
    ):  # fmt: skip
        whole(name, value)
    flags = {"sequence_parallel": sequence_parallel, "flash": flash, "dropout": dropout}
    for name, value in flags.items():
        flag(name, value)
    recompute = which_recompute(recompute)
    attention_dropout = dropout if attention_dropout is None else flag("attention_dropout", attention_dropout)
    divides("heads", heads, "hidden", hidden, "a head is a slice of hidden")
    divides("tensor_parallel", tensor_parallel, "heads", heads, "every rank holds whole heads")
    divides("context_parallel", context_parallel, "sequence", sequence, "every rank holds as many tokens")
    if sequence_parallel:
        local = sequence // context_parallel
        divides("tensor_parallel", tensor_parallel, "sequence", local, "sequence parallelism cuts it into equal slices")

    cut = Fraction(1, tensor_parallel)  # between the matrices of an attention or an MLP
    between = cut if sequence_parallel else 1
    values = Fraction(sequence * microbatch * hidden, context_parallel)  # sbh
    rows = Fraction(heads * sequence * microbatch, context_parallel)  # one per head and token
    scores = rows * sequence  # as²b: this rank's queries against all keys
    v, mask, masks = value_bytes, mask_bytes, dropout
    if recompute == Recompute.FULL:
        return _exact({"layer: input": v * values * between})
    keeps_scores = recompute == Recompute.NONE and not flash
    terms = {
        "layer norm 1: input": v * values * between,
        "QKV: input": v * values * between,
        "QK^T: queries and keys": 2 * v * values * cut,
        "softmax: output": v * scores * cut * keeps_scores,
        "softmax dropout: mask": mask * scores * cut * (keeps_scores and attention_dropout),
        "attention over values: dropped-out weights": v * scores * cut * (keeps_scores and attention_dropout),
        "flash attention: log-sum-exp": 4 * rows * cut * (flash and recompute == Recompute.NONE),
        "attention over values: values": v * values * cut,
        "projection: input": v * values * cut,
        "attention dropout: mask": mask * values * between * masks,
        "layer norm 2: input": v * values * between,
        "MLP up: input": v * values * between,
        "GELU: input": 4 * v * values * cut,
        "MLP down: input": 4 * v * values * cut,
        "MLP dropout: mask": mask * values * between * masks,
    }
    return _exact(terms)


def activations(
    sequence: int,
    microbatch: int,
    hidden: int,
    heads: int,
    *,
    layers: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
    recompute: Recompute | str = Recompute.NONE,
    flash: bool = False,
    dropout: bool = True,
    value_bytes: int = 2,
) -> Memory:
    """The sum of `layer_terms`, for `layers` layers and one micro-batch, as a `Memory`.

    Args, Raises, Source: as for `layer_terms`; `layers` is a whole number of at least 1.

    >>> gpt3 = {"sequence": 2048, "microbatch": 1, "hidden": 12288, "heads": 96}
    >>> kept = activations(**gpt3, recompute="selective").total / activations(**gpt3).total
    >>> f"selective recomputation saves {1 - kept:.0%}"
    'selective recomputation saves 70%'
    """
    terms = layer_terms(
        sequence, microbatch, hidden, heads,
        tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel, context_parallel=context_parallel,
        recompute=recompute, flash=flash, dropout=dropout, value_bytes=value_bytes,
    )  # fmt: skip
    return Memory(activations=whole("layers", layers) * sum(terms.values()))


def in_flight(
    pipeline_parallel: int, microbatches: int | None = None, *, stage: int = 0, chunks: int = 1
) -> int | Fraction:
    """Micro-batches whose activations a stage of a 1F1B pipeline keeps at most, in units of the whole stage.

    Stage i of p has p - i micro-batches under way, so the first has p, each of L/p layers: L layers' activations,
    whatever p is. Interleaving with m chunks (v in other papers) per stage raises that by the factor 1 + (p-1)/(pm).
    GPipe keeps all micro-batches.

    Args:
        pipeline_parallel: p.
        microbatches: of one step; None for at least as many as are kept.
        stage: 0 for the first.
        chunks: pieces of the model on every stage; 1 for no interleaving.

    Raises:
        TypeError, ValueError: no whole numbers, a stage that isn't there, or interleaving with one stage or with
            micro-batches that `pipeline_parallel` does not divide.

    Source: Narayanan et al. 2021, arXiv 2104.04473, Section 2.2.1; Korthikanti et al. 2022, Section 4.2.3; the warm-up
    of stage i when interleaved: Megatron-LM, `pipeline_parallel/schedules.py`.

    >>> in_flight(8), in_flight(8, stage=7), in_flight(8, microbatches=4), in_flight(8, chunks=2)
    (8, 1, 4, Fraction(23, 2))
    """
    p, v = whole("pipeline_parallel", pipeline_parallel), whole("chunks", chunks)
    if whole("stage", stage, least=0) >= p:
        raise ValueError(f"stage={stage} is not in a pipeline of pipeline_parallel={p}: 0 to {p - 1} was expected")
    if microbatches is not None:
        whole("microbatches", microbatches)
    if v == 1:
        return min(p - stage, microbatches or p)
    if p == 1:
        raise ValueError(f"chunks={v} needs pipeline_parallel of at least 2: one stage has nothing to interleave with")
    if microbatches is not None:
        divides("pipeline_parallel", p, "microbatches", microbatches, "interleaving takes them in groups of that size")
    warm_up = 2 * (p - stage - 1) + (v - 1) * p
    kept = Fraction(min(warm_up + 1, v * microbatches if microbatches else warm_up + 1), v)
    return int(kept) if kept == int(kept) else kept


def which_recompute(value: Recompute | str) -> Recompute:
    """The `Recompute` of this word, or a refusal.

    >>> which_recompute("full")
    <Recompute.FULL: 'full'>
    """
    try:
        return Recompute(value)
    except ValueError:
        raise ValueError(f"recompute={value!r}: one of {', '.join(Recompute)} was expected") from None


def _exact(terms: dict[str, Fraction | int]) -> dict[str, Bytes]:
    """Without the terms of 0 bytes; whole numbers as `int`."""
    return {name: int(b) if b == int(b) else b for name, b in terms.items() if b}
