"""How a model is laid out over ranks, and what one rank holds of its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from course_utils.models import Model, Weight

from .checks import divides, flag, whole


@dataclass(frozen=True)
class Layout:
    """How a model is laid out over ranks: world_size = data × tensor × pipeline × context parallel.

    Attributes:
        data_parallel, tensor_parallel, pipeline_parallel, context_parallel: sizes of the groups.
        expert_parallel: experts are spread over so many of the data- and context-parallel ranks.
        sequence_parallel: cuts along the sequence what tensor parallelism leaves whole.
        zero: the stage of ZeRO, 0 to 3, over the data- and context-parallel ranks.
        chunks: pieces of the model on every stage of the pipeline; above 1 the schedule is interleaved.

    Raises:
        TypeError, ValueError: no whole number of at least 1, an unknown stage of ZeRO, `expert_parallel` that does not
            divide data_parallel × context_parallel, or sequence parallelism without tensor parallelism.

    Source: the axes and their product, Llama Team 2024, arXiv 2407.21783, Section 3.3.2; experts over data-parallel
    ranks: Lepikhin et al. 2020 (GShard), arXiv 2006.16668, Section 3.1.

    >>> Layout(data_parallel=64, tensor_parallel=8, pipeline_parallel=16).world_size
    8192
    """

    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context", "expert"):
            whole(f"{name}_parallel", getattr(self, f"{name}_parallel"))
        whole("chunks", self.chunks)
        flag("sequence_parallel", self.sequence_parallel)
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero!r}: ZeRO has the stages 1, 2 and 3, and 0 stands for none of it")
        if self.replicas % self.expert_parallel:
            raise ValueError(
                f"expert_parallel={self.expert_parallel} does not divide data_parallel × context_parallel = "
                f"{self.replicas}: the experts are spread over these ranks"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel=True needs tensor_parallel of at least 2: it cuts what that leaves whole"
            )

    @property
    def world_size(self) -> int:
        """All ranks.

        >>> Layout(data_parallel=2, context_parallel=4).world_size
        8
        """
        return self.replicas * self.tensor_parallel * self.pipeline_parallel

    @property
    def replicas(self) -> int:
        """Ranks that would hold the same weights without ZeRO, experts left aside: data_parallel × context_parallel.

        >>> Layout(data_parallel=2, context_parallel=4, tensor_parallel=8).replicas
        8
        """
        return self.data_parallel * self.context_parallel


def stage_layers(layers: int, pipeline_parallel: int, stage: int = 0) -> range:
    """Which layers a stage holds: as many on each; where that does not work out, one fewer on the outermost stages.

    The outer stages are the ones that hold the embedding and the head besides. With interleaving a stage holds other
    layers, and as many.

    Raises:
        TypeError, ValueError: no whole numbers, a stage that isn't there, or fewer layers than stages.

    Source: Llama Team 2024, arXiv 2407.21783, Section 3.3.2: one layer fewer on the first and on the last stage.

    >>> [len(stage_layers(126, 16, stage)) for stage in (0, 1, 14, 15)]
    [7, 8, 8, 7]
    """
    whole("layers", layers)
    if whole("pipeline_parallel", pipeline_parallel) > layers:
        raise ValueError(f"pipeline_parallel={pipeline_parallel} is more than layers={layers}: a stage has one or more")
    if whole("stage", stage, least=0) >= pipeline_parallel:
        raise ValueError(f"stage={stage} is not in a pipeline of {pipeline_parallel}: 0 to {pipeline_parallel - 1}")
    each, more = divmod(layers, pipeline_parallel)
    first = math.ceil((pipeline_parallel - more) / 2)  # the first of the stages that hold one more
    start = stage * each + min(max(stage - first, 0), more)
    return range(start, start + each + (first <= stage < first + more))


@dataclass(frozen=True)
class Held:
    """Parameters of one rank: `dense`, all but routed experts; of these `matrices`, those in matrices of layers; and
    `experts`, the routed ones, which are matrices all of them.

    >>> Held(dense=10, matrices=8, experts=0).dense
    10
    """

    dense: int
    matrices: int
    experts: int


def held_parameters(model: Model, layout: Layout, *, stage: int = 0) -> Held:
    """What one rank of a stage holds before ZeRO.

    Tensor parallelism cuts each weight along its `cut`. Key and value heads are copied where there are fewer of them
    than ranks; a vocabulary that does not divide is padded to the next size that does; the head of a tied model is a
    copy of the embedding if it is on another stage.

    Raises:
        TypeError, ValueError: something else than a `Model` and a `Layout`; a parallelism that does not divide what it
            cuts (heads, ffn, experts); or a stage that isn't there.

    Source: Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, Section 3; the copies of the tied embedding: Narayanan
    et al. 2021, arXiv 2104.04473, and Megatron-LM.

    >>> from course_utils.models import model
    >>> held_parameters(model("mixtral-8x7b"), Layout(data_parallel=8, expert_parallel=8))
    Held(dense=1605636096, matrices=1343225856, experts=5637144576)
    """
    check_layout(model, layout)
    p = layout.pipeline_parallel
    within = [weight for layer in stage_layers(model.layers, p, stage) for weight in model.layer_weights(layer)]
    ends: list[Weight] = []
    if stage == 0:
        ends += model.first_weights()
    if stage == p - 1:
        ends += model.last_weights()
        ends += model.first_weights()[:1] if model.tied and p > 1 else ()
    size = {weight: _local(weight, layout) for weight in {*within, *ends}}
    experts = sum(size[weight] for weight in within if weight.part == "experts")
    matrices = sum(size[weight] for weight in within if len(weight.shape) == 2) - experts
    return Held(sum(size[weight] for weight in (*within, *ends)) - experts, matrices, experts)


def check_layout(model: Model, layout: Layout) -> None:
    """Refuses what is no `Model` and no `Layout`, and a parallelism that does not divide what it cuts.

    >>> from course_utils.models import model
    >>> check_layout(model("gpt2-xl"), Layout(tensor_parallel=2))
    Traceback (most recent call last):
    ValueError: tensor_parallel=2 does not divide heads=25: every rank holds whole heads
    """
    if not isinstance(model, Model):
        raise TypeError(f"model={model!r}: a Model was expected, such as course_utils.models.model('llama3-70b')")
    if not isinstance(layout, Layout):
        raise TypeError(f"layout={layout!r}: a Layout was expected, such as Layout(tensor_parallel=8)")
    t = layout.tensor_parallel
    divides("tensor_parallel", t, "heads", model.heads, "every rank holds whole heads")
    if max(t, model.groups) % min(t, model.groups):
        raise ValueError(f"tensor_parallel={t} and kv_heads={model.groups}: one must divide the other")
    divides("tensor_parallel", t, "ffn", model.ffn, "every rank holds as many columns of the MLP")
    if layout.chunks > 1:
        chunks = layout.pipeline_parallel * layout.chunks
        divides("pipeline_parallel × chunks", chunks, "layers", model.layers, "every chunk has as many layers")
    if model.experts:
        divides("tensor_parallel", t, "the experts' ffn", model.experts.ffn, "every rank holds as many columns")
        divides(
            "expert_parallel", layout.expert_parallel, "routed experts", model.experts.routed, "a rank has as many each"
        )
    elif layout.expert_parallel > 1:
        raise ValueError(f"expert_parallel={layout.expert_parallel}, and {model.name} has no experts")


def _local(weight: Weight, layout: Layout) -> int:
    """Parameters of this weight on one rank."""
    copies = weight.copies // (layout.expert_parallel if weight.part == "experts" else 1)
    if weight.cut is None:
        return math.prod(weight.shape) * copies
    pieces = min(layout.tensor_parallel, weight.most or layout.tensor_parallel)
    whole_size = weight.shape[weight.cut]
    return math.prod(weight.shape) // whole_size * math.ceil(whole_size / pieces) * copies
