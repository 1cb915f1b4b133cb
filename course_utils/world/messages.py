"""A note of what torch's flight recorder doesn't keep on Gloo: each `send` and `recv`, and each collective's root and
reduction.

Gloo itself compares nothing but lengths: six floats sent to a receiver of four end the process, four floats sent to a
receiver of six leave two of them as they were, and float32 sent to int32 is bits taken for numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect

import torch
import torch.distributed as dist

NOTES: list[dict] = []  # of the call that is running


_AGREED = {  # the arguments on which all ranks must agree, by function
    "all_reduce": ("op",),
    "reduce": ("dst", "op", "group_dst"),
    "broadcast": ("src", "group_src"),
    "gather": ("dst", "group_dst"),
    "scatter": ("src", "group_src"),
    "reduce_scatter": ("op",),
    "reduce_scatter_single": ("op",),
    "reduce_scatter_tensor": ("op",),
}


def watch(before_leaving) -> None:
    """Have this process's `torch.distributed` note what it is asked to do; `before_leaving` a group, call that."""
    c10d = dist.distributed_c10d
    for name, agreed in _AGREED.items():
        _replace(name, _agreeing(getattr(c10d, name), name, agreed))
    _replace("destroy_process_group", _leaving(c10d.destroy_process_group, before_leaving))
    _replace("init_process_group", _joining(c10d.init_process_group))
    for name in ("isend", "irecv", "recv"):  # `send` calls `isend`, `recv` with a source calls `irecv`
        original = getattr(c10d, name)
        _replace(name, _noting(original, name))


def _replace(name: str, function) -> None:
    for module in (dist.distributed_c10d, dist):  # both: torch compares functions by identity
        if hasattr(module, name):
            setattr(module, name, function)


def _agreeing(original, name: str, agreed: tuple[str, ...]):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        with contextlib.suppress(Exception):  # wrong arguments: torch says so itself
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            group = given.arguments.get("group") or dist.group.WORLD
            values = {what: _plain(given.arguments[what], what, group) for what in agreed if what in given.arguments}
            values = {what.removeprefix("group_"): v for what, v in values.items() if v is not None}
            NOTES.append(dict(kind="collective", name=name, group=group.group_name, agreed=values))
        _refuse_gaps(name, args[0] if args else kwargs.get("tensor"))
        return original(*args, **kwargs)

    return wrapped


def _refuse_gaps(name: str, tensor) -> None:
    """Gloo takes the memory from a tensor's first element on for the tensor, and says nothing where there are gaps."""
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_contiguous():
        if name in ("all_reduce", "broadcast", "reduce") and _has_gaps(tensor):
            raise ValueError(
                f"{name} of a tensor with gaps in memory (shape {list(tensor.shape)}, strides {list(tensor.stride())}"
                "): Gloo would take other numbers for its own; pass x.contiguous(), and copy the result back"
            )


def _has_gaps(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride != expected:
            return True
        expected *= size
    return False


def _plain(value, what: str, group):
    if value is None:
        return None
    if what.startswith("group_"):
        return dist.get_global_rank(group, value)
    return int(value) if what in ("src", "dst") else getattr(value, "name", None)  # a reduction with a factor has none


def _leaving(original, before):
    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        before()
        return original(*args, **kwargs)

    return wrapped


def _joining(original):
    """A script's own `init_process_group`: here its group is up already, and that is what it asks for."""

    @functools.wraps(original)
    def wrapped(backend=None, *args, **kwargs):
        if dist.is_initialized() and not args and "store" not in kwargs and backend in (None, dist.get_backend()):
            return None
        return original(backend, *args, **kwargs)

    return wrapped


def _noting(original, name):
    kind, peer_name = ("send", "dst") if name == "isend" else ("recv", "src")

    @functools.wraps(original)
    def wrapped(tensor, peer=None, group=None, tag=0, group_peer=None, **kwargs):
        peer = kwargs.pop(peer_name, peer)
        group_peer = kwargs.pop(f"group_{peer_name}", group_peer)
        if name != "recv":
            _note(kind, tensor, peer, group, tag, group_peer)
        result = original(tensor, peer, group, tag, group_peer, **kwargs)
        if name == "recv" and peer is None and group_peer is None:
            _note(kind, tensor, result, group, tag, None)  # from whom it came
        return result

    return wrapped


def _note(kind, tensor, peer, group, tag, group_peer) -> None:
    try:
        group = group or dist.group.WORLD
        if group_peer is not None:
            peer = dist.get_global_rank(group, group_peer)
        dtype = str(tensor.dtype).removeprefix("torch.")
        NOTES.append(dict(kind=kind, peer=peer, tag=tag, group=group.group_name, dtype=dtype, size=list(tensor.shape)))
    except Exception:  # wrong arguments: torch says so itself
        pass
