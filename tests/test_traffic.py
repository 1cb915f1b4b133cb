"""Traffic: what live ranks communicate, against counts made by hand.

Every expected number is written out, with its arithmetic beside it. float32 has 4 bytes; n is the number of ranks; S,
in bytes, is the array that the operation's definition speaks of.
"""

import concurrent.futures
import contextlib
import functools
import pickle
import subprocess
import sys
import threading
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from course_utils import World, launch
from course_utils.traffic import Line, Row, Traffic, cost, count, merge

SIZES = (2, 3, 4)


@pytest.fixture(scope="module")
def kept_worlds():
    with contextlib.ExitStack() as stack:
        yield {n: stack.enter_context(World(n)) for n in SIZES}


@pytest.fixture
def worlds(kept_worlds):
    """Worlds of 2, 3 and 4 ranks, kept for the whole module; after a failure, a new one."""
    yield kept_worlds
    for n, world in kept_worlds.items():
        if "closed" in repr(world):
            kept_worlds[n] = World(n)


def counted(world, fn, *args):
    """Each rank's Traffic of a function."""

    def on_rank():
        with count() as traffic:
            fn(*args)
        return traffic

    return world.run(on_rank)


def sent(parts):
    """For each rank its (operation, bytes), in order."""
    return [[(row.operation, row.bytes) for row in part] for part in parts]


def empties(n, numel=3):
    return [torch.empty(numel) for _ in range(n)]


# ---------------------------------------------------------------- every collective, at 2, 3 and 4 ranks
# Tensors of 12 floats, S = 48 bytes, or of 3 floats on each rank (12 bytes), gathered to a whole of n * 12.


def all_reduce():
    dist.all_reduce(torch.ones(12))


