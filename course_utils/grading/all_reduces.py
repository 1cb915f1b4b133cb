"""The exercises of notebook 02: gradients averaged in one bucket round a ring, and a sum that avoids the slow links.

Both are judged by their result and by `Traffic`: what each rank sends must not exceed what is enough. The ring's
2 (N-1) messages of 1/N of the data: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009). The sum over
nodes: a reduce-scatter within the node, then one of each piece between nodes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils.gradients import Disease, diagnose
from course_utils.grading.judged import FLOAT, Argument, Judged, drawn, each_world
from course_utils.grading.reports import Report, Row
from course_utils.grading.wording import times
from course_utils.traffic import Traffic, count
from course_utils.world import RankTimeout, World

# ---------------------------------------------------------------- 1: gradients, in one bucket round a ring


def shapes_of(world_size: int, seed: int) -> list[tuple[int, ...]]:
    """The shapes of a few gradients, whose elements together don't divide by the number of ranks.

    >>> shapes_of(4, 0)
    [(6, 3), (6,), (2, 5), (1,)]
    """
    draw = random.Random(f"average_gradients {world_size} {seed}")
    while True:
        shapes = [
            (draw.randint(3, 6), draw.randint(2, 5)),
            (draw.randint(4, 9),),
            (2, draw.randint(3, 5)),
            (1,),
        ]
        if sum(map(math.prod, shapes)) % world_size or world_size == 1:
            return shapes


def _gradient(shapes: Sequence[tuple[int, ...]], seed: int, rank: int) -> list[Tensor]:
    return [drawn(f"average_gradients {seed} {rank} {i}", *shape) for i, shape in enumerate(shapes)]


def _average(fn, shapes: list[tuple[int, ...]], seed: int) -> dict:
    """Runs on a rank: what `fn` has left in its tensors, what it returned, and what it communicated."""
    gradients = _gradient(shapes, seed, dist.get_rank())
    given = list(gradients)
    with count() as traffic:
        returned = fn(given)
    replaced = any(one is not other for one, other in zip(given, gradients)) or len(given) != len(gradients)
    return {
        "left": [gradient.detach().clone() for gradient in gradients],
        "returned": None if returned is None else type(returned).__name__,
        "replaced": replaced,
        "traffic": traffic,
    }


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _average_on(fn: Callable, world: World, seed: int) -> Report | None:
    shapes = shapes_of(world.size, seed)
    try:
        found = world.run(_average, fn, shapes, seed)
    except RankTimeout as error:
        if " in send " not in str(error):
            raise
        hint = "every rank sends and nobody receives: isend starts a message and goes on, so that recv gets its turn"
        return Report(False, "the ranks hang", detail=str(error), hint=hint)
    given = [_flat(_gradient(shapes, seed, rank)) for rank in range(world.size)]
    right = torch.stack(given).double().mean(0).float()
    for rank, one in enumerate(found):
        if [tuple(tensor.shape) for tensor in one["left"]] != shapes:
            return Report(False, f"the tensors of rank {rank} have changed their shapes: only values should change")
    left = [_flat(one["left"]) for one in found]
    close = [torch.isclose(each, right, rtol=1e-4, atol=1e-5) for each in left]
    if not all(each.all() for each in close):
        return _wrong_average(found, left, given, right, close)
    if any(not torch.equal(left[0], each) for each in left):
        hint = "let each slice be added up once, on its way round, and hand out copies of that sum"
        return Report(False, "the averages are right, but not the same on all ranks to the last bit", hint=hint)
    return _average_price([one["traffic"] for one in found], right.numel(), len(shapes))


def _wrong_average(found, left, given, right, close) -> Report:
    ranks = len(left)
    parts = [[bool(part.all()) for part in each.tensor_split(ranks)] for each in close]
    rows = tuple(
        Row(all(which), (f"rank {rank}", ", ".join(str(i) for i, ok in enumerate(which) if ok) or "none"))
        for rank, which in enumerate(parts)
    )
    verdict = diagnose({"average": right}, [{"average": each} for each in left])["average"]
    say = "" if {Disease.WRONG, Disease.RANKS_DISAGREE} & set(verdict.diseases) else f": {verdict.words}"
    if all(torch.equal(*pair) for pair in zip(left, given)):
        say = ": every rank still has its own gradients"
        hint = "torch.cat makes a copy: what you have computed in it has to go back into the tensors you were given"
        if any(one["returned"] for one in found):
            hint = "the averages are to stand in the tensors that were given: an optimizer doesn't see what you return"
        elif any(one["replaced"] for one in found):
            hint = "gradients[i] = … puts another tensor into the list; the optimizer has the old one: write with copy_"
    elif Disease.SCALED in verdict.diseases and verdict.k_name == "world_size":
        say, hint = ": this is the sum", "the mean is the sum divided by the number of ranks"
    elif Disease.SCALED in verdict.diseases:
        hint = "how often is the division done? once, on the finished sum, is enough"
    elif ranks > 2 and sum(map(sum, parts)) == ranks or [sum(which) for which in parts] == [1] * ranks:
        hint = "one slice is finished on each rank, the others are not: that is the first half; now they must go round"
    elif Disease.WRONG in verdict.diseases:
        hint = (
            "all ranks hold the same wrong numbers, so they went round: is something added twice, or divided too "
            "often, or does the second half begin with a slice that isn't finished?"
        )
    elif not any(map(any, parts)):
        hint = (
            "follow one slice by hand on three ranks: who has finished it after the first half, and is that slice the "
            "one that the second half sends first?"
        )
    else:
        hint = "some slices are right: how many steps does each half take, and which slice is sent in the last of them?"
    return Report(False, f"the averages are not right{say}", ("", "right slices"), rows, hint=hint)


def _average_price(per_rank: Sequence[Traffic], elements: int, tensors: int) -> Report | None:
    """A right answer that sends more than 2 (N-1) messages of 1/N of the elements, rounded up, on some rank."""
    ranks = len(per_rank)
    enough, most = 2 * (ranks - 1), FLOAT * math.ceil(elements / ranks)
    foreign = sorted({row.operation for traffic in per_rank for row in traffic} - {"send", "recv"})
    if foreign:
        names = " and ".join(name.replace("_", "-") for name in foreign)
        return Report(
            False,
            f"the averages are right, but {names} did the work",
            *_sent_table(per_rank),
            hint="here you write it yourself: nothing but send, isend, recv and irecv",
        )
    sent = [[row for row in traffic if row.operation == "send"] for traffic in per_rank]
    numbers, totals = [len(rows) for rows in sent], [sum(row.size for row in rows) for rows in sent]
    if max(numbers) <= enough and all(row.size <= most for rows in sent for row in rows):
        return None
    worst = max(range(ranks), key=lambda rank: (totals[rank], numbers[rank]))
    what = f"rank {worst} sends {times(numbers[worst], 'message')} and {totals[worst]} bytes"
    if len(set(numbers)) == len(set(totals)) == 1:
        what = f"each rank sends {times(numbers[0], 'message')} and {totals[0]} bytes"
    if numbers[worst] >= enough * tensors and totals[worst] <= enough * (most + FLOAT * tensors):
        hint = "a ring for each tensor pays the latency each time: let all gradients travel in one flat tensor"
    elif len(set(numbers)) > 1 or max(totals) > 2 * min(totals):
        hint = "one rank does the work and the others wait for it: give every rank one slice to add up"
    elif min(numbers) == max(numbers) == (ranks - 1) * tensors and tensors > 1:
        hint = (
            "a ring for each tensor, and each passes its tensor on whole: put all gradients into one flat tensor, and "
            "cut it into as many slices as there are ranks"
        )
    elif any(row.size >= FLOAT * elements for rows in sent for row in rows):
        factor = totals[worst] / (2 * (ranks - 1) / ranks * FLOAT * elements)
        hint = (
            f"whole tensors travel, {factor:.3g} times as many bytes as needed: cut them into as many slices as ranks"
        )
    else:
        hint = "count the steps of each half, and the elements of each slice: tensor_split makes the most even ones"
    return Report(
        False,
        f"the averages are right, but {what}, where {enough} messages of at most {most} bytes are enough: "
        f"2 (N - 1) of 1/N of {FLOAT * elements} bytes",
        *_sent_table(per_rank),
        hint=hint,
    )


def _sent_table(per_rank: Sequence[Traffic]) -> tuple:
    """For each rank and operation that sends: how often, how many bytes, and from which line first."""
    rows = []
    for rank, traffic in enumerate(per_rank):
        for operation, calls in Counter(row.operation for row in traffic if row.operation != "recv").items():
            those = [row for row in traffic if row.operation == operation]
            sent, line = sum(row.bytes for row in those), next((str(row.line) for row in those if row.line), "")
            rows.append(Row(False, (f"rank {rank}", operation, str(calls), f"{float(sent):g}", line)))
    return ("", "operation", "times", "bytes sent", "called from"), tuple(rows)


def _examine_average(fn: Callable, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    praise = "the same average on every rank, in 2 (N - 1) messages of 1/N of the bytes"
    return each_world(
        "average_gradients", world_sizes, seed, timeout, lambda world, s: _average_on(fn, world, s), praise
    )


AVERAGE_GRADIENTS = Judged(
    name="average_gradients",
    inputs=(Argument("gradients"),),
    start="put all gradients into one flat tensor, cut it into as many slices as there are ranks, and begin with the "
    "half that adds up",
    examine=_examine_average,
)

# ---------------------------------------------------------------- 2: a slice of the sum, over nodes


@dataclass(frozen=True)
class Cluster:
    """`nodes` × `per_node` ranks, row by row, and a tensor of `elements` on each."""

    nodes: int
    per_node: int
    elements: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def cluster_of(world_size: int, seed: int) -> Cluster:
    """How so many ranks are laid out: several nodes of several ranks, where they can be.

    >>> cluster_of(8, 0)
    Cluster(nodes=4, per_node=2, elements=16)
    """
    draw = random.Random(f"sharded_sum {world_size} {seed}")
    sizes = [size for size in range(2, world_size) if world_size % size == 0] or [1]
    per_node = draw.choice(sizes)
    return Cluster(world_size // per_node, per_node, world_size * draw.randint(2, 4))


def _input(cluster: Cluster, seed: int, rank: int) -> Tensor:
    return drawn(f"sharded_sum {seed} {rank}", cluster.elements)


def _sharded(fn, cluster: Cluster, seed: int) -> dict:
    """Runs on a rank: what `fn` returns, whether its input is as it was, and what it communicated."""
    grid = torch.arange(cluster.ranks, device="cpu").view(cluster.nodes, cluster.per_node)
    node, _ = dist.new_subgroups_by_enumeration(grid.tolist())
    counterparts, _ = dist.new_subgroups_by_enumeration(grid.T.tolist())
    x = _input(cluster, seed, dist.get_rank())
    with count() as traffic:
        piece = fn(x, node, counterparts)
    return {
        "piece": piece.detach().clone() if isinstance(piece, Tensor) else None,
        "type": type(piece).__name__,
        "changed": not torch.equal(x, _input(cluster, seed, dist.get_rank())),
        "traffic": traffic,
    }


def _sharded_on(fn: Callable, world: World, seed: int) -> Report | None:
    cluster = cluster_of(world.size, seed)
    layout = f" ({times(cluster.nodes, 'node')} of {cluster.per_node})"
    found = world.run(_sharded, fn, cluster, seed)
    wanted = (cluster.elements // cluster.ranks,)
    for rank, one in enumerate(found):
        if one["piece"] is None or tuple(one["piece"].shape) != wanted:
            what = f"a {one['type']}" if one["piece"] is None else f"a tensor of shape {list(one['piece'].shape)}"
            what = "None: is there a return at its end?" if one["type"] == "NoneType" else what
            more = "" if one["type"] == "NoneType" else f", expected one slice of shape {list(wanted)}"
            return Report(False, f"rank {rank} returned {what}{more}{layout}")
        if one["changed"]:
            return Report(False, f"x was changed in place on rank {rank}: the caller still needs it, so work on a copy")
    return _wrong_slices(cluster, seed, found, layout) or _sharded_price(cluster, found, layout)


def _wrong_slices(cluster: Cluster, seed: int, found: list[dict], layout: str) -> Report | None:
    given = torch.stack([_input(cluster, seed, rank) for rank in range(cluster.ranks)]).double()
    sums = {"the sum": given.sum(0)}
    for node in range(cluster.nodes):
        mine = slice(node * cluster.per_node, (node + 1) * cluster.per_node)
        sums[f"the sum over node {node} alone"] = given[mine].sum(0)
    for place in range(cluster.per_node):
        sums[f"the sum over one rank of each node, those in place {place}"] = given[place :: cluster.per_node].sum(0)
    sums["the mean"] = given.mean(0)
    rows, seen = [], set()
    for rank, one in enumerate(found):
        name, index = _recognized(one["piece"].double(), sums, cluster.ranks)
        right = name == "the sum" and index == rank
        seen.add("right" if right else "moved" if name == "the sum" else name)
        said = f"slice {index} of {name}" if name else "no slice of any sum"
        rows.append(Row(right, (f"rank {rank}", said, f"slice {rank} of the sum")))
    if seen == {"right"}:
        return None
    wrong = [rank for rank, row in enumerate(rows) if not row.ok]
    if seen <= {"right", "moved"}:
        hint = (
            "every sum is right and lands on another rank: which slices does each rank of a node get from the first "
            "step? reorder x before it, so that they are those which its counterparts will own: view, transpose"
        )
    elif seen & {"the mean"}:
        hint = "nothing is to be divided here: the sum was asked for"
    elif any(name and name.startswith("the sum over") for name in seen):
        hint = "only some of the ranks are in these sums: one step adds up inside the nodes, the other between them"
    else:
        hint = "name for each step: of which ranks is it the sum, and which slices does this rank hold afterwards?"
    where = "every rank holds" if len(wrong) == cluster.ranks else f"{len(wrong)} of {cluster.ranks} ranks hold"
    headline = f"{where} something else than the rank's own slice of the sum{layout}"
    return Report(False, headline, ("", "holds", "expected"), tuple(rows), hint=hint)


def _recognized(piece: Tensor, sums: dict[str, Tensor], ranks: int) -> tuple[str, int]:
    for name, total in sums.items():
        for index, part in enumerate(total.chunk(ranks)):
            if torch.allclose(piece, part, rtol=1e-4, atol=1e-5):
                return name, index
    return "", 0


def _sharded_price(cluster: Cluster, found: list[dict], layout: str) -> Report | None:
    """A right answer that sends more than it must: over the slow links, or else in all."""
    size = FLOAT * cluster.elements
    enough = {
        "across": size // cluster.per_node * (cluster.nodes - 1) // cluster.nodes,
        "inside": size * (cluster.per_node - 1) // cluster.per_node,
    }
    rows, worst, shown = [], {"across": 0.0, "inside": 0.0}, 0
    for rank, one in enumerate(found):
        sums = {"across": 0.0, "inside": 0.0}
        for row in one["traffic"]:
            members = {rank, *row.peers} if row.operation in ("send", "recv") else set(row.group)
            kind = "across" if len({member // cluster.per_node for member in members}) > 1 else "inside"
            sums[kind] += float(row.bytes)
            if row.bytes:
                line = str(row.line or "")
                group = ", ".join(map(str, sorted(members)))
                rows.append((rank, kind, (f"rank {rank}", row.operation, group, f"{float(row.bytes):g}", line)))
        if any(sums[kind] > worst[kind] for kind in sums):
            shown = rank
        worst = {kind: max(worst[kind], sums[kind]) for kind in sums}
    too_many = [kind for kind in ("across", "inside") if worst[kind] > enough[kind]]
    if not too_many:
        return None
    kind = too_many[0]
    table = ("", "operation", "between ranks", "bytes sent", "called from")
    if kind == "across":
        say = f"a rank sends {worst[kind]:g} bytes in groups that span nodes{layout}, where {enough[kind]} are enough"
        hint = (
            "the slow links are busy while x is still whole, or with ranks of one node: add up inside the node first, "
            "and let only the piece that is left cross"
        )
        sends = [(which, cells) for rank, which, cells in rows if rank == shown]
        if sends[0][0] == "across" and len(sends[0][1][2].split(", ")) == cluster.nodes and len(sends) > 1:
            hint = (
                "the step between the nodes comes first, while x is still whole: swap the two, so that only the piece "
                "that the step inside the node leaves crosses"
            )
        elif worst[kind] == 2 * enough[kind]:
            hint = "an all-reduce of the piece brings back what you then throw away: which half of it do you need?"
    else:
        say = f"a rank sends {worst[kind]:g} bytes inside its node{layout}, where {enough[kind]} are enough"
        hint = "after the first step a rank needs one piece of its node's sum: which collective leaves no more?"
    of_one = tuple(Row(which != kind, cells) for rank, which, cells in rows if rank == shown)
    return Report(False, f"the slices are right, but {say}", table, of_one, hint=hint)


def _examine_sharded(fn: Callable, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    praise = "each has its slice of the sum, and only what must cross between nodes has crossed"
    return each_world("sharded_sum", world_sizes, seed, timeout, lambda world, s: _sharded_on(fn, world, s), praise)


SHARDED_SUM = Judged(
    name="sharded_sum",
    inputs=tuple(map(Argument, ("x", "node", "counterparts"))),
    start="two reduce-scatters, one in each group; write down which slices a rank holds after the first",
    examine=_examine_sharded,
)

EXERCISES = (AVERAGE_GRADIENTS, SHARDED_SUM)
