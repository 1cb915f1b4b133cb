"""The checks of exercise 02: right answers of several styles pass, and each plausible mistake gets its own words.

What is enough: 2 (N-1) messages of 1/N of the data for an all-reduce (Patarasuk and Yuan 2009); between m nodes of g
ranks, (m-1)/m of the g-th that is left after a reduce-scatter within the node.
"""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from solution_cells import refused, run_solution

from course_utils.grading import examine

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the functions of a notebook are sent


solution = partial(run_solution, "02_collectives")


# ---------------------------------------------------------------- the bucket: parts to make answers of


def exchange(outgoing, incoming):
    n, rank = dist.get_world_size(), dist.get_rank()
    sending = dist.isend(outgoing, dst=(rank + 1) % n)
    dist.recv(incoming, src=(rank - 1) % n)
    sending.wait()


def add_up(slices):
    n, rank = dist.get_world_size(), dist.get_rank()
    for step in range(n - 1):
        arriving = slices[(rank - step - 2) % n]
        inbox = torch.empty_like(arriving)
        exchange(slices[(rank - step - 1) % n].contiguous(), inbox)
        arriving += inbox


def hand_out(slices, steps=None):
    n, rank = dist.get_world_size(), dist.get_rank()
    for step in range(n - 1 if steps is None else steps):
        exchange(slices[(rank - step) % n].contiguous(), slices[(rank - step - 1) % n])


def ring(flat):
    slices = flat.tensor_split(dist.get_world_size())
    add_up(slices)
    hand_out(slices)
    return flat


def cat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


def put_back(flat, gradients):
    for gradient, piece in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(piece.view_as(gradient))


# ---------------------------------------------------------------- the bucket: right answers


def padded(gradients):
    """Slices of equal length: zeros behind the last element."""
    flat, n = cat(gradients), dist.get_world_size()
    more = torch.cat([flat, torch.zeros(-len(flat) % n)])
    put_back(ring(more)[: len(flat)] / n, gradients)


def direct(gradients):
    """No ring: each slice goes straight to its owner, who adds up and sends the sum to everybody."""
    n, rank = dist.get_world_size(), dist.get_rank()
    flat = cat(gradients)
    slices, others = flat.tensor_split(n), [peer for peer in range(n) if peer != rank]
    boxes = {peer: torch.empty_like(slices[rank]) for peer in others}
    works = [dist.isend(slices[peer], peer) for peer in others] + [dist.irecv(boxes[peer], peer) for peer in others]
    for work in works:
        work.wait()
    own = (slices[rank] + sum(boxes.values())) / n
    slices[rank].copy_(own)
    works = [dist.isend(own, peer) for peer in others] + [dist.irecv(slices[peer], peer) for peer in others]
    for work in works:
        work.wait()
    put_back(flat, gradients)


@pytest.mark.parametrize("name", ["average_gradients", "sharded_sum"])
def test_the_solution_passes(name):
    sizes = (2, 3, 4, 5) if name == "average_gradients" else (4, 6, 8)
    report = examine(name, solution()[name], world_sizes=sizes)
    assert report.passed and f"right on {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks" in report.headline


def test_the_solution_runs_from_top_to_bottom(capsys):
    times = solution(graded=True)
    assert capsys.readouterr().out.count("✓") == 6  # two visible checks and four hidden ones
    raced = times["launch"](times["race"], world_size=8, links=times["Node"](4, times["NVLINK"], times["INFINIBAND"]))
    assert set(raced[0]) == {"specification_2", "sharded_sum"}


@pytest.mark.parametrize("fn", [padded, direct])
def test_a_right_bucket_of_another_style_passes(fn):
    assert examine("average_gradients", fn, world_sizes=(2, 4), seed=7).passed


# ---------------------------------------------------------------- the bucket: wrong answers


def the_sum(gradients):
    put_back(ring(cat(gradients)), gradients)


def divides_at_every_step(gradients):
    flat, n = cat(gradients), dist.get_world_size()
    slices = flat.tensor_split(n)
    rank = dist.get_rank()
    for step in range(n - 1):
        arriving = slices[(rank - step - 2) % n]
        inbox = torch.empty_like(arriving)
        exchange(slices[(rank - step - 1) % n], inbox)
        arriving.add_(inbox).div_(2)
    hand_out(slices)
    put_back(flat, gradients)


def never_puts_back(gradients):
    ring(cat(gradients)).div_(dist.get_world_size())