def reduce_scatter():
    n = dist.get_world_size()
    dist.reduce_scatter_single(torch.empty(12 // n), torch.ones(12))


def all_gather():
    dist.all_gather_single(torch.empty(3 * dist.get_world_size()), torch.ones(3))


def all_to_all():
    dist.all_to_all_single(torch.empty(12), torch.ones(12))


def broadcast_from_1():
    dist.broadcast(torch.ones(12), src=1)


def reduce_to_1():
    dist.reduce(torch.ones(12), dst=1)


def gather_to_1():
    dist.gather(torch.ones(3), empties(dist.get_world_size()) if dist.get_rank() == 1 else None, dst=1)


def scatter_from_1():
    dist.scatter(torch.empty(3), empties(dist.get_world_size()) if dist.get_rank() == 1 else None, src=1)


def barrier():
    dist.barrier()


BY_HAND = {
    # 2 (n-1)/n * 48: 2 * 1/2 * 48, 2 * 2/3 * 48, 2 * 3/4 * 48
    all_reduce: {2: [48] * 2, 3: [64] * 3, 4: [72] * 4},
    # (n-1)/n * 48: 1/2 * 48, 2/3 * 48, 3/4 * 48
    reduce_scatter: {2: [24] * 2, 3: [32] * 3, 4: [36] * 4},
    # (n-1)/n * (n * 12): each rank passes on n-1 pieces of 12
    all_gather: {2: [12] * 2, 3: [24] * 3, 4: [36] * 4},
    # each rank keeps one n-th of its 48 bytes
    all_to_all: {2: [24] * 2, 3: [32] * 3, 4: [36] * 4},
    # a chain 1 -> 2 -> ... -> 0: everybody passes 48 bytes on, but for rank 0, the last
    broadcast_from_1: {2: [0, 48], 3: [0, 48, 48], 4: [0, 48, 48, 48]},
    # the chain run backwards: everybody passes a partial sum of 48 bytes on, but for the root
    reduce_to_1: {2: [48, 0], 3: [48, 0, 48], 4: [48, 0, 48, 48]},
    # everybody but the root sends its own 12 bytes
    gather_to_1: {2: [12, 0], 3: [12, 0, 12], 4: [12, 0, 12, 12]},
    # the root sends 12 bytes to each of the n-1 others
    scatter_from_1: {2: [0, 12], 3: [0, 24, 0], 4: [0, 36, 0, 0]},
    barrier: {2: [0] * 2, 3: [0] * 3, 4: [0] * 4},
}


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("collective", BY_HAND, ids=lambda fn: fn.__name__)
def test_every_collective_costs_what_was_counted_by_hand(worlds, collective, world_size):
    name = collective.__name__.removesuffix("_from_1").removesuffix("_to_1")
    root = (1,) if collective.__name__.endswith("_1") else ()
    parts = counted(worlds[world_size], collective)
    assert [len(part) for part in parts] == [1] * world_size
    rows = [part.rows[0] for part in parts]
    assert [row.rank for row in rows] == list(range(world_size))
    assert {(row.operation, row.group, row.peers, row.backward) for row in rows} == {
        (name, tuple(range(world_size)), root, False)
    }
    assert [row.bytes for row in rows] == BY_HAND[collective][world_size]


def test_the_size_is_the_s_of_the_definition(worlds):
    # 3 ranks: tensors of 48 bytes whole; pieces of 12 bytes make a whole of 36
    whole = {c.__name__: counted(worlds[3], c)[0].rows[0].size for c in BY_HAND}
    pieces = ("all_gather", "gather_to_1", "scatter_from_1")
    assert whole == {c.__name__: 36 if c.__name__ in pieces else 48 for c in BY_HAND} | {"barrier": 0}


def test_a_single_rank_sends_nothing():
    def everything():
        with count() as traffic:
            x = torch.ones(4)
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.reduce(x, 0)
            dist.all_gather_single(torch.empty(4), x)
            dist.reduce_scatter_single(torch.empty(4), x)
            dist.all_to_all_single(torch.empty(4), x)
            dist.gather(x, empties(1, 4), 0)
            dist.scatter(x, empties(1, 4), 0)
            dist.barrier()
        return traffic

    (traffic,) = launch(everything, world_size=1)
    assert len(traffic) == 9
    assert traffic.total() == 0


def test_a_share_that_is_no_whole_number_of_bytes_stays_exact(worlds):
    # 4 floats, 16 bytes, on 3 ranks: 2 * 2/3 * 16 = 64/3 a rank, 64 together
    parts = counted(worlds[3], lambda: dist.all_reduce(torch.ones(4)))
    assert [part.total() for part in parts] == [Fraction(64, 3)] * 3
    assert merge(parts).total() == 64
    assert type(merge(parts).total()) is int


def test_a_ring_of_sends_written_by_hand_costs_what_all_reduce_is_said_to_cost(worlds):
    """The independent computation: the ring itself, counted message by message."""

    def ring():
        n, rank = dist.get_world_size(), dist.get_rank()
        chunks = list(torch.arange(12.0).add(rank).chunk(n))
        for step in range(2 * (n - 1)):
            give, take = (rank - step) % n, (rank - step - 1) % n
            came = torch.empty_like(chunks[take])
            request = dist.isend(chunks[give], (rank + 1) % n)
            dist.recv(came, (rank - 1) % n)
            request.wait()
            chunks[take] = chunks[take] + came if step < n - 1 else came
        return torch.cat(chunks)

    def both():
        with count() as by_hand:
            result = ring()
        with count() as at_once:
            expected = torch.arange(12.0) + dist.get_rank()
            dist.all_reduce(expected)
        return by_hand, at_once, torch.equal(result, expected)

    for n in SIZES:
        for by_hand, at_once, equal in worlds[n].run(both):
            assert equal
            assert by_hand.calls() == {"send": 2 * (n - 1), "recv": 2 * (n - 1)}
            assert by_hand.total() == at_once.total()


# ---------------------------------------------------------------- however it is spelled


def _coalesced(call, async_ops=True):
    with dist._coalescing_manager(async_ops=async_ops) as manager:
        call()
    if async_ops:
        manager.wait()


def _two(function, *shapes):
    def both():
        for shape in shapes:
            function(*(torch.ones(k) for k in shape))

    return both


# Two ranks. For each spelling: what it is, and what one rank sends.
SPELLINGS = {
    # all_reduce: 2 * 1/2 * S = S
    "async": (lambda: dist.all_reduce(torch.ones(8), async_op=True).wait(), [("all_reduce", 32)]),
    "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([torch.ones(3), torch.ones(5)]), [("all_reduce", 32)]),
    "coalescing all_reduce": (lambda: _coalesced(_two(dist.all_reduce, (3,), (5,))), [("all_reduce", 32)]),
    "functional all_reduce": (lambda: funcol.all_reduce(torch.ones(8), "sum", [0, 1]), [("all_reduce", 32)]),
    "functional all_reduce_coalesced": (
        lambda: funcol.all_reduce_coalesced([torch.ones(3), torch.ones(5)], "sum", [0, 1]),
        [("all_reduce", 32)],
    ),
    # reduce_scatter: 1/2 of the whole input
    "list reduce_scatter": (lambda: dist.reduce_scatter(torch.empty(4), empties(2, 4)), [("reduce_scatter", 16)]),
    "coalescing reduce_scatter": (  # inputs of 6 and 8 floats: 1/2 * 56
        lambda: _coalesced(_two(dist.reduce_scatter_single, (3, 6), (4, 8)), async_ops=False),
        [("reduce_scatter", 28)],
    ),
    "functional reduce_scatter": (
        lambda: funcol.reduce_scatter_single(torch.ones(8), "sum", 0, [0, 1]),
        [("reduce_scatter", 16)],
    ),
    "functional reduce_scatter_coalesced": (
        lambda: funcol.reduce_scatter_single_coalesced([torch.ones(4), torch.ones(4)], "sum", [0, 0], [0, 1]),
        [("reduce_scatter", 16)],
    ),
    # all_gather: 1/2 of the whole output, which is this rank's piece
    "list all_gather": (lambda: dist.all_gather(empties(2), torch.ones(3)), [("all_gather", 12)]),
    "all_gather_coalesced": (
        lambda: dist.all_gather_coalesced(
            [[torch.empty(3), torch.empty(2)] for _ in "ab"], [torch.ones(3), torch.ones(2)]
        ),
        [("all_gather", 20)],
    ),
    "coalescing all_gather": (
        lambda: _coalesced(_two(dist.all_gather_single, (6, 3), (8, 4))),
        [("all_gather", 28)],
    ),
    "functional all_gather": (lambda: funcol.all_gather_single(torch.ones(3), 0, [0, 1]), [("all_gather", 12)]),
    "functional all_gather_coalesced": (
        lambda: funcol.all_gather_single_coalesced([torch.ones(3), torch.ones(2)], [0, 1]),
        [("all_gather", 20)],
    ),
    # all_to_all: all but the half that stays
    "list all_to_all": (lambda: dist.all_to_all(empties(2), empties(2)), [("all_to_all", 12)]),
    "functional all_to_all": (
        lambda: funcol.all_to_all_single(torch.ones(8), None, None, [0, 1]),
        [("all_to_all", 16)],
    ),
    # from rank 0: it alone has somebody to pass it on to
    "functional broadcast": (lambda: funcol.broadcast(torch.ones(8), 0, [0, 1]), [("broadcast", 32)]),
    "monitored_barrier": (lambda: dist.monitored_barrier(), [("barrier", 0)]),
    "old all_gather": (lambda: dist.all_gather_into_tensor(torch.empty(6), torch.ones(3)), [("all_gather", 12)]),
    "old reduce_scatter": (
        lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8)),
        [("reduce_scatter", 16)],
    ),
    "bfloat16": (lambda: dist.all_reduce(torch.ones(8, dtype=torch.bfloat16)), [("all_reduce", 16)]),
    "float64": (lambda: dist.all_reduce(torch.ones(8, dtype=torch.float64)), [("all_reduce", 64)]),
    "complex64": (lambda: dist.all_reduce(torch.ones(8, dtype=torch.complex64)), [("all_reduce", 64)]),
    "empty": (lambda: dist.all_reduce(torch.ones(0)), [("all_reduce", 0)]),
    "empty all_to_all": (lambda: dist.all_to_all_single(torch.empty(0), torch.empty(0)), [("all_to_all", 0)]),
    "a non-contiguous part": (lambda: dist.broadcast(torch.ones(4, 4)[:2].contiguous(), 0), [("broadcast", 32)]),
    "nothing": (lambda: torch.ones(3) @ torch.ones(3), []),
    "new_group": (lambda: dist.new_group([0, 1]), []),
    "device mesh": (lambda: init_device_mesh("cpu", (2,)), []),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.filterwarnings("ignore")
def test_one_name_and_one_cost_however_it_is_spelled(worlds, spelling):
    call, expected = SPELLINGS[spelling]
    assert sent(counted(worlds[2], call))[0] == expected


def test_inference_mode_hides_nothing(worlds):
    def inference():
        with torch.inference_mode():
            funcol.all_gather_single_autograd(torch.ones(3), 0, dist.group.WORLD)
            dist.all_reduce(torch.ones(8))

    # 1/2 * 24; 2 * 1/2 * 32
    assert sent(counted(worlds[2], inference)) == [[("all_gather", 12), ("all_reduce", 32)]] * 2


def test_objects_are_counted_as_the_tensors_they_travel_in(worlds):
    def objects():
        dist.all_gather_object([None, None], "x")
        dist.broadcast_object_list(["x"], src=0)

    zero, one = counted(worlds[2], objects)
    # lengths (an int64, 8 bytes a rank), then the pickled bytes
    assert [row.operation for row in zero] == ["all_gather", "all_gather", "broadcast", "broadcast"]
    pickled = zero.rows[1].bytes
    assert 0 < pickled < 100
    assert [row.bytes for row in zero] == [8, pickled, 8, zero.rows[3].size]
    assert [row.bytes for row in one] == [8, pickled, 0, 0]


def test_uneven_all_to_all_counts_what_goes_to_the_others(worlds):
    # rows of 2 floats, 8 bytes. Rank 0 keeps 1 and sends 2 + 3, rank 1 keeps 0 and sends 4 + 1, rank 2 sends 0 + 0.
    plan = [[1, 2, 3], [4, 0, 1], [0, 0, 5]]

    def single():
        rank = dist.get_rank()
        into = [row[rank] for row in plan]
        dist.all_to_all_single(torch.empty(sum(into), 2), torch.ones(sum(plan[rank]), 2), into, plan[rank])

    def functional():
        rank = dist.get_rank()
        into = [row[rank] for row in plan]
        funcol.all_to_all_single(torch.ones(sum(plan[rank]), 2), into, plan[rank], dist.group.WORLD)

    for call in (single, functional):
        parts = counted(worlds[3], call)
        assert sent(parts) == [[("all_to_all", 40)], [("all_to_all", 40)], [("all_to_all", 0)]]  # 5 * 8, 5 * 8, 0
        assert [part.rows[0].size for part in parts] == [48, 40, 40]  # 6 * 8, 5 * 8, 5 * 8


# ---------------------------------------------------------------- send and recv


def test_send_and_recv_name_their_peer_and_only_the_sender_pays(worlds):
    def pass_on():
        if dist.get_rank() == 2:
            dist.send(torch.ones(5), 0)
            dist.isend(torch.ones(6), 0).wait()
        if dist.get_rank() == 0:
            dist.recv(torch.empty(5), 2)
            dist.irecv(torch.empty(6), 2).wait()

    zero, one, two = counted(worlds[3], pass_on)
    assert [(r.operation, r.peers, r.bytes, r.size) for r in two] == [("send", (0,), 20, 20), ("send", (0,), 24, 24)]
    assert [(r.operation, r.peers, r.bytes, r.size) for r in zero] == [("recv", (2,), 0, 20), ("recv", (2,), 0, 24)]
    assert len(one) == 0


def test_a_recv_from_any_source_does_not_know_its_peer(worlds):
    def anybody():
        if dist.get_rank() == 1:
            dist.send(torch.ones(5), 0)
        else:
            dist.recv(torch.empty(5))

    zero, _ = counted(worlds[2], anybody)
    assert [(r.operation, r.peers, r.bytes) for r in zero] == [("recv", (), 0)]
    assert "0←?" in str(zero)


def test_batched_sends_and_recvs(worlds):
    def round_the_ring():
        n, rank = dist.get_world_size(), dist.get_rank()
        ops = [
            dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % n),
            dist.P2POp(dist.irecv, torch.empty(4), (rank - 1) % n),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    for rank, part in enumerate(counted(worlds[3], round_the_ring)):
        assert [(r.operation, r.peers, r.bytes) for r in part] == [
            ("send", ((rank + 1) % 3,), 16),
            ("recv", ((rank + 2) % 3,), 0),
        ]


def test_functional_sends_and_recvs(worlds):
    def swap():
        other = 1 - dist.get_rank()
        tensors = [torch.ones(4), torch.zeros(4)]
        came = funcol.batch_p2p_ops_inplace(["isend", "irecv"], [other, other], [0, 0], tensors, None)[1]
        assert came.sum() == 4
        if other:
            funcol.wait_tensor(funcol.isend_inplace(torch.ones(3), other))
        else:
            funcol.wait_tensor(funcol.irecv_inplace(torch.zeros(3), 0))

    zero, one = counted(worlds[2], swap)
    assert [(r.operation, r.peers, r.bytes) for r in zero] == [
        ("send", (1,), 16),
        ("recv", (1,), 0),
        ("send", (1,), 12),
    ]
    assert [(r.operation, r.peers, r.bytes) for r in one] == [("send", (0,), 16), ("recv", (0,), 0), ("recv", (0,), 0)]


# ---------------------------------------------------------------- groups


def test_a_group_is_named_by_global_ranks_and_costs_by_its_own_size(worlds):
    def within():
        group = dist.new_group([1, 3])
        if dist.get_rank() in (1, 3):
            dist.all_reduce(torch.ones(12), group=group)
            dist.broadcast(torch.ones(12), src=3, group=group)
            dist.gather(torch.ones(3), empties(2) if dist.get_rank() == 1 else None, dst=1, group=group)
            if dist.get_rank() == 3:
                dist.send(torch.ones(3), dst=1, group=group)
            else:
                dist.recv(torch.ones(3), src=3, group=group)

    zero, one, two, three = counted(worlds[4], within)
    assert len(zero) == len(two) == 0
    assert {row.group for row in merge([one, three])} == {(1, 3)}
    # two ranks: 2 * 1/2 * 48; a chain 3 -> 1 of 48; a gather to 1 of 12
    assert [(r.operation, r.peers, r.bytes) for r in one] == [
        ("all_reduce", (), 48),
        ("broadcast", (3,), 0),
        ("gather", (1,), 0),
        ("recv", (3,), 0),
    ]
    assert [(r.operation, r.peers, r.bytes) for r in three] == [
        ("all_reduce", (), 48),
        ("broadcast", (3,), 48),
        ("gather", (1,), 12),
        ("send", (1,), 12),
    ]


def test_the_groups_of_a_two_dimensional_mesh(worlds):
    def on_mesh():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(12), group=mesh["tp"].get_group())
        funcol.all_reduce(torch.ones(12), "sum", mesh["dp"])

    groups = [[row.group for row in part] for part in counted(worlds[4], on_mesh)]
    assert groups == [[(0, 1), (0, 2)], [(0, 1), (1, 3)], [(2, 3), (0, 2)], [(2, 3), (1, 3)]]
    assert [part.total() for part in counted(worlds[4], on_mesh)] == [96] * 4  # 2 * 1/2 * 48, twice


