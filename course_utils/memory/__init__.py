"""Memory: what a rank of a training run holds, by formula and by measurement.

The value is a `Memory`: bytes by purpose. The arithmetic produces it from numbers alone and needs no torch:

    model_states, deepspeed_states          parameters, gradients, optimizer: DDP and the stages of ZeRO
    activations, layer_terms, in_flight     what a transformer layer keeps for backward, and how many micro-batches do
    training_memory                         a published `Model` on a `Layout` of data, tensor, pipeline, context and
                                            expert parallelism
    ddp_states, zero_redundancy_states,     the same to the byte, as torch does it, with a name for every difference
    fsdp_states, torch_terms                from the formula

and a live rank can be measured, which needs torch: `measure_states`, `saved_bytes`. Precisions and optimizers are data
(`optimizers`). `course_utils.plots.memory_bars` draws.

Modules: `value`, `views`, `saved` (values and views); `optimizers`, `states`, `activations`, `layout`, `training`,
`exact` (arithmetic); `layer`, `live` (torch); `checks`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from .activations import Recompute, activations, in_flight, layer_terms
from .exact import ddp_states, fsdp_states, torch_terms, zero_redundancy_states
from .layout import Held, Layout, held_parameters, stage_layers
from .optimizers import (
    ADAM,
    ADAM_8BIT,
    BF16,
    BF16_FP32_MOMENTS,
    FP32,
    MEGATRON_BF16,
    MEGATRON_FP16,
    MIXED_BF16,
    MIXED_FP16,
    MOMENTUM,
    MUON,
    SGD,
    Optimizer,
    Precision,
)
from .saved import Saved, SavedTensor
from .states import deepspeed_states, model_states
from .training import layer_activations, training_memory
from .value import Bytes, Memory, side_by_side

if TYPE_CHECKING:
    import torch
    from torch import nn

_NEED_TORCH = ("transformer_layer", "unfused_attention", "fused_attention")

__all__ = [
    "ADAM", "ADAM_8BIT", "BF16", "BF16_FP32_MOMENTS", "FP32", "MEGATRON_BF16", "MEGATRON_FP16", "MIXED_BF16",
    "MIXED_FP16", "MOMENTUM", "MUON", "SGD", "Bytes", "Held", "Layout", "Memory", "Optimizer", "Precision",
    "Recompute", "Saved", "SavedTensor", "activations", "ddp_states", "deepspeed_states", "fsdp_states",
    "held_parameters", "in_flight", "layer_activations", "layer_terms", "measure_states", "model_states", "saved_bytes",
    "shapes_of", "side_by_side", "stage_layers", "torch_terms", "training_memory", "zero_redundancy_states",
    *_NEED_TORCH,
]  # fmt: skip


def measure_states(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Memory:
    """Bytes of a model's parameters and gradients, and of an optimizer's state, on this rank, at this moment.

    Tensors are counted by their storage, each once. It knows DDP, `ZeroRedundancyOptimizer` and FSDP2, whatever they
    hold besides: step counters, bucket copies (by DDP's own account: the buckets are in C++), padding, parameters that
    are gathered at the moment, buffers. After a step it equals `ddp_states`, `zero_redundancy_states` or `fsdp_states`
    to the byte. Optimizer state exists from the first step on, gradients until `zero_grad`.

    Args:
        model: a module, wrapped or sharded or neither.
        optimizer: of its parameters; None to leave the state out.

    Raises:
        TypeError: these are no module and no optimizer.

    >>> import torch
    >>> model = torch.nn.Linear(7, 33)
    >>> adam = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(2, 7)).sum().backward()
    >>> adam.step()
    >>> measure_states(model, adam)
    purpose                      bytes
    parameters                 1,056 B
    gradients                  1,056 B
    optimizer                  2,112 B
    optimizer's step counters      8 B
    total                      4,232 B
    """
    from . import live

    return live.measure_states(model, optimizer)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The whole shapes of a model's parameters by name, as `ddp_states` and its like take them; a tied one once.

    Raises:
        TypeError: this is no module.

    >>> import torch
    >>> shapes_of(torch.nn.Linear(7, 33))
    {'weight': (33, 7), 'bias': (33,)}
    """
    from . import live

    return live.shapes_of(model)


def saved_bytes() -> AbstractContextManager[Saved]:
    """Count what autograd keeps for the backward pass of what is computed in a `with` block.

    The block gets a `Saved`: one `SavedTensor` for each storage that some operation saves. A storage counts once, and
    whole, however many tensors are views of it; parameters, and views of them, do not count; a dropout mask counts as
    what it is (on the CPU a tensor of the values' type, on a GPU of one byte each). Where a checkpoint recomputes, what
    happens inside it is not kept and not counted; its inputs are. It counts everything that was saved in the block,
    also for a result that has been dropped since. Results are those without counting.

    Not seen, because autograd does not hold it: numbers, shapes, the generator's state that a checkpoint remembers.

    Raises:
        RuntimeError: the same `saved_bytes()` is entered twice.

    Source: the mechanism is `torch.autograd.graph.saved_tensors_hooks`.

    >>> import torch
    >>> x = torch.ones(3, 4, requires_grad=True)
    >>> with saved_bytes() as saved:
    ...     y = x.exp().sum()           # exp keeps its result
    >>> saved.bytes
    48
    """
    from .live import Saving

    return Saving()


def __getattr__(name: str):
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'course_utils.memory' has no attribute {name!r}")
    from . import layer

    return getattr(layer, name)