def returns_it(gradients):
    flat = ring(cat(gradients)) / dist.get_world_size()
    return [p.view_as(g) for g, p in zip(gradients, flat.split([g.numel() for g in gradients]))]


def replaces(gradients):
    flat = ring(cat(gradients)) / dist.get_world_size()
    for i, piece in enumerate(flat.split([g.numel() for g in gradients])):
        gradients[i] = piece.view_as(gradients[i])


def first_half_only(gradients):
    flat = cat(gradients)
    add_up(flat.tensor_split(dist.get_world_size()))
    put_back(flat / dist.get_world_size(), gradients)


def a_step_short(gradients):
    flat, n = cat(gradients), dist.get_world_size()
    slices = flat.tensor_split(n)
    add_up(slices)
    hand_out(slices, steps=n - 2)
    put_back(flat / n, gradients)


def the_wrong_slice(gradients):
    """The second half begins with the slice that the first half began with."""
    flat, n, rank = cat(gradients), dist.get_world_size(), dist.get_rank()
    slices = flat.tensor_split(n)
    add_up(slices)
    for step in range(n - 1):
        outgoing, into = slices[(rank - step - 1) % n], slices[(rank - step - 2) % n]
        exchange(outgoing, into)
    put_back(flat / n, gradients)


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (the_sum, "this is the sum", "divided by the number of ranks"),
        (divides_at_every_step, "the averages are not right", "is something added twice, or divided too often"),
        (never_puts_back, "every rank still has its own gradients", "torch.cat makes a copy"),
        (returns_it, "every rank still has its own gradients", "doesn't see what you return"),
        (replaces, "every rank still has its own gradients", "write with copy_"),
        (first_half_only, "the averages are not right", "that is the first half"),
        (a_step_short, "the averages are not right", "how many steps does each half take"),
        (the_wrong_slice, "the averages are not right", "a slice that isn't finished"),
    ],
)
def test_a_wrong_average_is_explained(fn, says, hint):
    report = refused("average_gradients", fn, world_sizes=(4,))
    assert says in report.headline and hint in report.hint
    assert [row.cells[0] for row in report.rows] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_the_slices_that_are_right_are_named():
    report = refused("average_gradients", first_half_only, world_sizes=(4,))
    assert [row.cells[1] for row in report.rows] == ["0", "1", "2", "3"]


def a_ring_for_each(gradients):
    for gradient in gradients:
        gradient.copy_(ring(gradient.flatten()).view_as(gradient) / dist.get_world_size())


def a_whole_ring_for_each(gradients):
    for gradient in gradients:
        whole = [gradient.flatten()]
        whole_tensors_round_the_ring(whole)
        gradient.copy_(whole[0].view_as(gradient))


def whole_tensors_round_the_ring(gradients):
    flat, n = cat(gradients), dist.get_world_size()
    parts = {dist.get_rank(): flat}
    for step in range(n - 1):
        inbox = torch.empty_like(flat)
        exchange(parts[(dist.get_rank() - step) % n], inbox)
        parts[(dist.get_rank() - step - 1) % n] = inbox
    put_back(sum(parts[rank] for rank in range(n)) / n, gradients)  # one order, so the same bits


def in_the_order_of_arrival(gradients):
    """The naive ring, whose replicas differ in the last bit."""
    total, passing, n = cat(gradients), cat(gradients), dist.get_world_size()
    for _ in range(n - 1):
        inbox = torch.empty_like(passing)
        exchange(passing, inbox)
        total, passing = total + inbox, inbox
    put_back(total / n, gradients)


def by_rank_0(gradients):
    flat, n = cat(gradients), dist.get_world_size()
    if dist.get_rank():
        dist.send(flat, 0)
        dist.recv(flat, 0)
    else:
        for peer in range(1, n):
            inbox = torch.empty_like(flat)
            dist.recv(inbox, peer)
            flat += inbox
        flat /= n
        for peer in range(1, n):
            dist.send(flat, peer)
    put_back(flat, gradients)


def by_the_library(gradients):
    flat = cat(gradients)
    dist.all_reduce(flat)
    put_back(flat / dist.get_world_size(), gradients)


def padded_too_far(gradients):
    flat, n = cat(gradients), dist.get_world_size()
    longer = torch.cat([flat, torch.zeros(2 * n - len(flat) % n)])
    put_back(ring(longer)[: len(flat)] / n, gradients)