# ---------------------------------------------------------------- backward, and whose line it is

HERE = __file__


def text_of(row):
    return str(row.line).partition(": ")[2]


def test_collectives_of_backward_are_counted_and_put_on_the_line_that_started_it(worlds):
    def forward_and_back():
        x = torch.ones(3, requires_grad=True)
        with count() as traffic:
            whole = funcol.all_gather_single_autograd(x, 0, dist.group.WORLD)
            whole.sum().backward()
        return traffic

    for part in worlds[2].run(forward_and_back):
        # 1/2 * 24 forward; the gradient of the whole, 24 bytes, reduce-scattered back: 1/2 * 24
        assert [(r.operation, r.bytes, r.backward) for r in part] == [
            ("all_gather", 12, False),
            ("reduce_scatter", 12, True),
        ]
        assert [text_of(row) for row in part] == [
            "whole = funcol.all_gather_single_autograd(x, 0, dist.group.WORLD)",
            "whole.sum().backward()",
        ]
        assert part.rows[1].line.file == HERE


def test_other_functional_collectives_and_their_backward(worlds):
    def uneven_both_ways():
        rank = dist.get_rank()
        x = torch.ones(8, requires_grad=True)  # rank 0 keeps 2 and sends 6, rank 1 sends 4 and keeps 4
        give, take = ([2, 6], [2, 4]) if rank == 0 else ([4, 4], [6, 4])
        funcol.all_to_all_single_autograd(x, take, give, dist.group.WORLD).sum().backward()

    def reduce_scatter_both_ways():
        x = torch.ones(8, requires_grad=True)
        funcol.reduce_scatter_single_autograd(x, "sum", 0, dist.group.WORLD).sum().backward()

    for part in counted(worlds[2], reduce_scatter_both_ways):
        # 1/2 * 32 forward; the gradient gathered to 32 bytes: 1/2 * 32
        assert [(r.operation, r.bytes, r.backward) for r in part] == [
            ("reduce_scatter", 16, False),
            ("all_gather", 16, True),
        ]
    zero, one = counted(worlds[2], uneven_both_ways)
    assert [(r.bytes, r.backward) for r in zero] == [(24, False), (16, True)]  # 6 * 4 there, 4 * 4 back
    assert [(r.bytes, r.backward) for r in one] == [(16, False), (24, True)]


class CopyToParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def test_a_collective_in_the_learners_own_backward_is_on_that_line(worlds):
    def step():
        x = torch.ones(12, requires_grad=True)
        CopyToParallel.apply(x).sum().backward()

    for part in counted(worlds[4], step):
        assert [(r.operation, r.bytes, r.backward) for r in part] == [("all_reduce", 72, True)]  # 2 * 3/4 * 48
        assert text_of(part.rows[0]) == "dist.all_reduce(grad)"


def test_in_a_thread_of_torchs_own_the_line_is_that_of_the_counting_thread():
    # As on a GPU, where autograd's thread has no frame of the learner's.
    from course_utils.traffic import live

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        line = pool.submit(functools.partial(live._line, threading.get_ident())).result()
    assert line.file == HERE


def test_a_call_with_no_line_of_the_learners_has_none(worlds):
    from course_utils.traffic import live

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(live._line, 0).result() is None


# ---------------------------------------------------------------- DDP


def little_model():
    """12 + 3 and 6 + 2 parameters: 23, or 92 bytes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def test_ddp_reduces_as_many_bytes_of_gradients_as_there_are_of_parameters(worlds):
    def steps():
        model = DistributedDataParallel(little_model())
        with count() as first:
            model(torch.ones(2, 4)).sum().backward()
        with count() as second:
            model(torch.ones(2, 4)).sum().backward()
        with count() as third:
            model(torch.ones(2, 4)).sum().backward()
        return first, second, third

    for first, second, third in worlds[4].run(steps):
        # one bucket: 2 * 3/4 * 92
        assert [(r.operation, r.bytes, r.backward) for r in first] == [("all_reduce", 138, True)]
        assert first.rows == first.only(lambda row: "backward()" in text_of(row)).rows
        # the second step begins by agreeing on the buckets anew: two little broadcasts, once
        assert [(r.operation, r.backward) for r in second] == [("broadcast", False)] * 2 + [("all_reduce", True)]
        assert [(r.operation, r.bytes, r.backward) for r in third] == [("all_reduce", 138, True)]


def test_ddps_constructor_compares_shapes_and_sends_rank_0s_parameters(worlds):
    zero, one = counted(worlds[2], lambda: DistributedDataParallel(little_model()))
    # how many parameters (int64, 8 bytes a rank); their sizes and strides; the 92 bytes themselves, from rank 0
    assert [r.operation for r in zero] == ["all_gather", "broadcast", "broadcast"]
    # 4 tensors: 2 matrices and 2 vectors have 2 * (2 + 1) = 6 sizes and 6 strides, 12 int64 = 96 bytes
    assert [r.bytes for r in zero] == [8, 96, 92]
    assert [r.bytes for r in one] == [8, 0, 0]


def test_ddps_buckets_and_no_sync(worlds):
    def steps():
        model = DistributedDataParallel(little_model(), bucket_cap_mb=1e-6)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        with count() as synced:
            model(torch.ones(2, 4)).sum().backward()
        with count() as alone, model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        return synced, alone

    for synced, alone in worlds[2].run(steps):
        # a bucket for each parameter, in the order in which their gradients came: 2 * 1/2 * S
        assert sorted(r.bytes for r in synced) == [8, 12, 24, 48]
        assert synced.calls() == {"all_reduce": 4}
        assert synced.total() == 92
        assert len(alone) == 0


# ---------------------------------------------------------------- FSDP2


def sharded(reshard=True, policy=None):
    """Layers of 16 + 4 and 8 + 2 parameters: 80 and 40 bytes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshard, mp_policy=policy or MixedPrecisionPolicy())
    return fully_shard(model)


