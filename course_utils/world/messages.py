"""A note of every `send` and `recv` of a rank: on Gloo, torch's flight recorder keeps none.

Gloo itself compares nothing but lengths: six floats sent to a receiver of four end the process, four floats sent to a
receiver of six leave two of them as they were, and float32 sent to int32 is bits taken for numbers.
"""

from __future__ import annotations

import functools

import torch.distributed as dist

NOTES: list[dict] = []  # of the call that is running


def watch() -> None:
    """Have `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv` of this process note what they are asked to do."""
    c10d = dist.distributed_c10d
    for name in ("isend", "irecv", "recv"):  # `send` calls `isend`, `recv` with a source calls `irecv`
        original = getattr(c10d, name)
        wrapped = _noting(original, name)
        for module in (c10d, dist):  # both: torch compares functions by identity
            setattr(module, name, wrapped)


def _noting(original, name):
    kind, peer_name = ("send", "dst") if name == "isend" else ("recv", "src")

    @functools.wraps(original)
    def wrapped(tensor, peer=None, group=None, tag=0, group_peer=None, **kwargs):
        peer = kwargs.pop(peer_name, peer)
        group_peer = kwargs.pop(f"group_{peer_name}", group_peer)
        if name != "recv" or (peer is None and group_peer is None):
            _note(kind, tensor, peer, group, tag, group_peer)
        return original(tensor, peer, group, tag, group_peer, **kwargs)

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