# On 4 ranks seed 0 draws gradients of 18, 6, 10 and 1 elements: 35, of 140 bytes; 9 in the largest slice.
@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (a_ring_for_each, "24 messages", "let all gradients travel in one flat tensor"),
        (a_whole_ring_for_each, "each rank sends 12 messages and 420 bytes", "each passes its tensor on whole"),
        (whole_tensors_round_the_ring, "each rank sends 3 messages and 420 bytes", "2 times as many bytes as needed"),
        (by_rank_0, "rank 0 sends 3 messages and 420 bytes", "give every rank one slice"),
        (padded_too_far, "each rank sends 6 messages and 240 bytes", "tensor_split makes the most even ones"),
    ],
)
def test_a_right_average_that_takes_too_much_is_told_what_is_enough(fn, says, hint):
    report = refused("average_gradients", fn, world_sizes=(4,))
    assert says in report.headline
    assert "where 6 messages of at most 36 bytes are enough: 2 (N - 1) of 1/N of 140 bytes" in report.headline
    assert hint in report.hint
    assert any("line " in row.cells[4] for row in report.rows)


def test_a_collective_is_no_ring():
    report = refused("average_gradients", by_the_library, world_sizes=(2,))
    assert "the averages are right, but all-reduce did the work" in report.headline
    assert "nothing but send, isend, recv and irecv" in report.hint


def test_replicas_that_differ_in_the_last_bit_are_no_replicas():
    report = refused("average_gradients", in_the_order_of_arrival, world_sizes=(5,))
    assert "not the same on all ranks to the last bit" in report.headline and "added up once" in report.hint


def all_send_first(gradients):
    n, rank = dist.get_world_size(), dist.get_rank()
    dist.send(gradients[0], (rank + 1) % n)
    dist.recv(gradients[0], (rank - 1) % n)


def test_ranks_that_all_send_are_told_of_isend():
    report = refused("average_gradients", all_send_first, world_sizes=(2,), timeout=2)
    assert "the ranks hang" in report.headline and "isend starts a message and goes on" in report.hint
    assert "rank 0 was waiting in send" in report.detail


def with_too_few_chunks(gradients):
    """`chunk` may give fewer slices than were asked for."""
    flat, n = cat(gradients)[:9], 4
    slices = flat.chunk(n)
    exchange(slices[dist.get_rank()], torch.empty_like(slices[0]))


def test_an_error_on_a_rank_is_shown_with_its_line():
    report = refused("average_gradients", with_too_few_chunks, world_sizes=(4,))
    assert "rank 3 raised IndexError" in report.headline and "slices[dist.get_rank()]" in report.detail


def not_written(gradients):
    raise NotImplementedError("your code goes here, in place of this line")


def test_what_is_not_written_yet_gets_a_start():
    report = refused("average_gradients", not_written)
    assert "not written yet" in report.headline and "one flat tensor" in report.hint


# ---------------------------------------------------------------- a slice of the sum: right answers


