"""Emulated links: every operation takes the model's time, the data is untouched, and torch's own layers run on them."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_utils import RankError, World, launch
from course_utils.links import INFINIBAND, NVLINK, Link, Node
from course_utils.timeline import recording
from course_utils.traffic import count

LINK = Link(
    alpha=30e-3, beta=1e-7
)  # 30 ms a message, 10 MB/s: slow, so that the machine's own noise is small beside it
CLUSTER = Node(2, inside=Link(20e-3, 1e-7), between=Link(60e-3, 4e-7))


@pytest.fixture(scope="module")
def world():
    with World(4, links=LINK) as kept:
        yield kept


def seconds(world, operation, *arguments, repeats=3) -> float:
    """From the last rank's start to the last rank's end, the best of a few times: noise only ever adds."""

    def timed():
        dist.barrier()
        start = time.monotonic()
        operation(*arguments)
        return start, time.monotonic()

    best = math.inf
    for _ in range(repeats):
        starts, ends = zip(*world.run(timed))
        best = min(best, max(ends) - max(starts))
    return best


def within_ten_percent(measured: float, predicted: float) -> None:
    assert 0.999 * predicted <= measured <= 1.1 * predicted, f"{measured:.4f} s measured, {predicted:.4f} s predicted"


# ---------------------------------------------------------------- every operation takes the model's time

# operation -> (what to run on x of n floats, steps on 4 ranks, bytes per byte of x): Thakur et al., as quoted in
# course_utils.collectives.costs; written out for p = 4
OPERATIONS = {
    "all_reduce": (lambda x: dist.all_reduce(x), 6, 1.5),
    "reduce_scatter": (lambda x: dist.reduce_scatter_single(torch.empty(len(x) // 4), x), 3, 0.75),
    "all_gather": (lambda x: dist.all_gather_single(torch.empty(len(x)), x[: len(x) // 4].clone()), 3, 0.75),
    "all_gather, list": (lambda x: dist.all_gather(list(x.clone().chunk(4)), x[: len(x) // 4].clone()), 3, 0.75),
    "broadcast": (lambda x: dist.broadcast(x, 1), 2, 2),
    "reduce": (lambda x: dist.reduce(x, 1), 2, 2),
    "all_to_all": (lambda x: dist.all_to_all_single(torch.empty_like(x), x), 3, 0.75),
    "gather": (
        lambda x: dist.gather(x[: len(x) // 4].clone(), list(x.clone().chunk(4)) if dist.get_rank() == 2 else None, 2),
        2,
        0.75,
    ),
    "scatter": (
        lambda x: dist.scatter(torch.empty(len(x) // 4), list(x.chunk(4)) if dist.get_rank() == 2 else None, 2),
        2,
        0.75,
    ),
    "neighbours": (lambda x: to_the_right(x), 1, 1),
}


def to_the_right(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    request = dist.isend(x, (rank + 1) % size)
    dist.recv(torch.empty_like(x), (rank - 1) % size)
    request.wait()


@pytest.mark.parametrize("size", [40_000, 400_000, 1_600_000])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_takes_the_time_of_the_model(world, name, size):
    operation, steps, per_byte = OPERATIONS[name]
    predicted = steps * 30e-3 + size * per_byte * 1e-7
    within_ten_percent(seconds(world, operation, torch.ones(size // 4)), predicted)


def test_a_barrier_takes_two_latencies_on_four_ranks(world):
    within_ten_percent(seconds(world, dist.barrier, repeats=5), 60e-3)


def test_a_message_reaches_its_receiver_after_its_time_and_not_before(world):
    def send_and_wait():
        x, rank = torch.ones(250_000), dist.get_rank()  # 1 MB: 30 ms + 100 ms
        dist.barrier()
        start = time.monotonic()
        if rank == 0:
            dist.send(x, 3)
        if rank == 3:
            dist.recv(x, 0)
        return start, time.monotonic()

    best = min(runs[3][1] - runs[0][0] for runs in (world.run(send_and_wait) for _ in range(3)))
    within_ten_percent(best, 0.13)


# ---------------------------------------------------------------- compute, latecomers, queues


def test_communication_runs_beside_compute(world):
    def overlapped(busy):
        work = dist.all_reduce(torch.ones(250_000), async_op=True)  # 180 ms + 150 ms
        time.sleep(busy)
        work.wait()

    within_ten_percent(seconds(world, overlapped, 0.2), 0.33)
    within_ten_percent(seconds(world, overlapped, 0.5), 0.5)


def test_a_collective_starts_when_its_last_member_comes_for_everybody(world):
    def with_a_latecomer():
        dist.barrier()
        start = time.monotonic()
        time.sleep(0.2 * (dist.get_rank() == 2))
        dist.all_reduce(torch.ones(25_000))  # 180 ms + 15 ms
        return time.monotonic() - start

    for measured in map(min, zip(*[world.run(with_a_latecomer) for _ in range(3)])):
        within_ten_percent(measured, 0.395)


def test_two_collectives_at_once_share_the_link(world):
    def two():
        for work in [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(2)]:
            work.wait()

    within_ten_percent(seconds(world, two), 2 * (180e-3 + 30e-3))


def test_two_groups_that_share_a_link_queue_on_it_and_two_kinds_of_link_do_not():
    def two_groups(first, second):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1], [2, 3])]
        mine = [group for group in groups if dist.get_rank() in dist.get_process_group_ranks(group)]
        best = math.inf
        for _ in range(3):
            dist.barrier()
            start = time.monotonic()
            works = [dist.all_reduce(torch.ones(100_000), group=mine[i], async_op=True) for i in (first, second)]
            for work in works:
                work.wait()
            dist.barrier()
            best = min(best, time.monotonic() - start)
        return best

    inside = 2 * 20e-3 + 400_000 * 1e-7  # 80 ms: 2 steps and the whole tensor on two ranks
    between = 2 * 60e-3 + 400_000 * 4e-7  # 280 ms
    barrier = 2 * 60e-3
    for shared in launch(two_groups, 0, 2, world_size=4, links=CLUSTER):  # both inside the node
        within_ten_percent(shared, 2 * inside + barrier)
    for apart in launch(two_groups, 0, 1, world_size=4, links=CLUSTER):  # one inside, one between
        within_ten_percent(apart, between + barrier)
    assert inside < between


def test_a_group_has_the_slowest_link_that_its_members_need():
    def in_groups():
        pairs = {"inside": [[0, 1], [2, 3]], "between": [[0, 2], [1, 3]], "all": [[0, 1, 2, 3]]}
        found = {}
        for name, groups in pairs.items():
            group, _ = dist.new_subgroups_by_enumeration(groups)
            best = math.inf
            for _ in range(3):
                dist.barrier()
                start = time.monotonic()
                dist.all_reduce(torch.ones(100_000), group=group)
                best = min(best, time.monotonic() - start)
            found[name] = best
        return found

    results = launch(in_groups, world_size=4, links=CLUSTER)
    expected = {"inside": 80e-3, "between": 280e-3, "all": 6 * 60e-3 + 1.5 * 400_000 * 4e-7}
    for name, predicted in expected.items():
        within_ten_percent(max(found[name] for found in results), predicted)


# ---------------------------------------------------------------- the data is untouched, torch's own layers run


def everything():
    """Results of many operations and of torch's own parallel layers, from random inputs of this rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    rank = dist.get_rank()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    out = {}
    dist.all_reduce(reduced := x.clone())
    dist.broadcast(sent := x.clone(), 2)
    dist.reduce_scatter_single(part := torch.empty(1, 64), x)
    dist.all_gather_single(whole := torch.empty(16, 64), x)
    dist.all_to_all_single(swapped := torch.empty(4, 64), x)
    dist.all_gather_object(names := [None] * 4, f"rank {rank}")
    out |= dict(reduced=reduced, sent=sent, part=part, whole=whole, swapped=swapped, names=names)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 6))
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp(x).square().sum().backward()
    out["ddp"] = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sharded = fully_shard(model)
    sharded(x).square().sum().backward()
    out["fsdp2"] = [p.grad.to_local().clone() for p in sharded.parameters()]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    d = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0), Shard(1)])
    out["dtensor"] = (d @ d.T).redistribute(mesh, [Replicate(), Shard(0)]).to_local()

    stage = PipelineStage(nn.Linear(64, 64), rank, 4, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    with torch.no_grad():
        out["pipeline"] = schedule.step(x) if rank == 0 else schedule.step()
    return out


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_results_are_bit_for_bit_those_without_links(capfd):
    fast = Node(2, inside=Link(1e-4, 1e-9), between=Link(2e-4, 2e-9))
    without, with_links = launch(everything, world_size=4), launch(everything, world_size=4, links=fast)
    assert {"ddp", "fsdp2", "dtensor", "pipeline"} <= set(with_links[0])
    for plain, emulated in zip(without, with_links):
        for name in plain:
            assert same(plain[name], emulated[name]), name
    assert capfd.readouterr() == ("", "")  # and without a warning


def test_traffic_is_counted_as_without_links():
    def counted():
        with count() as traffic:
            everything()
        return [(row.operation, row.group, row.peers, row.bytes, row.size, row.backward) for row in traffic]

    fast = Link(1e-4, 1e-9)
    assert launch(counted, world_size=4, links=fast) == launch(counted, world_size=4)


def test_mismatches_are_found_on_emulated_links_too():
    from course_utils import RankError

    def different():
        dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() else torch.float32))

    with pytest.raises(RankError, match="rank 0 comes with float32.4. .*; rank 1 comes with int32"):
        launch(different, world_size=2, links=Link(1e-3, 1e-9))