def step(model):
    with count() as traffic:
        model(torch.ones(2, 4)).sum().backward()
    return [(r.operation, r.bytes, r.backward) for r in traffic]


def test_fsdp2_gathers_twice_and_scatters_once(worlds):
    # two ranks: half of 80, half of 40
    assert (
        worlds[2].run(lambda: step(sharded()))
        == [
            [
                ("all_gather", 40, False),
                ("all_gather", 20, False),
                ("all_gather", 20, True),
                ("all_gather", 40, True),
                ("reduce_scatter", 20, True),
                ("reduce_scatter", 40, True),
            ]
        ]
        * 2
    )


def test_fsdp2_that_keeps_its_parameters_gathers_once(worlds):
    # four ranks: 3/4 of 80; the layer of two rows is padded to four: 3/4 of (4 * 4 + 4) * 4 = 80
    assert (
        worlds[4].run(lambda: step(sharded(reshard=False)))
        == [
            [
                ("all_gather", 60, False),
                ("all_gather", 60, False),
                ("reduce_scatter", 60, True),
                ("reduce_scatter", 60, True),
            ]
        ]
        * 4
    )


def test_fsdp2_in_bfloat16_moves_half_the_bytes(worlds):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = worlds[2].run(lambda: step(sharded(reshard=False, policy=policy)))
    assert (
        found
        == [
            [
                ("all_gather", 20, False),  # 1/2 of 20 parameters of 2 bytes
                ("all_gather", 10, False),
                ("reduce_scatter", 20, True),  # gradients are reduced in float32: 1/2 of 40
                ("reduce_scatter", 40, True),
            ]
        ]
        * 2
    )