def scattered(x, group):
    piece = torch.empty(len(x) // dist.get_world_size(group))
    dist.reduce_scatter_single(piece, x, group=group)
    return piece


def reordered(x, node, counterparts):
    g, m = dist.get_world_size(node), dist.get_world_size(counterparts)
    return x.view(m, g, -1).transpose(0, 1).flatten()


def by_index(x, node, counterparts):
    """A list of slices, chosen one by one, and torch's older functions."""
    g, m = dist.get_world_size(node), dist.get_world_size(counterparts)
    slices = x.chunk(g * m)
    inputs = [torch.cat([slices[k * g + place] for k in range(m)]) for place in range(g)]
    piece = torch.empty_like(inputs[0])
    dist.reduce_scatter(piece, inputs, group=node)
    own = torch.empty_like(slices[0])
    dist.reduce_scatter(own, list(piece.chunk(m)), group=counterparts)
    return own


def by_messages(x, node, counterparts):
    """An all-to-all in each group, and the adding by hand."""
    for group in (node, counterparts):
        x = reordered(x, node, counterparts) if group is node else x
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        x = received.view(dist.get_world_size(group), -1).sum(0)
    return x


@pytest.mark.parametrize("fn", [by_index, by_messages])
def test_a_right_sum_of_another_style_passes(fn):
    assert examine("sharded_sum", fn, world_sizes=(4, 6), seed=11).passed


# ---------------------------------------------------------------- a slice of the sum: wrong answers


def not_reordered(x, node, counterparts):
    return scattered(scattered(x, node), counterparts)


def reordered_the_other_way(x, node, counterparts):
    g, m = dist.get_world_size(node), dist.get_world_size(counterparts)
    return scattered(scattered(x.view(g, m, -1).transpose(0, 1).flatten(), node), counterparts)


def inside_only(x, node, counterparts):
    piece = scattered(reordered(x, node, counterparts), node)
    return piece.chunk(dist.get_world_size(counterparts))[dist.get_rank(counterparts)].clone()


def between_only(x, node, counterparts):
    piece = scattered(x, counterparts)
    return piece.chunk(dist.get_world_size(node))[dist.get_rank(node)].clone()


def the_mean(x, node, counterparts):
    return scattered(scattered(reordered(x, node, counterparts), node), counterparts) / dist.get_world_size()


# Seed 0 lays out 6 ranks as 2 nodes of 3: rank 1, in place 1 of node 0, gets slices 2 and 3 of x as it is.
@pytest.mark.parametrize(
    ("fn", "holds", "hint"),
    [
        (not_reordered, "slice 2 of the sum", "lands on another rank"),
        (inside_only, "slice 1 of the sum over node 0 alone", "only some of the ranks"),
        (between_only, "slice 1 of the sum over one rank of each node, those in place 1", "only some of the ranks"),
        (the_mean, "slice 1 of the mean", "nothing is to be divided"),
    ],
)
def test_a_wrong_slice_is_named(fn, holds, hint):
    report = refused("sharded_sum", fn, world_sizes=(6,))
    assert "something else than the rank's own slice of the sum (2 nodes of 3)" in report.headline
    assert report.rows[1].cells == ("rank 1", holds, "slice 1 of the sum")
    assert hint in report.hint


def test_what_four_ranks_cannot_tell_six_can():
    """With as many nodes as ranks per node the table of slices is square, and either way round is right."""
    assert examine("sharded_sum", reordered_the_other_way, world_sizes=(4,)).passed
    report = refused("sharded_sum", reordered_the_other_way, world_sizes=(6,))
    assert "lands on another rank" in report.hint


def flat(x, node, counterparts):
    return scattered(x, None)


def between_first(x, node, counterparts):
    return scattered(scattered(x, counterparts), node)


def all_of_the_piece(x, node, counterparts):
    piece = scattered(reordered(x, node, counterparts), node)
    dist.all_reduce(piece, group=counterparts)
    return piece.chunk(dist.get_world_size(counterparts))[dist.get_rank(counterparts)].clone()


def everything_inside(x, node, counterparts):
    x = reordered(x, node, counterparts)
    dist.all_reduce(x, group=node)
    return scattered(x.chunk(dist.get_world_size(node))[dist.get_rank(node)].contiguous(), counterparts)


# 6 ranks of seed 0: 24 elements, 96 bytes, 2 nodes of 3. Enough: 1/2 of 96/3 = 16 across, 2/3 of 96 = 64 inside.
@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (flat, "80 bytes in groups that span nodes (2 nodes of 3), where 16 are enough", "add up inside the node"),
        (between_first, "sends 48 bytes in groups that span nodes", "the step between the nodes comes first"),
        (all_of_the_piece, "sends 32 bytes in groups that span nodes", "an all-reduce of the piece"),
        (everything_inside, "sends 128 bytes inside its node (2 nodes of 3), where 64 are enough", "one piece of its"),
    ],
)
def test_a_right_slice_that_takes_too_much_is_told_what_is_enough(fn, says, hint):
    report = refused("sharded_sum", fn, world_sizes=(6,))
    assert "the slices are right, but a rank " in report.headline and says in report.headline
    assert hint in report.hint


def forgets_to_return(x, node, counterparts):
    scattered(x, node)


def returns_all(x, node, counterparts):
    return scattered(x, node)


def changes_x(x, node, counterparts):
    x.copy_(reordered(x, node, counterparts))
    return scattered(scattered(x, node), counterparts)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (forgets_to_return, "rank 0 returned None: is there a return at its end?"),
        (returns_all, "rank 0 returned a tensor of shape [8], expected one slice of shape [4]"),
        (changes_x, "x was changed in place on rank 0"),
    ],
)
def test_what_is_no_slice_is_said_in_a_sentence(fn, says):
    assert says in refused("sharded_sum", fn, world_sizes=(4,)).headline