# ---------------------------------------------------------------- what may be asked for


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Link(-1e-6, 1e-9), ValueError, "alpha=-1e-06: expected seconds per message, finite and at least 0"),
        (lambda: Link(1e-6, math.nan), ValueError, "beta=nan: expected seconds per byte, finite and at least 0"),
        (lambda: Link("1e-6", 1e-9), TypeError, "alpha='1e-6' is a str, expected seconds per message"),
        (lambda: NVLINK.slower(-2), ValueError, "times=-2: expected a factor, finite and at least 0"),
        (lambda: Node(0, NVLINK, INFINIBAND), ValueError, "size=0: a node has at least one rank"),
        (lambda: Node(2.5, NVLINK, INFINIBAND), TypeError, "size=2.5: expected a whole number of ranks per node"),
        (lambda: Node(2, NVLINK, 5e9), TypeError, r"between=5000000000.0: expected a Link, such as Link\(alpha"),
        (lambda: launch(dist.get_rank, world_size=4, links=Node(3, NVLINK, INFINIBAND)), ValueError,
         "nodes of 3 ranks don't divide world_size=4: choose a node size that does"),
        (lambda: launch(dist.get_rank, world_size=2, links=5e9), TypeError, "links=5000000000.0: expected a Link or a"),
        (lambda: launch(dist.get_rank, world_size=2, links=NVLINK, device="cuda"), ValueError,
         "links are emulated between CPU ranks: leave device='cuda' out"),
    ],
)  # fmt: skip
def test_bad_links_are_refused_by_name(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_slow_motion_keeps_every_ratio():
    slow = Node(4, NVLINK, INFINIBAND).slower(1000)
    assert slow.inside.alpha == pytest.approx(3.4e-3) and slow.between.bandwidth == pytest.approx(50e6)
    assert slow.between.beta / slow.inside.beta == pytest.approx(INFINIBAND.beta / NVLINK.beta)


def test_a_recording_shows_when_the_links_were_busy(world):
    def step():
        dist.barrier()
        with recording() as recorder:
            start = time.monotonic()
            work = dist.all_reduce(torch.ones(50_000), async_op=True)  # 180 ms + 30 ms
            with recorder("compute", "backward"):
                time.sleep(0.1)
            work.wait()
        return recorder.timeline(), start

    for timeline, start in world.run(step):
        (transfer,) = timeline.only(lambda e: e.kind == "communication").events
        assert transfer.name == "allreduce" and transfer.seconds == pytest.approx(0.21)
        assert transfer.start >= start - 0.05 and min(timeline.overlap("compute", "communication").values()) > 0.05


def many_at_once(number: int, keep: bool) -> None:
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(number)]
    for work in works if keep else ():
        work.wait()


def start_all_and_come_back_later():
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(63)]
    time.sleep(0.5)  # all are done by then
    works += [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(63)]
    for work in works:
        work.wait()


def test_what_is_done_is_no_longer_under_way_though_nobody_has_asked():
    launch(start_all_and_come_back_later, world_size=2, links=Link(1e-5, 0))


def test_sixty_collectives_may_be_under_way_and_more_are_refused():
    launch(many_at_once, 60, True, world_size=2, links=Link(1e-4, 0))
    with pytest.raises(RankError, match="63 collectives are under way on this group.* wait for some of them"):
        launch(many_at_once, 80, True, world_size=2, links=Link(1.0, 0), timeout=30)
