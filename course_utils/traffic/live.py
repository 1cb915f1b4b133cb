"""The counter: a dispatch mode that sees every collective torch calls, and reads off what it communicates.

Whatever calls a collective (the learner, DDP's reducer in C++, FSDP2, DTensor, autograd) goes through torch's
dispatcher, as an operator of the namespace `c10d` or `_c10d_functional`. Operators name their arguments, so a table
from operator to reader is all that it takes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from course_utils.world.frames import is_mine

from . import cost
from .value import Bytes, Line, Row, Traffic

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


class Counting(TorchDispatchMode):
    """One `count()`: a context manager that gives the `Traffic` of its block."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.traffic: Traffic | None = None
        self.thread = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile would run eagerly inside the block, and results would change

    def __enter__(self) -> Traffic:
        if self.traffic is not None:
            raise RuntimeError("this count() has been entered before: write `with count() as traffic:` for every block")
        if not dist.is_initialized():
            raise RuntimeError(
                "count() counts in the rank that enters it, and no process group is up here: put `with count() as "
                "traffic:` into the function that you launch, and end that function with `return traffic`"
            )
        self.thread = threading.get_ident()
        self.traffic = Traffic(self.rows)
        super().__enter__()
        return self.traffic

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        object.__setattr__(self.traffic, "rows", tuple(self.rows))  # from here on it's a value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor, say: let it do its work, and see the collectives that this takes
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) in NAMESPACES:
            reader = READERS.get(func._schema.name.split("::")[1])
            if reader is not None:
                self.rows += _rows(reader, func, args, kwargs or {}, self.thread)
        return result


@dataclass(frozen=True)
class _Call:
    """One call of an operator, its arguments by name; `me` is this rank's position in the group."""

    args: dict
    group: tuple[int, ...]
    me: int

    @property
    def ranks(self) -> int:
        return len(self.group)

    def parts(self, *names: str) -> list[int]:
        """Bytes of each tensor in the argument that goes by one of these names."""
        value = next(self.args[name] for name in names if self.args.get(name) is not None)
        return [_bytes(tensor) for tensor in _flat(value)]

    def inputs(self) -> list[int]:
        return self.parts("tensors", "tensor", "input", "inputs", "input_tensor", "input_tensors", "input_list")

    def root(self, name: str) -> tuple[tuple[int, ...], int]:
        """The root as a global rank, and this rank's distance from it round the group."""
        root = self.args[name]
        return (self.group[root],), (self.me - root) % self.ranks


# what a reader gives: for each operation in the call its name, peers, size and bytes
_Reading = list[tuple[str, tuple[int, ...], int, Bytes]]


def _all_reduce(call: _Call) -> _Reading:
    size = sum(call.inputs())
    return [("all_reduce", (), size, cost.all_reduce(size, call.ranks))]


def _reduce_scatter(call: _Call) -> _Reading:
    size = sum(call.inputs())
    return [("reduce_scatter", (), size, cost.reduce_scatter(size, call.ranks))]


def _all_gather(call: _Call) -> _Reading:
    size = sum(call.inputs()) * call.ranks
    return [("all_gather", (), size, cost.all_gather(size, call.ranks))]


def _all_to_all(call: _Call) -> _Reading:
    """One tensor, cut along its first dimension: evenly, or by the sizes given; or one tensor for each rank."""
    parts = call.inputs()
    size = sum(parts)
    splits = call.args.get("input_split_sizes") or (parts if "output_tensors" in call.args else [])
    if not any(splits):
        return [("all_to_all", (), size, cost.all_to_all(size, call.ranks))]
    others = sum(splits) - splits[call.me]
    return [("all_to_all", (), size, cost.tidy(Fraction(size * others, sum(splits))))]


def _broadcast(call: _Call) -> _Reading:
    size = sum(call.inputs())
    root, position = call.root("root_rank" if "root_rank" in call.args else "src")
    return [("broadcast", root, size, cost.broadcast(size, call.ranks, position))]


def _reduce(call: _Call) -> _Reading:
    size = sum(call.inputs())
    root, position = call.root("root_rank")
    return [("reduce", root, size, cost.reduce(size, call.ranks, position))]


def _gather(call: _Call) -> _Reading:
    size = sum(call.inputs()) * call.ranks
    root, position = call.root("root_rank")
    return [("gather", root, size, cost.gather(size, call.ranks, position))]


def _scatter(call: _Call) -> _Reading:
    size = sum(call.parts("output_tensors")) * call.ranks
    root, position = call.root("root_rank")
    return [("scatter", root, size, cost.scatter(size, call.ranks, position))]


def _send(call: _Call) -> _Reading:
    size = sum(call.inputs())
    return [("send", (call.group[call.args["dst"]],), size, size)]


def _recv(call: _Call) -> _Reading:
    peer = (call.group[call.args["src"]],) if "src" in call.args else ()
    return [("recv", peer, sum(call.inputs()), 0)]


def _batch(call: _Call) -> _Reading:
    """The functional `batch_isend_irecv` that compiled code calls."""
    found = []
    for kind, peer, size in zip(call.args["op_list"], call.args["peer_list"], call.inputs(), strict=True):
        sends = kind == "isend"
        found.append(("send" if sends else "recv", (call.group[peer],), size, size if sends else 0))
    return found


def _barrier(call: _Call) -> _Reading:
    return [("barrier", (), 0, 0)]


READERS: dict[str, Callable[[_Call], _Reading]] = {
    # c10d: torch.distributed's own functions, DDP, FSDP2
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather,
    "allgather_coalesced_": _all_gather,
    "allgather_into_tensor_coalesced_": _all_gather,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "gather_": _gather,
    "scatter_": _scatter,
    "send": _send,
    "recv_": _recv,
    "recv_any_source_": _recv,
    "barrier": _barrier,
    "monitored_barrier_": _barrier,
    # _c10d_functional: functional collectives, DTensor, compiled code
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "all_reduce_coalesced_": _all_reduce,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "isend": _send,
    "irecv": _recv,
    "batch_p2p_ops": _batch,
    # _dtensor: Shard(i) -> Shard(j) on a GPU
    "shard_dim_alltoall": _all_to_all,
}


def _rows(reader: Callable[[_Call], _Reading], func, args: tuple, kwargs: dict, thread: int) -> list[Row]:
    named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    group = tuple(dist.get_process_group_ranks(_group(named)))
    rank = dist.get_rank()
    line, backward = _line(thread), torch._C._current_graph_task_id() != -1
    return [
        Row(rank, operation, group, peers, sent, line, size, backward)
        for operation, peers, size, sent in reader(_Call(named, group, group.index(rank)))
    ]


def _group(named: dict) -> dist.ProcessGroup:
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])
    name = named["group_name"]
    return dist.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name


def _line(thread: int) -> Line | None:
    """The innermost line of the learner's, in this thread; in a thread of autograd's, of the one that counts."""
    mine = None
    if threading.get_ident() != thread:
        mine = _innermost(sys._current_frames().get(thread))
    return _innermost(sys._getframe()) or mine


def _innermost(frame) -> Line | None:
    while frame is not None and not is_mine(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno)


def _flat(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        return _bytes(tensor._indices()) + _bytes(tensor._values())
    return tensor.numel() * tensor.element_size()