def test_hybrid_sharding_scatters_within_a_row_and_reduces_across(worlds):
    def hybrid():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=mesh)
        with count() as traffic:
            model(torch.ones(2, 4)).sum().backward()
        return [(r.operation, r.group, r.bytes) for r in traffic.only(lambda row: row.operation != "all_gather")]

    # shards of 80 / 2 = 40 bytes: 1/2 * 80, then 2 * 1/2 * 40
    zero, one, two, three = worlds[4].run(hybrid)
    assert zero == [("reduce_scatter", (0, 1), 40), ("all_reduce", (0, 2), 40)]
    assert three == [("reduce_scatter", (2, 3), 40), ("all_reduce", (1, 3), 40)]


# ---------------------------------------------------------------- DTensor

# A matrix of 4 x 4 floats, 64 bytes, on two ranks.
REDISTRIBUTIONS = {
    "shard to replicate": ([Shard(0)], [Replicate()], [("all_gather", 32)]),  # 1/2 * 64
    "partial to replicate": ([Partial()], [Replicate()], [("all_reduce", 64)]),  # 2 * 1/2 * 64
    "partial to shard": ([Partial()], [Shard(0)], [("reduce_scatter", 32)]),  # 1/2 * 64
    "replicate to shard": ([Replicate()], [Shard(0)], []),  # everybody has it already
    "shard to shard": ([Shard(0)], [Shard(1)], [("all_gather", 32)]),  # on the CPU: gather all, keep a half
}


@pytest.mark.parametrize("case", REDISTRIBUTIONS)
@pytest.mark.filterwarnings("ignore")
def test_dtensors_redistributions(worlds, case):
    start, stop, expected = REDISTRIBUTIONS[case]

    def redistribute():
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2, 4) if start == [Shard(0)] else torch.ones(4, 4)
        x = DTensor.from_local(local, mesh, start)
        with count() as traffic:
            x.redistribute(mesh, stop)
        return traffic

    assert sent(worlds[2].run(redistribute)) == [expected] * 2


