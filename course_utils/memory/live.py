"""Measuring a live rank: its model states, and what autograd keeps. Needs torch; reads torch 2.13's FSDP2 and DDP."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.traffic.value import Line

from .exact import BUCKETS, BUFFERS, GATHERED, GRADIENT_PADDING, PARAMETER_PADDING, STEP_COUNTERS, Shape
from .saved import Saved, SavedTensor
from .value import Memory

_TORCH = os.path.dirname(torch.__file__) + os.sep


def measure_states(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Memory:
    """See `course_utils.memory.measure_states`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: a torch module was expected")
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: a torch optimizer or None was expected")
    sharded = list(_fsdp_parameters(model))
    parameters = _parameters(model, sharded)
    padded = [*parameters, *(one._sharded_param_data for one in sharded)]  # what a shard is a slice of
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gathered = [whole for one in sharded for whole in (*one.all_gather_outputs, *_unsharded(one))]
    counters, moments = _optimizer_state(optimizer)
    extra = {
        STEP_COUNTERS: _stored(counters),
        PARAMETER_PADDING: _stored(padded) - _local_bytes(parameters),
        GATHERED: _stored(gathered),
        BUFFERS: _stored(model.buffers()),
    }
    if isinstance(model, DistributedDataParallel):
        shared = _local_bytes(gradients) if model.gradient_as_bucket_view else 0
        extra[BUCKETS] = _bucket_bytes(model) - shared
    else:
        extra[GRADIENT_PADDING] = _stored(gradients) - _local_bytes(gradients)
    return Memory(
        parameters=_local_bytes(parameters), gradients=_local_bytes(gradients), optimizer=_stored(moments), extra=extra
    )


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """See `course_utils.memory.shapes_of`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: a torch module was expected")
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


class Saving(torch.autograd.graph.saved_tensors_hooks):
    """One `saved_bytes()`: a context manager that gives the `Saved` of its block."""

    def __init__(self) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.saved: Saved | None = None
        self.storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice in the block

    def __enter__(self) -> Saved:
        if self.saved is not None:
            raise RuntimeError("this saved_bytes() has been entered before: write `with saved_bytes() as saved:` anew")
        self.saved = Saved([])
        super().__enter__()
        return self.saved

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.storages.clear()
        object.__setattr__(self.saved, "tensors", tuple(self.saved.tensors))  # from here on it's a value

    def _pack(self, tensor: Tensor) -> Tensor:
        if not _of_parameter(tensor):
            storage = _local(tensor).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self.storages:
                self.storages[storage.data_ptr()] = storage
                kind = str(tensor.dtype).removeprefix("torch.")
                self.saved.tensors.append(SavedTensor(tuple(tensor.shape), kind, storage.nbytes(), _line()))
        return tensor


def _is(value: object, module: str, name: str) -> bool:
    """isinstance, for a class that takes torch seconds to import: without its module, nobody has an instance."""
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def _of_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a view of one, such as the transposed weight that a linear layer saves."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _line() -> Line | None:
    frame = sys._getframe()
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno)


def _parameters(model: nn.Module, sharded: list) -> list[Tensor]:
    """Every parameter once; of those that FSDP2 manages the shard, also while the module shows the whole."""
    wholes = {id(whole) for one in sharded for whole in _unsharded(one)}
    shards = [one.sharded_param for one in sharded]
    known = {id(shard) for shard in shards}
    others = [parameter for parameter in model.parameters() if id(parameter) not in wholes | known]
    return [*shards, *others]


def _fsdp_parameters(model: nn.Module) -> Iterator:
    modules = (module for module in model.modules() if _is(module, "torch.distributed.fsdp", "FSDPModule"))
    groups = (group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups)
    for group in dict.fromkeys(groups):  # each once: the modules of one `fully_shard([a, b])` share theirs
        yield from group.fsdp_params


def _unsharded(fsdp_parameter) -> list[Tensor]:
    return [fsdp_parameter._unsharded_param] if hasattr(fsdp_parameter, "_unsharded_param") else []


def _bucket_bytes(model: DistributedDataParallel) -> int:
    """Bytes of DDP's buckets, by its own account: they belong to its reducer, in C++."""
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return sum(int(size) for size in sizes.split(","))


def _optimizer_state(optimizer: torch.optim.Optimizer | None) -> tuple[list[Tensor], list[Tensor]]:
    """Step counters, and everything else."""
    if _is(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
        optimizer = optimizer.optim  # what this rank updates
    items = [item for state in optimizer.state.values() for item in state.items()] if optimizer is not None else []
    tensors = [(key, value) for key, value in items if isinstance(value, Tensor)]
    return [value for key, value in tensors if key == "step"], [value for key, value in tensors if key != "step"]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if _is(tensor, "torch.distributed.tensor", "DTensor") else tensor


@torch.no_grad()
def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def _stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each counted once."""
    storages = (_local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
