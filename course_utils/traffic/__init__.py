"""Traffic: what a live run communicates, counted where it happens.

`count()` collects, inside a rank, one `Row` for every collective and every `send` and `recv`, whoever calls it: the
learner, DDP, FSDP2, DTensor or a backward pass. `merge` puts the ranks' counts together in the notebook. `Row.bytes` is
what this rank sends by the definition of the standard algorithm (`course_utils.traffic.cost`), not what a backend puts
on the wire: Gloo's reduce-scatter, for one, is an all-reduce on the wire.

Modules: `value` (the value and its views), `cost` (the definition of each operation's bytes), `live` (the counter; the
only one that needs torch), `wire` (what the backend really sent).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from . import cost
from .value import Bytes, Line, Row, Traffic, merge

__all__ = ["count", "merge", "Traffic", "Row", "Line", "Bytes", "cost", "wire_bytes"]


def count() -> AbstractContextManager[Traffic]:
    """Count what this rank communicates inside a `with` block.

    The block gets a `Traffic`: it grows while the block is open and can be read there; when the block ends, by an error
    too, it is a value like any other, and the function on the rank can return it. Blocks nest, and each counts all that
    happens in it. Results are bit for bit those without counting.

    An operation is counted when torch has accepted it (an `async_op=True` one is not waited for), as what reaches the
    backend: `all_gather_object` is two `all_gather`, of lengths and of bytes; DTensor's Shard(0) -> Shard(1) is an
    `all_gather` on the CPU, where there is no all-to-all for it. Compiled code stays compiled, and is counted when it
    runs. On a GPU, a backward pass runs in a thread of autograd's: it is counted there and put on the line that
    called `backward` (written for GPUs and NCCL, not yet run on them).

    Not counted: what another thread calls (one that the learner starts; the callback of a `Future`, and so the later
    half of DDP's PowerSGD hook), the store (`new_group`, rendezvous), symmetric memory, a bare `ProcessGroupGloo`.

    Raises:
        RuntimeError: no process group is up (in the notebook, say: the block belongs in the function that is launched),
            or the same `count()` is entered twice.

    Source: the formulas are those of `course_utils.traffic.cost`; the mechanism is that of torch's `CommDebugMode`.

    >>> import torch, torch.distributed as dist
    >>> from course_utils import launch
    >>> from course_utils.traffic import count, merge
    >>> def total():
    ...     x = torch.ones(6)                 # 24 bytes
    ...     with count() as traffic:
    ...         dist.all_reduce(x)
    ...     return traffic
    >>> traffic = merge(launch(total, world_size=2))
    >>> traffic.by_rank()                     # 2 (n-1)/n S = 2 * 1/2 * 24
    {0: 24, 1: 24}
    >>> traffic.only(lambda row: row.rank == 0).calls()
    {'all_reduce': 1}
    """
    from .live import Counting

    return Counting()


def wire_bytes() -> int | None:
    """Bytes that the open TCP connections of this process have sent so far; None where the system does not say.

    The difference of two calls around a collective, with a barrier before each, is what the backend has put on the
    wire on this rank, whoever else uses the network meanwhile; what was sent again is not counted, and connections must
    stay open between the two calls. Gloo adds some bytes of its own for each message. Linux 4.19 or newer only; shared
    memory and InfiniBand are not seen, so it says nothing about NCCL.

    Source: `struct tcp_info` of Linux, `tcpi_bytes_sent` less `tcpi_bytes_retrans`.

    >>> import torch, torch.distributed as dist
    >>> from course_utils import launch
    >>> def share_of_the_wire():
    ...     x = torch.ones(2**20, device="cpu")          # 4 MiB
    ...     dist.barrier()
    ...     before = wire_bytes()
    ...     dist.all_reduce(x)
    ...     dist.barrier()
    ...     after = wire_bytes()
    ...     return None if after is None else round((after - before) / 2**22, 1)
    >>> set(launch(share_of_the_wire, world_size=4, device="cpu")) <= {1.5, None}    # 2 (n-1)/n
    True
    """
    from .wire import sent_over_tcp

    return sent_over_tcp()
