"""What one rank of a training run holds: a `Model` and a `Layout` in, a `Memory` out.

Model states are those of `model_states`, for the weights that a stage of the pipeline and a rank of tensor and expert
parallelism hold; activations are those of `layer_terms` for a GPT, and the same way of counting for the others.
"""

from __future__ import annotations

from fractions import Fraction

from course_utils.models import Model

from .activations import Recompute, in_flight, layer_terms, which_recompute
from .checks import divides, flag, whole
from .layout import Layout, check_layout, held_parameters, stage_layers
from .optimizers import ADAM, MIXED_BF16, Optimizer, Precision
from .states import model_states
from .value import Bytes, Memory


def training_memory(
    model: Model,
    layout: Layout | None = None,
    *,
    microbatch: int = 1,
    microbatches: int | None = None,
    sequence: int | None = None,
    optimizer: Optimizer = ADAM,
    precision: Precision = MIXED_BF16,
    recompute: Recompute | str = Recompute.NONE,
    flash: bool = True,
    stage: int = 0,
) -> Memory:
    """Bytes that a rank of one stage holds at the fullest moment of a 1F1B step.

    Left out: the working space of kernels and collectives, fragmentation, what ZeRO-3 has gathered at the moment, and
    the token numbers. For a mixture of experts every expert is taken to get as many tokens.

    Args:
        layout: None for one rank.
        microbatch: sequences of one micro-batch on one rank.
        microbatches: per rank and step; None for at least as many as the pipeline keeps.
        sequence: tokens; None for the model's own.
        recompute, flash: as in `layer_terms`.
        stage: of the pipeline; the first keeps the most micro-batches.

    Raises:
        TypeError, ValueError: as for `held_parameters`, `layer_terms`, `model_states` and `in_flight`.

    Source: model states as in `model_states`, where routed experts have data_parallel × context_parallel /
    expert_parallel copies to spread theirs over; activations as in `layer_activations`, times `in_flight`; embedding
    dropout, final norm, head and FP32 logits: Korthikanti et al. 2022, Section 4.3, as in Megatron-LM's
    `theoretical_memory_usage.py`.

    >>> from course_utils.models import model
    >>> plan = Layout(tensor_parallel=8, pipeline_parallel=8, sequence_parallel=True)
    >>> training_memory(model("korthikanti-175b"), plan, recompute="selective", flash=False)
    purpose         bytes
    parameters    5.65 GB
    gradients     5.65 GB
    optimizer    33.87 GB
    activations  10.29 GB
    total        55.46 GB
    1 GB = 10^9 B
    """
    layout = Layout() if layout is None else layout
    held = held_parameters(model, layout, stage=stage)
    states = {"optimizer": optimizer, "precision": precision, "zero": layout.zero}
    memory = model_states(held.dense, **states, data_parallel=layout.replicas, matrices=held.matrices)
    if held.experts:
        memory += model_states(held.experts, **states, data_parallel=layout.replicas // layout.expert_parallel)

    sequence = model.sequence if sequence is None else sequence
    tokens = {"microbatch": microbatch, "sequence": sequence, "value_bytes": int(precision.activations)}
    layers = stage_layers(model.layers, layout.pipeline_parallel, stage)
    kinds = {layer: model.experts is not None and layer >= model.experts.dense_layers for layer in layers}
    of_kind = {
        kind: sum(layer_activations(model, layer, layout, recompute=recompute, flash=flash, **tokens).values())
        for layer, kind in kinds.items()
    }
    rounds = in_flight(layout.pipeline_parallel, microbatches, stage=stage, chunks=layout.chunks)
    kept = sum(of_kind[kind] for kind in kinds.values()) * rounds
    return memory + Memory(activations=kept + _at_the_ends(model, layout, stage, rounds, **tokens))


def layer_activations(
    model: Model,
    layer: int = 0,
    layout: Layout | None = None,
    *,
    microbatch: int = 1,
    sequence: int | None = None,
    recompute: Recompute | str = Recompute.NONE,
    flash: bool = True,
    value_bytes: int = 2,
) -> dict[str, Bytes]:
    """Bytes that layer `layer` (from 0) of a model keeps for one micro-batch on one rank, term by term.

    A GPT's are `layer_terms`. For the others (RMSNorm, no dropout, SwiGLU, grouped or latent attention, experts) no
    paper prints a formula: each matrix and each function is taken to keep its input once, as in Korthikanti et al.
    2022, Section 4.1, SwiGLU its gate before and after the function, its other half, and their product. It is an
    estimate: rotary embeddings and fused kernels change it by a few sbh.

    Raises:
        TypeError, ValueError: as for `layer_terms`; a layer that isn't there.

    >>> from course_utils.models import model
    >>> sum(layer_activations(model("llama3-8b"), sequence=8192).values()) / (2 * 8192 * 4096)    # of 2 sbh
    20.515625
    """
    layout = Layout() if layout is None else layout
    check_layout(model, layout)
    sequence = whole("sequence", model.sequence if sequence is None else sequence)
    if whole("layer", layer, least=0) >= model.layers:
        raise ValueError(f"layer={layer}: {model.name} has layers=0 to {model.layers - 1}")
    recompute = which_recompute(recompute)
    cuts = {name: getattr(layout, name) for name in ("tensor_parallel", "sequence_parallel", "context_parallel")}
    if model.gpt:
        return layer_terms(
            sequence, microbatch, model.hidden, model.heads,
            **cuts, recompute=recompute, flash=flash, value_bytes=value_bytes,
        )  # fmt: skip
    flag("flash", flash)
    tokens = _tokens(layout, sequence, microbatch)
    v = whole("value_bytes", value_bytes)
    cut = Fraction(1, layout.tensor_parallel)
    between = cut if layout.sequence_parallel else 1  # where only sequence parallelism cuts
    input_bytes = v * tokens * model.hidden * between
    if recompute == Recompute.FULL:
        return {"layer: input": _tidy(input_bytes)}
    keeps_scores = recompute == Recompute.NONE and not flash
    terms = {
        "norm 1: input": input_bytes,
        "attention: input": input_bytes,
        **_heads_terms(model, v * tokens, cut, between),
        "softmax: output": v * tokens * model.heads * sequence * cut * keeps_scores,
        "flash attention: log-sum-exp": 4 * tokens * model.heads * cut * (flash and recompute == Recompute.NONE),
        "norm 2: input": input_bytes,
        "MLP: input": input_bytes,
        **_mlp_terms(model, layer, tokens, v, cut, between),
    }
    return {name: _tidy(value) for name, value in terms.items() if value}


def _heads_terms(model: Model, width: int | Fraction, cut: Fraction, between: Fraction | int) -> dict[str, Fraction]:
    """Queries, keys, values and what they mix to; `width` is the bytes of one value per token."""
    of_groups = max(cut, Fraction(1, model.groups)) * model.groups  # key heads of this rank
    if latent := model.latent:
        compressed = 2 * (latent.query + latent.key_value) + latent.rope  # before and after their norms
        return {
            "attention: compressed": width * compressed * between,
            "QK^T: queries and keys": width * 2 * model.heads * (latent.nope + latent.rope) * cut,
            "attention over values: values": width * model.heads * latent.value * cut,
            "projection: input": width * model.heads * latent.value * cut,
        }
    return {
        "QK^T: queries and keys": width * model.head_size * (model.heads * cut + of_groups),
        "attention over values: values": width * model.head_size * of_groups,
        "projection: input": width * model.hidden * cut,
    }


def _mlp_terms(
    model: Model, layer: int, tokens: int | Fraction, v: int, cut: Fraction, between: Fraction | int
) -> dict[str, Fraction]:
    experts = model.experts
    if experts is None or layer < experts.dense_layers:
        return {"MLP: gate, SiLU, up, product": 4 * v * tokens * model.ffn * cut}
    copies = v * tokens * experts.top_k  # every token goes to so many experts
    return {
        "router: probabilities in FP32": 4 * tokens * experts.routed * between,
        "experts: tokens dispatched": copies * model.hidden * between,
        "experts: gate, SiLU, up, product": 4 * copies * experts.ffn * cut,
        "experts: outputs to combine": copies * model.hidden * between,
        "shared experts: gate, SiLU, up, product": 4 * v * tokens * experts.shared * experts.ffn * cut,
    }


def _at_the_ends(
    model: Model, layout: Layout, stage: int, rounds: Bytes, *, microbatch: int, sequence: int, value_bytes: int
) -> Fraction:
    """Embedding dropout on the first stage; final norm, head and logits on the last, of one micro-batch."""
    tokens = _tokens(layout, sequence, microbatch)
    cut = Fraction(1, layout.tensor_parallel)
    values = tokens * model.hidden * (cut if layout.sequence_parallel else 1)
    kept = Fraction(0)
    if stage == 0 and model.gpt:
        kept += values * rounds
    if stage == layout.pipeline_parallel - 1:
        kept += 2 * value_bytes * values + 4 * tokens * model.vocabulary * cut
    return kept


def _tokens(layout: Layout, sequence: int, microbatch: int) -> int | Fraction:
    divides("context_parallel", layout.context_parallel, "sequence", sequence, "every rank holds as many tokens")
    tokens = sequence // layout.context_parallel
    if layout.sequence_parallel:
        t = layout.tensor_parallel
        divides("tensor_parallel", t, "sequence", tokens, "sequence parallelism cuts it into equal slices")
    return tokens * whole("microbatch", microbatch)


def _tidy(value: Bytes) -> Bytes:
    return int(value) if value == int(value) else value