def test_dtensors_distribution_and_what_its_operators_do_by_themselves(worlds):
    def by_itself():
        mesh = DeviceMesh("cpu", [0, 1])
        with count() as made:
            x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            y = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
            z = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        with count() as used:
            y @ x  # sharded along the sum: a partial result, no communication
            x @ y  # one of them has to be gathered first
            (y @ x).full_tensor()
        with count() as backward:
            w = z.detach().requires_grad_()
            (x @ w).sum().backward()
            w.grad.full_tensor()
        return made, used, backward

    for rank, (made, used, backward) in enumerate(worlds[2].run(by_itself)):
        # rank 0 scatters 32 bytes to the other, twice, and broadcasts all 64
        assert sent([made]) == [
            [("scatter", 32), ("scatter", 32), ("broadcast", 64)]
            if rank == 0
            else [("scatter", 0), ("scatter", 0), ("broadcast", 0)]
        ]
        # 1/2 * 64; 2 * 1/2 * 64
        assert sent([used]) == [[("all_gather", 32), ("all_reduce", 64)]]
        # the gradient of a replicated matrix used with a sharded one is a partial sum
        assert sent([backward])[0][-1] == ("all_reduce", 64)


# ---------------------------------------------------------------- counting changes nothing


def train(steps=3, wrap=DistributedDataParallel, counting=True):
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2),
        torch.nn.BatchNorm2d(8),
        torch.nn.GELU(),
        torch.nn.Flatten(2),
        torch.nn.TransformerEncoderLayer(9, 3, 16, dropout=0.1, batch_first=True),
        torch.nn.Flatten(1),
        torch.nn.Linear(72, 5),
    )
    model = wrap(model) or model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with count() if counting else contextlib.nullcontext():
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.state_dict().values()]
    return losses, [p.numpy().tobytes() for p in whole]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard], ids=["ddp", "fsdp2"])
@pytest.mark.filterwarnings("ignore")
def test_training_is_the_same_bit_for_bit_with_and_without_counting(worlds, wrap):
    assert worlds[2].run(train, wrap=wrap, counting=True) == worlds[2].run(train, wrap=wrap, counting=False)


def test_asynchronous_operations_are_not_waited_for(worlds):
    def first_post_then_send():
        with count() as traffic:
            if dist.get_rank() == 0:
                request = dist.irecv(came := torch.zeros(4), 1)
                early = len(traffic), request.is_completed()  # rank 1 sends only after this
                dist.barrier()
                request.wait()
                return early, came.sum().item()
            dist.barrier()
            dist.send(torch.ones(4), 0)

    assert worlds[2].run(first_post_then_send)[0] == ((1, False), 4.0)


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_stays_compiled_and_is_counted(worlds):
    def compiled():
        def twice(x):
            return funcol.all_reduce(x * 2, "sum", dist.group.WORLD).sum()

        with count() as traffic:
            torch.compile(twice, backend="aot_eager")(torch.ones(12, requires_grad=True)).backward()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return graphs, [(r.operation, r.bytes, r.backward) for r in traffic]

    # 2 * 1/2 * 48; the backward of funcol's all_reduce is an all_reduce
    assert launch(compiled, world_size=2) == [(1, [("all_reduce", 48, False), ("all_reduce", 48, True)])] * 2


# ---------------------------------------------------------------- the block


def test_blocks_nest_and_a_count_can_be_read_while_it_is_open(worlds):
    def nested():
        with count() as outer:
            dist.all_reduce(torch.ones(12))
            with count() as inner:
                dist.broadcast(torch.ones(12), 0)
                seen = len(inner), len(outer)
            dist.barrier()
        return outer, inner, seen

    for outer, inner, seen in worlds[2].run(nested):
        assert list(outer.calls()) == ["all_reduce", "broadcast", "barrier"]
        assert inner.calls() == {"broadcast": 1}
        assert seen == (1, 2)


def test_an_error_ends_the_block_and_keeps_what_was_counted(worlds):
    def failing():
        try:
            with count() as traffic:
                dist.all_reduce(torch.ones(12))
                raise KeyError("x")
        except KeyError:
            dist.all_reduce(torch.ones(12))
        return traffic

    assert [part.calls() for part in worlds[2].run(failing)] == [{"all_reduce": 1}] * 2


def test_a_call_that_torch_refuses_is_not_counted(worlds):
    def refused():
        with count() as traffic, contextlib.suppress(RuntimeError, ValueError):
            dist.all_gather_single(torch.empty(5), torch.ones(3))
        return len(traffic)

    assert worlds[2].run(refused) == [0, 0]


def test_a_count_is_entered_once(worlds):
    def twice():
        counting = count()
        with counting:
            pass
        with counting:
            pass

    with pytest.raises(Exception, match="write `with count\\(\\) as traffic:` for every block"):
        launch(twice, world_size=2)


