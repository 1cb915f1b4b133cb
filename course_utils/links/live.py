"""The process group that keeps the time of a chosen link.

`EmulatedGroup` hands every operation to Gloo and returns a `Work` that is not done before the operation's cost on the
link has passed, so that overlap with compute behaves as on a real link. An operation starts when its last member has
called it and every member's link is free; the members of a world tell each other when that was on a *board*, a piece of
memory that all of them see. Steps and bytes of each operation are those of `course_utils.collectives.costs`.

Results are Gloo's own, bit for bit. What is emulated is time: an operation can't be faster than Gloo is here, so links
should be slow enough for that (`slower`): milliseconds, not microseconds.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work

from course_utils.collectives import costs
from course_utils.timeline import note

BACKEND = "emulated"
_COUNTER = itertools.count()
SLOTS, MEMORY, RANKS = 1024, 64, 128  # groups, operations of a group that are remembered, members
BOARD_BYTES = 8 * (SLOTS * MEMORY * RANKS + RANKS * RANKS * MEMORY)


class Board:
    """When each member of each group was ready for its last operations, in seconds of the machine's one clock."""

    def __init__(self, memory):
        numbers = np.frombuffer(memory, dtype=np.float64, count=BOARD_BYTES // 8)
        self.collective = numbers[: SLOTS * MEMORY * RANKS].reshape(SLOTS, MEMORY, RANKS)
        self.message = numbers[SLOTS * MEMORY * RANKS :].reshape(RANKS, RANKS, MEMORY)


class Queues:
    """When this rank's links are free again: one queue for each kind of link and direction, whatever the group."""

    def __init__(self):
        self.free: dict[tuple[str, str], float] = {}

    def at(self, kind: str, way: str) -> float:
        return self.free.get((kind, way), 0.0)

    def take(self, kind: str, way: str, until: float) -> None:
        self.free[kind, way] = max(until, self.at(kind, way))


def register(links, board) -> str:
    """Make the backend known to torch in this process; its name."""
    world = Board(board), Queues()

    def create(options, _):
        return EmulatedGroup(options, links, *world)

    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return BACKEND


class LateWork(Work):
    """Work that is done when Gloo has done it and its time on the link has passed."""

    def __init__(self, inner: Work, due, value=None):
        super().__init__()
        self.inner, self.due, self.value, self.future = inner, due, value, None

    def wait(self, timeout=None) -> bool:
        self.inner.wait()
        time.sleep(max(0.0, self.due(self.inner) - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        return self.inner.is_completed() and time.monotonic() >= self.due(self.inner)

    def result(self):
        return self.value

    def source_rank(self) -> int:
        return self.inner._source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:  # DDP's reducer waits on futures
        if self.future is None:
            self.future = torch.futures.Future()

            def finish():
                try:
                    self.wait()
                    self.future.set_result(self.value)
                except Exception as error:
                    self.future.set_exception(error)

            threading.Thread(target=finish, daemon=True).start()
        return self.future


class EmulatedGroup(ProcessGroup):
    def __init__(self, options, links, board: Board, queues: Queues):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self.members = list(options.global_ranks_in_group) or list(range(size))
        self.kind, self.link = links.kind(self.members)
        self.links, self.board, self.queues = links, board, queues
        self.calls = 0
        self.under_way: weakref.WeakSet[LateWork] = weakref.WeakSet()  # collectives of this rank
        self.messages: dict[tuple, int] = {}
        self.slot = self._slot(options.store)
        # Gloo, behind a group of torch's own: so that what is called on it is seen by whoever watches the dispatcher
        gloo = ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
        gloo.options.global_ranks_in_group = self.members
        gloo.options.group_name = options.group_id
        self.inner = ProcessGroup(options.store, rank, size)
        self.inner._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.inner._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self.inner._set_group_name(options.group_id)
        dist.distributed_c10d._world.pg_group_ranks[self.inner] = {r: i for i, r in enumerate(self.members)}
        # torch keeps a group's name in a backend that is registered with it
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, gloo)
        self._set_group_name(options.group_id)

    def _slot(self, store) -> int:
        """A place on the board for this group: its first member takes one of its own sixteen and tells the others."""
        if self.rank() == 0:
            slot = (self.members[0] % (SLOTS // 16)) * 16 + next(_COUNTER) % 16
            store.set("links/slot", str(slot))
            return slot
        return int(store.get("links/slot"))

    # ------------------------------------------------------------ time

    def _collective(self, name: str, cost: costs.Cost, *arguments, waits_for=None) -> LateWork:
        """Run it on Gloo; it is done its cost after the last of the members it `waits_for` (all, if None) was ready."""
        if len(self.under_way) >= MEMORY - 1:
            for work in list(self.under_way):
                work.is_completed()  # done, and nobody has asked yet
        if len(self.under_way) >= MEMORY - 1:  # another rank may be one ahead
            raise RuntimeError(
                f"{MEMORY - 1} collectives are under way on this group, as many as emulated links keep in mind: wait "
                "for some of them before you start another"
            )
        seconds = self.link.seconds(cost.steps, float(cost.bytes))
        row = self.board.collective[self.slot, self.calls % MEMORY]
        self.calls += 1
        ready = max(time.monotonic(), self.queues.at(self.kind, "out"))
        row[self.rank()] = ready  # before Gloo starts: whoever has heard from this rank must find it here
        self.queues.take(self.kind, "out", ready + seconds)
        members = range(self.size()) if waits_for is None else waits_for

        end = None

        def due(_) -> float:  # asked once Gloo is done: then everybody who had to come has come
            nonlocal end
            if end is None:
                start = max(ready, *(row[i] for i in members)) if members else ready
                end = start + seconds
                self.queues.take(self.kind, "out", end)
                self.under_way.discard(work)
                note("communication", name.strip("_"), start, end)
            return end

        if arguments[-1] is None:  # no options: torch has defaults of its own
            arguments = arguments[:-1]
        work = LateWork(getattr(self.inner, name)(*arguments), due, value=next(iter(arguments), None))
        self.under_way.add(work)
        return work

    def _from_root(self, root: int) -> list[int]:
        return [] if self.rank() == root else [root]

    def _to_root(self, root: int) -> list[int]:
        return list(range(self.size())) if self.rank() == root else []

    # ------------------------------------------------------------ collectives

    def allreduce(self, tensors, opts=None):
        return self._collective("allreduce", costs.ring_all_reduce(_bytes(tensors), self.size()), tensors, opts)

    def allreduce_coalesced(self, tensors, opts=None):
        cost = costs.ring_all_reduce(_bytes(tensors), self.size())
        return self._collective("allreduce_coalesced", cost, tensors, opts)

    def _gathering(name):
        def operation(self, outputs, inputs, opts=None):
            cost = costs.ring_all_gather(self.size() * _bytes(inputs), self.size())
            return self._collective(name, cost, outputs, inputs, opts)

        operation.__name__ = name
        return operation

    def _scattering(name):
        def operation(self, outputs, inputs, opts=None):
            cost = costs.ring_reduce_scatter(self.size() * _bytes(outputs), self.size())
            return self._collective(name, cost, outputs, inputs, opts)

        operation.__name__ = name
        return operation

    allgather = _gathering("allgather")
    allgather_coalesced = _gathering("allgather_coalesced")
    _allgather_base = _gathering("_allgather_base")
    all_gather_single = _gathering("_allgather_base")
    allgather_into_tensor_coalesced = _gathering("allgather_into_tensor_coalesced")
    all_gather_single_coalesced = _gathering("allgather_into_tensor_coalesced")
    reduce_scatter = _scattering("reduce_scatter")
    _reduce_scatter_base = _scattering("_reduce_scatter_base")
    reduce_scatter_single = _scattering("_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = _scattering("reduce_scatter_tensor_coalesced")
    reduce_scatter_single_coalesced = _scattering("reduce_scatter_tensor_coalesced")

    def broadcast(self, tensors, opts):
        cost = costs.tree_broadcast(_bytes(tensors), self.size())
        return self._collective("broadcast", cost, tensors, opts, waits_for=self._from_root(opts.rootRank))

    def reduce(self, tensors, opts):
        cost = costs.tree_reduce(_bytes(tensors), self.size())
        return self._collective("reduce", cost, tensors, opts, waits_for=self._to_root(opts.rootRank))

    def gather(self, outputs, inputs, opts):
        cost = costs.tree_gather(self.size() * _bytes(inputs), self.size())
        return self._collective("gather", cost, outputs, inputs, opts, waits_for=self._to_root(opts.rootRank))

    def scatter(self, outputs, inputs, opts):
        cost = costs.tree_scatter(self.size() * _bytes(outputs), self.size())
        return self._collective("scatter", cost, outputs, inputs, opts, waits_for=self._from_root(opts.rootRank))

    def alltoall_base(self, output, input, output_sizes, input_sizes, opts=None):
        rows, mine = input.shape[0], self.rank()
        others = 1 - (input_sizes[mine] / rows if any(input_sizes) and rows else 1 / self.size())
        cost = costs.Cost(self.size() - 1, round(_bytes(input) * others))
        return self._collective("alltoall_base", cost, output, input, output_sizes, input_sizes, opts)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs, inputs, opts=None):
        cost = costs.Cost(self.size() - 1, _bytes(inputs) - _bytes(inputs[self.rank()]))
        return self._collective("alltoall", cost, outputs, inputs, opts)

    def barrier(self, opts=None):
        return self._collective("barrier", costs.barrier(self.size()), opts)

    # ------------------------------------------------------------ messages

    def _place(self, way: str, peer: int, tag: int) -> tuple[int, int]:
        """Where on the board the sender of a message tells its receiver when it arrives."""
        count = self.messages.get((way, peer, tag), 0)
        self.messages[way, peer, tag] = count + 1
        return (count + 5 * tag + 11 * self.slot) % MEMORY

    def send(self, tensors, peer: int, tag: int):
        kind, link = self.links.kind([self.members[self.rank()], self.members[peer]])
        size = _bytes(tensors)
        start = max(time.monotonic(), self.queues.at(kind, "out"))
        end = start + link.seconds(1, size)
        self.queues.take(kind, "out", end)
        note("communication", f"send to {self.members[peer]}", start, end)
        self.board.message[self.members[self.rank()], self.members[peer], self._place("out", peer, tag)] = end
        return LateWork(self.inner.send(tensors, peer, tag), lambda _: end)

    def recv(self, tensors, peer: int, tag: int):
        return self._receiving(self.inner.recv(tensors, peer, tag), _bytes(tensors), tag, lambda _: peer)

    def recv_anysource(self, tensors, tag: int):
        work = self.inner.recv_anysource(tensors, tag)
        return self._receiving(work, _bytes(tensors), tag, lambda work: work._source_rank())

    def _receiving(self, work, size: int, tag: int, source) -> LateWork:
        """Done when the sender's link has passed it on, and what came before it is through this rank's own."""
        arrival = None

        def due(work) -> float:
            nonlocal arrival
            if arrival is None:
                peer = source(work)
                kind, link = self.links.kind([self.members[peer], self.members[self.rank()]])
                place = self._place("in", peer, tag)
                sent = self.board.message[self.members[peer], self.members[self.rank()], place]
                arrival = max(sent, self.queues.at(kind, "in") + link.seconds(0, size))
                self.queues.take(kind, "in", arrival)
            return arrival

        return LateWork(work, due)

    def getBackendName(self) -> str:
        return BACKEND

    def _set_sequence_number_for_group(self) -> None:
        pass


def _bytes(tensors) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))