def test_counting_where_there_is_no_group_says_where_to_count():
    with pytest.raises(RuntimeError, match="no process group is up here.*the function that you launch"), count():
        pass


# ---------------------------------------------------------------- the value and its views


def row(rank=0, operation="all_reduce", peers=(), sent=48, **more):
    return Row(rank, operation, (0, 1), peers, sent, **more)


def test_traffic_is_a_value(worlds):
    (zero, one) = counted(worlds[2], all_reduce)
    assert pickle.loads(pickle.dumps(zero)) == zero
    assert hash(zero) == hash(Traffic(tuple(zero)))
    assert zero != one
    with pytest.raises(AttributeError):
        zero.rows = ()
    assert merge([zero, one]).by_rank() == {0: 48, 1: 48}
    assert merge([]) == Traffic()


def test_sums():
    traffic = Traffic((row(1), row(0, "broadcast", (0,), 5, backward=True), row(0)))
    assert traffic.total() == 101
    assert traffic.by_rank() == {0: 53, 1: 48}
    assert traffic.by_operation() == {"all_reduce": 96, "broadcast": 5}
    assert traffic.calls() == {"all_reduce": 2, "broadcast": 1}
    assert traffic.only(lambda r: r.backward).total() == 5
    assert len(traffic) == 3


def test_the_table_as_text(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("all_reduce(x)\nloss.backward()\n")
    first, second = Line(str(script), 1), Line(str(script), 2)
    rows = [row(rank, line=first) for rank in (0, 1)]
    rows += [row(rank, "gather", (1,), 3_500_000 * (rank == 0), line=second, backward=True) for rank in (0, 1)]
    rows += [row(0, "send", (1,), 1500), row(1, "recv", (0,), 0), row(0, "broadcast", (0,), Fraction(64, 3))]
    assert str(Traffic(tuple(rows))).splitlines() == [
        "operation   group        calls per rank    bytes per rank  in backward  line",
        "all_reduce  0-1                       1              48 B               line 1 of script.py: all_reduce(x)",
        "gather      0-1, root 1               1     0 B to 3.5 MB  yes          line 2 of script.py: loss.backward()",
        "send        0→1                       1           1,500 B",
        "recv        1←0                       1               0 B",
        "broadcast   0-1, root 0               1            21.3 B",
        "total                            3 to 4  48 B to 3.502 MB",
        "1 MB = 10^6 B",
    ]


def test_the_table_in_a_notebook_is_escaped(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("if a < b: dist.barrier()\n")
    page = Traffic((row(line=Line(str(script), 1)),))._repr_html_()
    assert "<td>all_reduce</td><td>0-1</td><td>1</td><td>48 B</td>" in page
    assert "a &lt; b" in page
    assert (
        "no communication was counted" in Traffic()._repr_html_() and str(Traffic()) == "no communication was counted"
    )


def test_as_a_data_frame():
    frame = Traffic((row(0, sent=Fraction(1, 2)), row(1))).to_frame()
    assert list(frame.columns) == ["rank", "operation", "group", "peers", "bytes", "size", "backward", "line"]
    assert frame["bytes"].sum() == 48.5
    assert Traffic().to_frame().empty


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: merge([Traffic(), None]), TypeError, "item 1 is None: .*`return traffic`"),
        (lambda: merge([3]), TypeError, "item 0 is a int"),
        (lambda: row(-1), ValueError, "rank=-1"),
        (lambda: row(sent=-1), ValueError, "bytes=-1"),
        (lambda: row(sent=float("nan")), TypeError, "bytes=nan"),
        (lambda: row(rank="0"), TypeError, "rank='0'"),
        (lambda: Traffic(("x",)), TypeError, "was given a str"),
        (lambda: Traffic().only(3), TypeError, "only\\(3\\): a function"),
        (lambda: cost.all_reduce(-1, 2), ValueError, "size=-1"),
        (lambda: cost.all_reduce(1.5, 2), TypeError, "size=1.5"),
        (lambda: cost.all_gather(4, 0), ValueError, "ranks=0"),
        (lambda: cost.reduce_scatter(4, True), TypeError, "ranks=True"),
        (lambda: cost.broadcast(4, 2, 2), ValueError, "position=2 is not in a group of ranks=2"),
        (lambda: cost.gather(4, 2, -1), ValueError, "position=-1"),
    ],
)
def test_bad_input_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_no_operator_of_this_torch_is_overlooked():
    """A torch that adds a collective fails here, not silently in a count."""
    from course_utils.traffic import live

    silent = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"}
    names = [name.partition(".")[0].split("::") for name in torch._C._dispatch_get_all_op_names()]
    assert {name for space, name in names if space in live.NAMESPACES} - set(live.READERS) == silent


def test_the_value_and_the_costs_come_without_torch():
    code = "import sys; from course_utils.traffic import Traffic, cost; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
