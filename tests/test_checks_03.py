"""The checks of exercise 03: right answers of several styles pass, and each plausible mistake gets its own words.

The right gradients are those of a single process with the whole batch. What is enough: buckets filled greedily, as in
Li et al. (2020), section 3.2; each gradient once, 2 (N-1)/N of its bytes; one number for the count of tokens.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cloudpickle
import pytest
import solution_cells
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils.grading import bucketed, examine, token_weights

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the functions of a notebook are sent

DURING, ACCUMULATE = "average_during_backward", "accumulate_gradients"
solution = partial(solution_cells.run_solution, "03_data_parallel")
refused = partial(solution_cells.refused, world_sizes=(2,), timeout=15)


def plain(report):
    return "a model with" not in report.headline


# ---------------------------------------------------------------- buckets: one answer, with a change for each mistake


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def filled(parameters, most, overfull=False):
    buckets = [[]]
    for p in parameters:
        held = sum(q.nbytes for q in buckets[-1])
        if buckets[-1] and (held >= most if overfull else held + p.nbytes > most):
            buckets.append([])
        buckets[-1].append(p)
    return buckets


def pieces(flat, bucket):
    return zip(bucket, flat.split([p.numel() for p in bucket]))


class Buckets:
    """A right answer: a bucket starts when it is complete. A mistake is a subclass that overrides one of its parts."""

    def __init__(self, model, bucket_bytes):
        self.buckets = self.make(model, bucket_bytes)
        self.of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.flats, self.works = {}, {}
        self.reset()
        self.watch()

    def make(self, model, bucket_bytes):
        return filled(reversed(trained(model)), bucket_bytes)

    def watch(self):
        for p in self.of:
            p.register_post_accumulate_grad_hook(self.ready)

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.flats, self.works = {}, {}

    def ready(self, p):
        self.missing[self.of[p]] -= 1
        if self.missing[self.of[p]] == 0:
            self.start(self.of[p])

    def collect(self, i):
        bucket = self.buckets[i]
        return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket])

    def start(self, i):
        self.flats[i] = self.collect(i)
        self.works[i] = dist.all_reduce(self.flats[i], async_op=True)

    def put_back(self, i):
        for p, piece in pieces(self.flats[i] / dist.get_world_size(), self.buckets[i]):
            p.grad = piece.view_as(p)

    def flush(self):
        for i in range(len(self.buckets)):
            if i not in self.works:
                self.start(i)

    def finish(self):
        self.flush()
        for i, work in self.works.items():
            work.wait()
            self.put_back(i)
        self.reset()


def answer(kind):
    def average_during_backward(model, bucket_bytes):
        return kind(model, bucket_bytes).finish

    average_during_backward.__name__ = kind.__name__
    return average_during_backward


class Views(Buckets):
    """The gradients are views into buckets that stay; the hook is on the node that accumulates."""

    def __init__(self, model, bucket_bytes):
        super().__init__(model, bucket_bytes)
        self.kept = [torch.zeros(sum(p.numel() for p in bucket)) for bucket in self.buckets]
        self.place = {p: piece for flat, bucket in zip(self.kept, self.buckets) for p, piece in pieces(flat, bucket)}

    def watch(self):
        self.nodes = [(p, p.expand_as(p).grad_fn.next_functions[0][0]) for p in self.of]
        for p, node in self.nodes:
            node.register_hook(lambda *_, p=p: self.move(p))

    def move(self, p):
        place = self.place[p].view_as(p)
        place.copy_(p.grad)
        p.grad = place
        self.ready(p)

    def collect(self, i):
        for p in self.buckets[i]:
            if p.grad is None:
                self.place[p].zero_()
        return self.kept[i].div_(dist.get_world_size())

    def put_back(self, i):
        pass


class Futures(Buckets):
    """What comes is divided by whoever comes first after it; finish waits for that."""

    def start(self, i):
        flat = self.collect(i)
        future = dist.all_reduce(flat, async_op=True).get_future()
        self.flats[i], self.works[i] = flat, future.then(lambda _: flat.div_(dist.get_world_size()))

    def put_back(self, i):
        for p, piece in pieces(self.flats[i], self.buckets[i]):
            if p.grad is not None:
                p.grad.copy_(piece.view_as(p))


def as_they_come(model, bucket_bytes):
    """No buckets made before: gradients wait in a list until the next one doesn't fit."""
    waiting, travelling = [], []

    def start():
        flat = torch.cat([p.grad.flatten() for p in waiting])
        travelling.append((list(waiting), flat, dist.all_reduce(flat, async_op=True)))
        waiting.clear()

    def ready(p):
        if waiting and sum(q.nbytes for q in waiting) + p.nbytes > bucket_bytes:
            start()
        waiting.append(p)

    def finish():
        start()
        for bucket, flat, work in travelling:
            work.wait()
            for p, piece in pieces(flat, bucket):
                p.grad.copy_(piece.view_as(p)).div_(dist.get_world_size())
        travelling.clear()

    for p in trained(model):
        p.register_post_accumulate_grad_hook(ready)
    return finish


@pytest.mark.parametrize(
    ("fn", "seed"),
    [(answer(Buckets), 0), (answer(Views), 7), (answer(Futures), 4), (as_they_come, 5), (as_they_come, 12)],
)
def test_right_buckets_of_several_styles_pass(fn, seed):
    report = examine(DURING, fn, world_sizes=(2 + seed % 3,), seed=seed)
    assert report.passed, report


def test_a_single_rank_has_nothing_to_wait_for():
    report = examine(DURING, answer(Buckets), world_sizes=(1,))
    assert report.passed and "is right on 1 rank: " in report.headline


# ---------------------------------------------------------------- buckets: wrong answers


class Sum(Buckets):
    def put_back(self, i):
        for p, piece in pieces(self.flats[i], self.buckets[i]):
            p.grad = piece.view_as(p)


class DividesTwice(Buckets):
    def collect(self, i):
        return super().collect(i) / dist.get_world_size()


class NeverFlushes(Buckets):
    def flush(self):
        pass


class NeverPutsBack(Buckets):
    def put_back(self, i):
        pass


class PutsBackTooEarly(Buckets):
    def start(self, i):
        super().start(i)
        super().put_back(i)

    def put_back(self, i):
        pass


class NeverWaits(Buckets):
    def finish(self):
        self.flush()
        for i in self.works:
            self.put_back(i)
        self.reset()


class Nothing(Buckets):
    def finish(self):
        pass

    def ready(self, p):
        pass


class NoGradient(Buckets):
    def put_back(self, i):
        super().put_back(i)
        for p in self.buckets[i]:
            p.grad = None


class GarbageForUnused(Buckets):
    def collect(self, i):
        bucket = self.buckets[i]
        return torch.cat([torch.ones(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket])


class Moves(Buckets):
    """The pieces are put back in another order than they were put in."""

    def put_back(self, i):
        self.flats[i] = self.flats[i].flip(0)
        super().put_back(i)


@pytest.mark.parametrize(
    ("kind", "says", "hint"),
    [
        (Sum, "the gradients are not the mean over the ranks: this is the sum", "the sum divided by the number of"),
        (DividesTwice, "scaled by 1/world_size (0.5)", "how often is each gradient divided"),
        (NeverPutsBack, "not the mean over the ranks: partial", "has to be put into p.grad"),
        (PutsBackTooEarly, "not the mean over the ranks", "there only after wait()"),
        (NeverWaits, "collectives have been waited for", "keep it, and let finish() call its wait()"),
        (Nothing, "not the mean over the ranks", "nothing was sent"),
        (NoGradient, "not the mean over the ranks: missing", "what the optimizer reads is p.grad"),
        (Moves, "not the mean over the ranks", "does each gradient get its own place in the bucket"),
    ],
)
def test_wrong_gradients_are_explained(kind, says, hint):
    report = refused(DURING, answer(kind))
    assert says in report.headline and hint in report.hint and plain(report)
    assert "in step" not in report.headline


SPECIAL = "a model with a tied weight, a frozen one and two that forward doesn't use: "


class FlushesOne(Buckets):
    """`if` for `while` in finish: of the buckets that are never complete only the next in line starts."""

    def flush(self):
        for i in range(len(self.buckets)):
            if i not in self.works:
                return self.start(i)


class InLine(Buckets):
    """A bucket starts when it and all before it are complete, as in the solution and in DDP."""

    def ready(self, p):
        self.missing[self.of[p]] -= 1
        while len(self.works) < len(self.buckets) and self.missing[len(self.works)] == 0:
            self.start(len(self.works))


def test_buckets_may_start_in_line():
    """Whatever stands behind a bucket that is never complete is then left to finish."""
    assert examine(DURING, answer(InLine), world_sizes=(2,), seed=2).passed


class InLineFlushesOne(InLine, FlushesOne):
    pass


@pytest.mark.parametrize("kind", [FlushesOne, InLineFlushesOne])
def test_every_bucket_that_is_never_complete_must_start(kind):
    report = refused(DURING, answer(kind))
    assert SPECIAL + "the gradient" in report.headline and "not the mean" in report.headline
    assert "layers.0.weight" in report.hint and "never left it" in report.hint and "must start it" in report.hint


def test_a_bucket_that_is_never_complete_must_start_too():
    """The tied weight and an unused parameter are in the last bucket."""
    report = refused(DURING, answer(NeverFlushes))
    assert SPECIAL + "the gradients of layers.0.weight and layers.0.bias are not the mean" in report.headline
    assert "layers.0.bias and layers.0.weight never left it" in report.hint
    assert "finish() must start it" in report.hint
    assert [row.cells[0] for row in report.rows if not row.ok] == ["layers.0.weight.grad", "layers.0.bias.grad"]
    assert "unused [4], 16 bytes, not used by forward" in report.detail
    assert "layers.0.unused [" in report.detail


def test_what_forward_does_not_use_gets_no_gradient():
    report = refused(DURING, answer(GarbageForUnused))
    assert (
        SPECIAL + "the gradients of unused and layers.0.unused are not the mean over the ranks: unexp"
        in report.headline
    )
    assert "must be zero, or None" in report.hint


# ---------------------------------------------------------------- buckets: the second step


class CountsOnce(Buckets):
    """What is missing is counted down in the first step, and stays at zero; what has travelled is remembered."""

    def finish(self):
        self.flush()
        for i, work in self.works.items():
            work.wait()
            self.put_back(i)


class SendsOnce(Buckets):
    def finish(self):
        self.flush()
        for i, work in self.works.items():
            work.wait()
            self.put_back(i)
        self.works = {i: work for i, work in self.works.items() if not work.is_completed()}
        self.missing = [-1] * len(self.buckets)
        self.flush = lambda: None


class Accumulates(Buckets):
    """The bucket keeps the mean of the step before, and the new gradients are added to it."""

    def collect(self, i):
        self.old = getattr(self, "old", {})
        fresh = super().collect(i) / dist.get_world_size()
        return fresh if i not in self.old else self.old[i] / dist.get_world_size() + fresh

    def put_back(self, i):
        self.old[i] = self.flats[i].clone()
        for p, piece in pieces(self.flats[i], self.buckets[i]):
            p.grad = piece.view_as(p)


class Stale(Buckets):
    """Filled in the first step only."""

    def collect(self, i):
        self.old = getattr(self, "old", {})
        if i not in self.old:
            self.old[i] = super().collect(i)
        return self.old[i].clone()


class Forgets(Buckets):
    """An index that isn't reset runs over the end."""

    def reset(self):
        super().reset()
        self.order = getattr(self, "order", iter(range(len(self.of))))

    def ready(self, p):
        next(self.order)
        super().ready(p)


@pytest.mark.parametrize(
    ("kind", "says", "hint"),
    [
        (CountsOnce, "not the mean over the ranks in step 2, after a right first one: stale", "begin anew"),
        (SendsOnce, "in step 2, after a right first one: partial", "has to begin anew, at the end of finish()"),
        (Accumulates, "in step 2, after a right first one: accumulated", "write over it, with copy_"),
        (Stale, "in step 2, after a right first one: stale", "put the new gradients in, in every step"),
        (Forgets, "every rank raised StopIteration (in step 2, after a right first one)", "has to begin anew"),
    ],
)
def test_a_second_step_that_goes_wrong_is_told_so(kind, says, hint):
    report = refused(DURING, answer(kind))
    assert says in report.headline and hint in report.hint and plain(report)


# ---------------------------------------------------------------- buckets: right gradients that took too much


class AfterBackward(Buckets):
    def watch(self):
        pass


class OneEach(Buckets):
    def make(self, model, bucket_bytes):
        return [[p] for p in reversed(trained(model))]


class OneForAll(Buckets):
    def make(self, model, bucket_bytes):
        return [list(reversed(trained(model)))]


class Overfull(Buckets):
    def make(self, model, bucket_bytes):
        return filled(reversed(trained(model)), bucket_bytes, overfull=True)


class Padded(Buckets):
    def collect(self, i):
        return F.pad(super().collect(i), (0, 1))

    def put_back(self, i):
        self.flats[i] = self.flats[i][: sum(p.numel() for p in self.buckets[i])]
        super().put_back(i)


class FrozenToo(Buckets):
    def make(self, model, bucket_bytes):
        return filled(reversed(list(model.parameters())), bucket_bytes)

    def watch(self):
        for p in self.of:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.ready)

    def put_back(self, i):
        super().put_back(i)
        for p in self.buckets[i]:
            p.grad = p.grad if p.requires_grad else None


class FrozenHooked(Buckets):
    def make(self, model, bucket_bytes):
        return filled(reversed(list(model.parameters())), bucket_bytes)


class Barriers(Buckets):
    def finish(self):
        super().finish()
        dist.barrier()


class OnlyTheFirst(Buckets):
    """One bucket starts in backward, the others when it is over."""

    def ready(self, p):
        if self.of[p] == 0:
            super().ready(p)


# Seed 0: 8 parameters in 5 buckets of at most 72 bytes, [3, 1, 1, 1, 2] of them; 316 bytes in all.
@pytest.mark.parametrize(
    ("kind", "says", "hint"),
    [
        (AfterBackward, "no all-reduce starts during backward", "register_post_accumulate_grad_hook"),
        (OnlyTheFirst, "only 1 of 5 all-reduces start during backward", "leave to finish() what is not complete"),
        (OneEach, "8 all-reduces, where 5 all-reduces of full buckets are enough", "wait for each other in a bucket"),
        (OneForAll, "an all-reduce takes 316 bytes, where a bucket holds 72 at most", "fill several"),
        (Overfull, "where a bucket holds 72 at most", "does it still fit?"),
        (Padded, "bytes more are reduced than the 316 that are trained", "reduced twice, or padded"),
        (Barriers, "5 all-reduces and 1 barrier", "nothing is needed but an all-reduce for each bucket"),
    ],
)
def test_right_gradients_that_took_too_much_are_told_what_is_enough(kind, says, hint):
    report = refused(DURING, answer(kind))
    assert "the gradients are right, but " in report.headline and says in report.headline and plain(report)
    assert hint in report.hint
    assert any("line " in row.cells[-1] for row in report.rows if not row.ok)


def test_a_frozen_parameter_has_no_gradient_to_send():
    report = refused(DURING, answer(FrozenToo))
    assert SPECIAL + "the gradients are right, but 64 bytes more are reduced" in report.headline
    assert "a frozen parameter has no gradient" in report.hint
    report = refused(DURING, answer(FrozenHooked))
    assert SPECIAL + "every rank raised RuntimeError: cannot register a hook" in report.headline
    assert "(before the first step)" in report.headline and "a frozen parameter has no gradient" in report.hint


# ---------------------------------------------------------------- buckets: does backward go on?


class Synchronous(Buckets):
    def start(self, i):
        self.flats[i] = self.collect(i)
        dist.all_reduce(self.flats[i])
        self.works[i] = None

    def finish(self):
        self.flush()
        for i in self.works:
            self.put_back(i)
        self.reset()


class WaitsForTheOneBefore(Buckets):
    """Asynchronous, but a bucket starts only when the one before it has arrived."""

    def start(self, i):
        for work in self.works.values():
            work.wait()
        super().start(i)


class FromTheFront(Buckets):
    """Filled from the first layer, and started in that order: the first is complete when backward is over."""

    def make(self, model, bucket_bytes):
        return filled(trained(model), bucket_bytes)

    def ready(self, p):
        self.missing[self.of[p]] -= 1
        while len(self.works) < len(self.buckets) and self.missing[len(self.works)] == 0:
            self.start(len(self.works))


class WaitsFromTheSecondStepOn(Buckets):
    steps = 0

    def start(self, i):
        super().start(i)
        if self.steps:
            self.works[i].wait()

    def finish(self):
        super().finish()
        self.steps += 1


class WaitsOnRankZero(Buckets):
    def start(self, i):
        super().start(i)
        if dist.get_rank() == 0:
            self.works[i].wait()


def test_every_rank_must_go_on():
    report = refused(DURING, answer(WaitsOnRankZero), world_sizes=(3,))
    assert "right, but backward stands still while a bucket travels, on rank 0" in report.headline
    assert report.columns[-1] == "when it starts, on rank 0" and not report.rows[-1].ok


@pytest.mark.parametrize("kind", [Synchronous, WaitsForTheOneBefore, WaitsFromTheSecondStepOn])
def test_whoever_waits_in_a_hook_keeps_backward_waiting(kind):
    report = refused(DURING, answer(kind))
    assert "the gradients are right, but backward stands still while a bucket travels" in report.headline
    assert "keep the Work that it returns, and call wait() in finish()" in report.hint
    assert report.rows[0].ok and not report.rows[-1].ok and report.rows[-1].cells[0] == "layer 0, backward"
    assert "in a second step" in report.detail and "/ communication" in report.detail


def test_buckets_from_the_front_start_when_backward_is_over():
    report = refused(DURING, answer(FromTheFront))
    assert "the gradients are right, but the first bucket starts when backward is over" in report.headline
    assert "backward begins at the last layer: so must the first bucket" in report.hint
    assert report.rows[-1].cells == ("layer 0, backward", "0 buckets have started") and not report.rows[-1].ok


# ---------------------------------------------------------------- buckets: on their way


class DividesOnTheWay(Buckets):
    """The first rank before the last has come, and this one when the sum is there: so no chance decides."""

    def start(self, i):
        super().start(i)
        while dist.get_rank() and not self.works[i].is_completed():
            time.sleep(0.001)
        self.flats[i] /= dist.get_world_size()

    def put_back(self, i):
        for p, piece in pieces(self.flats[i], self.buckets[i]):
            p.grad = piece.view_as(p)


class OneBufferForAll(Buckets):
    """Filled again while the bucket before is still travelling."""

    def collect(self, i):
        self.buffer = getattr(self, "buffer", torch.empty(1000))
        fresh = super().collect(i)
        return self.buffer[: len(fresh)].copy_(fresh)


@pytest.mark.parametrize("kind", [DividesOnTheWay, OneBufferForAll])
def test_what_travels_must_not_be_changed(kind):
    report = refused(DURING, answer(kind))
    assert "not the mean over the ranks" in report.headline and plain(report)
    assert "between all_reduce(async_op=True) and wait() the tensor isn't yours" in report.hint


def test_the_hint_on_what_was_changed_on_its_way():
    report = refused(DURING, answer(DividesOnTheWay))
    assert report.hint.startswith("every bucket travelled alike on all ranks, so one was changed on its way: between")


class InAThread(Buckets):
    """Right, and asynchronous, but nobody can count it."""

    def start(self, i):
        self.flats[i] = self.collect(i)
        self.works[i] = self.pool.submit(dist.all_reduce, self.flats[i])
        self.works[i].wait = self.works[i].result

    def watch(self):
        self.pool = ThreadPoolExecutor(1)
        super().watch()


class BareBackend(Buckets):
    def start(self, i):
        self.flats[i] = self.collect(i)
        self.works[i] = dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([self.flats[i]])


@pytest.mark.parametrize("kind", [InAThread, BareBackend])
def test_what_cannot_be_seen_is_not_taken_for_nothing(kind):
    report = refused(DURING, answer(kind))
    assert "the gradients are right, but only 0 bytes of their 316 could be seen" in report.headline
    assert "call collectives from the thread that calls you" in report.headline
    assert "async_op=True needs no thread" in report.hint


# ---------------------------------------------------------------- buckets: ranks that part ways, and no answers


class OrderOfItsOwn(Buckets):
    def make(self, model, bucket_bytes):
        buckets = super().make(model, bucket_bytes)
        random.Random(dist.get_rank()).shuffle(buckets)
        return buckets

    def watch(self):
        pass


class RankZeroOnly(Buckets):
    def start(self, i):
        if dist.get_rank() == 0:
            super().start(i)


def test_buckets_in_an_order_of_each_ranks_own():
    report = refused(DURING, answer(OrderOfItsOwn), world_sizes=(3,))
    assert "in step 1" in report.headline
    assert "the same buckets in the same order" in report.hint


def test_a_rank_that_does_not_take_part():
    report = refused(DURING, answer(RankZeroOnly), timeout=5)
    assert "in step 1" in report.headline
    assert "the same buckets in the same order" in report.hint


def not_written(model, bucket_bytes):
    raise NotImplementedError("your code goes here, in place of this line")


def finish_not_written(model, bucket_bytes):
    def finish():
        raise NotImplementedError("finish")

    return finish


def forgets_to_return(model, bucket_bytes):
    Buckets(model, bucket_bytes)


def returns_the_call(model, bucket_bytes):
    return [Buckets(model, bucket_bytes).finish]


def finish_with_an_argument(model, bucket_bytes):
    return lambda step: None


def takes_a_layer_away(model, bucket_bytes):
    made = Buckets(model, bucket_bytes)

    def finish():
        made.finish()
        del model.layers[3]

    return finish


def changes_values(model, bucket_bytes):
    made = Buckets(model, bucket_bytes)

    def finish():
        made.finish()
        with torch.no_grad():
            for p in trained(model):
                p -= 0.1 * p.grad if p.grad is not None else 0

    return finish


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (not_written, "not written yet: your code goes here"),
        (finish_not_written, "not written yet: finish"),
        (forgets_to_return, "rank 0 returned None: is there a return at its end?"),
        (returns_the_call, "rank 0 returned a list, expected a function"),
        (finish_with_an_argument, "TypeError"),
        (changes_values, "have changed on rank 0: only gradients should"),
        (takes_a_layer_away, "model.parameters() has changed on rank 0 (layers.3.bias and layers.3.weight): only"),
        (None, "of type NoneType, not a function"),
        (lambda model: None, "is called as average_during_backward(model, bucket_bytes)"),
    ],
)
def test_what_is_no_answer_is_named(fn, says):
    report = examine(DURING, fn, world_sizes=(2,))
    assert not report.passed and says in report.headline


def test_the_drawn_cases_hold_what_they_are_for():
    for seed in range(12):
        case = bucketed.plain(seed)
        sizes = case.trained.values()
        assert max(sizes) > case.bucket_bytes and 3 <= len(case.buckets()) <= len(sizes) - 3
        case = bucketed.special(seed)
        assert {"unused", "layers.0.weight"} <= set(case.buckets()[-1]) and case.buckets()[-2] == ["layers.0.unused"]
        without = {name for name, g in case.gradients(1, [0]).items() if g is None}
        assert without == {"unused", "layers.0.unused", "layers.1.weight"}
        assert case.left_to_finish() == 2 <= len(case.buckets()) - 2


# ---------------------------------------------------------------- tokens: right answers


def sum_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")


def mean_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def tokens_in(microbatches):
    return sum(int((targets != -100).sum()) for _, targets in microbatches)


def over_ranks(number, op=dist.ReduceOp.SUM):
    number = torch.tensor(float(number))
    dist.all_reduce(number, op)
    return number.item()


def under_no_sync(model, microbatches, loss_of, first=False, forward_outside=False, all_of_them=False):
    """The backward of all micro-batches, all but the last under no_sync()."""
    for i, (inputs, targets) in enumerate(microbatches):
        synchronised = i == 0 if first else i == len(microbatches) - 1
        quiet = all_of_them or not synchronised
        if forward_outside:
            loss = loss_of(model, inputs, targets)
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss.backward()
        else:
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss_of(model, inputs, targets).backward()


def scaled_loss(model, microbatches, factor=None, **how):
    weight = dist.get_world_size() / over_ranks(tokens_in(microbatches)) if factor is None else factor
    under_no_sync(model, microbatches, lambda *each: weight * sum_of(*each), **how)


def scaled_in_the_end(model, microbatches):
    """Sums are added up; the gradients are divided when they are there."""
    under_no_sync(model, microbatches, sum_of)
    total = over_ranks(tokens_in(microbatches))
    for p in model.parameters():
        p.grad *= dist.get_world_size() / total


def one_flat_tensor(model, microbatches):
    """DDP is kept quiet throughout; the number of tokens travels with the gradients."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.no_sync())
        for inputs, targets in microbatches:
            sum_of(model, inputs, targets).backward()
    parameters = list(model.parameters())
    flat = torch.cat([*(p.grad.flatten() for p in parameters), torch.tensor([float(tokens_in(microbatches))])])
    dist.all_reduce(flat)
    for p, piece in zip(parameters, (flat[:-1] / flat[-1]).split([p.numel() for p in parameters])):
        p.grad.copy_(piece.view_as(p))


def means_that_are_weighed(model, microbatches):
    """Each mean times its share of all tokens (torch's is NaN where there are none, and its gradient 0)."""
    n = dist.get_world_size()
    counts = torch.empty(n, dtype=torch.int64)
    dist.all_gather_single(counts, torch.tensor([tokens_in(microbatches)]))
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.no_sync())
        for i, (inputs, targets) in enumerate(microbatches):
            if i == len(microbatches) - 1:
                stack.close()
            loss = (targets != -100).sum() * mean_of(model, inputs, targets)
            (loss * n / counts.sum()).backward()


def its_own_hook(model, microbatches):
    """A communication hook, registered in the first call, that adds up; losses are kept for the log, detached."""
    if not hasattr(model, "summed"):
        model.register_comm_hook(None, _sum)
        model.summed = True
    weight, log = 1 / over_ranks(tokens_in(microbatches)), []

    def logged(*each):
        loss = weight * sum_of(*each)
        log.append(loss.detach())
        return loss

    under_no_sync(model, microbatches, logged)


def _sum(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def evaluates_first(model, microbatches):
    """Forward without a graph, of all at once, is nobody's business; a graph that is thrown away isn't alive."""
    with torch.no_grad():
        model.module(torch.cat([inputs.flatten() for inputs, _ in microbatches]))
    for inputs, _ in microbatches:
        model.module(inputs)
    scaled_loss(model, microbatches)


RIGHT = [scaled_loss, scaled_in_the_end, one_flat_tensor, means_that_are_weighed, its_own_hook, evaluates_first]


@pytest.mark.parametrize("fn", RIGHT)
def test_a_right_mean_of_several_styles_passes(fn):
    def accumulate_gradients(model, microbatches):
        fn(model, microbatches)

    report = examine(ACCUMULATE, accumulate_gradients, world_sizes=(2 + len(fn.__name__) % 2,), seed=len(fn.__name__))
    assert report.passed, report


def test_a_single_rank_has_a_mean_too():
    def accumulate_gradients(model, microbatches):
        scaled_loss(model, microbatches)

    report = examine(ACCUMULATE, accumulate_gradients, world_sizes=(1,))
    assert report.passed and "is right on 1 rank: " in report.headline


# ---------------------------------------------------------------- tokens: wrong answers


def mean_of_means(model, microbatches):
    under_no_sync(model, microbatches, lambda *each: mean_of(*each) / len(microbatches))


def sum_of_means(model, microbatches):
    under_no_sync(model, microbatches, mean_of)


def means_over_ranks(model, microbatches):
    totals = iter([over_ranks(tokens_in([one])) for one in microbatches])
    n, k = dist.get_world_size(), len(microbatches)
    under_no_sync(model, microbatches, lambda *each: n * sum_of(*each) / next(totals) / k)


def own_tokens_only(model, microbatches):
    scaled_loss(model, microbatches, 1 / max(1, tokens_in(microbatches)))


def forgets_that_ddp_averages(model, microbatches):
    scaled_loss(model, microbatches, 1 / over_ranks(tokens_in(microbatches)))


def forgets_it_the_other_way(model, microbatches):
    scaled_loss(model, microbatches, dist.get_world_size() ** 2 / over_ranks(tokens_in(microbatches)))


def divides_by_microbatches_too(model, microbatches):
    tokens = over_ranks(tokens_in(microbatches))
    scaled_loss(model, microbatches, dist.get_world_size() / tokens / len(microbatches))


def counts_padding(model, microbatches):
    tokens = over_ranks(sum(targets.numel() for _, targets in microbatches))
    scaled_loss(model, microbatches, dist.get_world_size() / tokens)


def never_divides(model, microbatches):
    scaled_loss(model, microbatches, 1.0)


def only_the_last(model, microbatches):
    weight = dist.get_world_size() / over_ranks(tokens_in(microbatches))

    def cleared(*each):
        model.zero_grad()
        return weight * sum_of(*each)

    under_no_sync(model, microbatches, cleared)


def counts_the_last_only(model, microbatches):
    scaled_loss(model, microbatches, dist.get_world_size() / over_ranks(tokens_in(microbatches[-1:])))


def never_synchronises(model, microbatches):
    scaled_loss(model, microbatches, all_of_them=True)


def goes_round_ddp(model, microbatches):
    weight = dist.get_world_size() / over_ranks(tokens_in(microbatches))
    for inputs, targets in microbatches:
        (weight * sum_of(model.module, inputs, targets)).backward()


def synchronises_the_first(model, microbatches):
    scaled_loss(model, microbatches, first=True)


def reduces_again(model, microbatches):
    scaled_loss(model, microbatches)
    for p in model.parameters():
        dist.all_reduce(p.grad)


def no_backward(model, microbatches):
    over_ranks(tokens_in(microbatches))
    for inputs, targets in microbatches:
        sum_of(model, inputs, targets)


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (mean_of_means, "not those of the mean over all tokens", "a mean of means: a token of a short micro-batch"),
        (sum_of_means, "not those of the mean over all tokens", "here the micro-batches' means are added up"),
        (
            means_over_ranks,
            "not those of the mean over all tokens",
            "each micro-batch has its own mean, though over all",
        ),
        (own_tokens_only, "not those of the mean over all tokens", "each rank divides by its own number of tokens"),
        (forgets_that_ddp_averages, ": scaled by 1/world_size (0.3333)", "DDP averages over the ranks"),
        (forgets_it_the_other_way, ": scaled by world_size (3)", "a factor world_size too many"),
        (divides_by_microbatches_too, ": scaled by 0.25", "dividing by the number of micro-batches, too"),
        (counts_padding, ": scaled by ", "padding is counted"),
        (never_divides, ": scaled by ", "this is a sum over tokens, averaged over the ranks"),
        (only_the_last, "not those of the mean over all tokens", "only the last micro-batch is in the gradients"),
        (counts_the_last_only, ": scaled by ", "the tokens of the last micro-batch alone are counted"),
        (never_synchronises, ": partial", "every rank has its own gradients: DDP averages in the backward of"),
        (goes_round_ddp, ": partial", "every rank has its own gradients: DDP averages in the backward of"),
        (synchronises_the_first, "the mean over all tokens", "the backward that synchronises must be the last"),
        (reduces_again, ": scaled by world_size (3)", "gradients are to be reduced once"),
        (no_backward, ": missing", "every micro-batch needs its backward"),
    ],
)
def test_a_wrong_mean_is_explained(fn, says, hint):
    report = refused(ACCUMULATE, fn, world_sizes=(3,))
    assert says in report.headline and hint in report.hint, report
    assert "whose targets" not in report.headline and "tokens that are not ignored, by micro-batch:" in report.detail


def masked_by_hand(model, microbatches):
    """A mean over those that are not ignored, times their share of all: 0/0 where there are none."""
    total = over_ranks(tokens_in(microbatches))

    def weighed(model, inputs, targets):
        kept = (targets != -100).flatten()
        each = F.cross_entropy(model(inputs).flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
        return dist.get_world_size() * (each * kept).sum() / kept.sum() * (kept.sum() / total)

    under_no_sync(model, microbatches, weighed)


def skips_what_has_no_tokens(model, microbatches):
    some = [(inputs, targets) for inputs, targets in microbatches if (targets != -100).any()]
    scaled_loss(model, some)


def skips_the_backward_only(model, microbatches):
    """The count is taken everywhere; a rank without tokens goes home."""
    total = over_ranks(tokens_in(microbatches))
    if tokens_in(microbatches):
        scaled_loss(model, microbatches, dist.get_world_size() / total)


def test_a_mean_over_no_tokens_is_not_a_number():
    report = refused(ACCUMULATE, masked_by_hand)
    assert "and a micro-batch whose targets are all ignored: the gradients are not those" in report.headline
    assert ": not finite" in report.headline and "a mean over no tokens is 0/0" in report.hint


@pytest.mark.parametrize("fn", [skips_what_has_no_tokens, skips_the_backward_only])
def test_a_rank_without_tokens_must_take_part(fn):
    report = refused(ACCUMULATE, fn)
    assert "whose targets are all ignored: the ranks hang in the first call" in report.headline
    assert "takes part with a loss of 0" in report.hint


def keeps_ddp_quiet(model, microbatches):
    scaled_loss(model, microbatches)
    model.require_backward_grad_sync = False


def test_the_second_call_meets_what_the_first_has_left():
    report = refused(ACCUMULATE, keeps_ddp_quiet)
    assert "in a second call, after a right first one: partial" in report.headline


def counts_in_the_first_call(model, microbatches):
    if not hasattr(model, "total"):
        model.total = over_ranks(tokens_in(microbatches))
    scaled_loss(model, microbatches, dist.get_world_size() / model.total)


def test_the_second_call_has_other_tokens():
    report = refused(ACCUMULATE, counts_in_the_first_call)
    assert "in a second call, after a right first one: scaled by " in report.headline
    assert "count them anew in every call" in report.hint


# ---------------------------------------------------------------- tokens: right gradients that took too much


def synchronises_all(model, microbatches):
    weight = dist.get_world_size() / over_ranks(tokens_in(microbatches))
    for inputs, targets in microbatches:
        (weight * sum_of(model, inputs, targets)).backward()


def forward_outside(model, microbatches):
    scaled_loss(model, microbatches, forward_outside=True)


def averages_again(model, microbatches):
    scaled_loss(model, microbatches)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def by_hand(model, microbatches):
    scaled_loss(model, microbatches, all_of_them=True)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def counts_each(model, microbatches):
    total = sum(over_ranks(tokens_in([one])) for one in microbatches)
    scaled_loss(model, microbatches, dist.get_world_size() / total)


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (synchronises_all, "3 all-reduces of gradients, where one is enough", "put forward and backward of every"),
        (forward_outside, "3 all-reduces of gradients, where one is enough", "unless its forward was called under"),
        (averages_again, "6 all-reduces of gradients, where one is enough", "nothing left to do by hand"),
        (by_hand, "5 all-reduces of gradients, where one is enough", "leave it to DDP"),
        (counts_each, "3 all-reduces of a few bytes, where one", "count on this rank first"),
    ],
)
def test_a_right_mean_that_took_too_much_is_told_what_is_enough(fn, says, hint):
    report = refused(ACCUMULATE, fn)
    assert "the gradients are right, but it takes " in report.headline and says in report.headline
    assert hint in report.hint
    assert any("line " in row.cells[-1] for row in report.rows if not row.ok)


def counts_by_broadcast(model, microbatches):
    total = 0
    for rank in range(dist.get_world_size()):
        number = torch.tensor(float(tokens_in(microbatches)))
        dist.broadcast(number, rank)
        total += number.item()
    scaled_loss(model, microbatches, dist.get_world_size() / total)


def test_what_ddp_tells_the_ranks_is_free_and_what_the_learner_does_is_not():
    """With two synchronised backwards DDP has two broadcasts of its own."""
    report = refused(ACCUMULATE, counts_by_broadcast)
    assert "it takes 2 broadcasts of a few bytes, where one for the number of tokens is enough" in report.headline
    report = refused(ACCUMULATE, synchronises_all)
    assert {row.cells[1] for row in report.rows} == {"all_reduce"}


def one_backward_of_all(model, microbatches):
    weight = dist.get_world_size() / over_ranks(tokens_in(microbatches))
    last = len(microbatches) - 1
    losses = [sum_of(model if i == last else model.module, *each) for i, each in enumerate(microbatches)]
    (weight * sum(losses)).backward()


def one_large_batch(model, microbatches):
    weight = dist.get_world_size() / over_ranks(tokens_in(microbatches))
    longest = max(inputs.shape[1] for inputs, _ in microbatches)
    inputs = torch.cat([F.pad(one, (0, longest - one.shape[1])) for one, _ in microbatches])
    targets = torch.cat([F.pad(one, (0, longest - one.shape[1]), value=-100) for _, one in microbatches])
    (weight * sum_of(model, inputs, targets)).backward()


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (one_backward_of_all, "the graphs of 3 micro-batches are alive at a time, where one fits", "before the next"),
        (one_large_batch, "a forward takes 48 tokens on rank 0, where its largest micro-batch has 16", "doesn't fit"),
    ],
)
def test_micro_batches_must_come_one_at_a_time(fn, says, hint):
    report = refused(ACCUMULATE, fn)
    assert "the gradients are right, but " + says in report.headline and hint in report.hint


def in_a_thread(model, microbatches):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(by_hand, model, microbatches).result()


def test_what_a_thread_sends_is_not_taken_for_nothing():
    report = refused(ACCUMULATE, in_a_thread)
    assert "the gradients are right, but only 0 bytes of their 740 could be seen" in report.headline


def steps_too(model, microbatches):
    scaled_loss(model, microbatches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda model: None, "is called as accumulate_gradients(model, microbatches), and yours is"),
        (lambda model, microbatches: not_written(model, 0), "not written yet: your code goes here"),
        (lambda model, microbatches: None, "the mean over all tokens: missing"),
        (lambda model, microbatches: 1 / 0, "ZeroDivisionError"),
        (lambda model, microbatches: steps_too(model, microbatches), "have changed on rank 0: only gradients should"),
    ],
)
def test_what_is_no_accumulation_is_named(fn, says):
    report = examine(ACCUMULATE, fn, world_sizes=(2,))
    assert not report.passed and says in report.headline, report


def test_the_drawn_micro_batches_hold_what_they_are_for():
    for world_size in (2, 3, 5):
        uneven, empty, single = token_weights.cases(world_size, world_size)
        assert len({sum(counts) for counts in uneven.counts}) > 1 and min(map(min, uneven.counts)) > 0
        assert sum(not any(counts) for counts in empty.counts) == 1 and single.microbatches == 1
        for case in (uneven, empty, single):
            for rank, counts in enumerate(case.counts):
                assert counts == tuple(
                    int((case.batch(rank, m)[1] != token_weights.IGNORED).sum()) for m in range(case.microbatches)
                )


# ---------------------------------------------------------------- the notebook


def test_the_solution_runs_from_top_to_bottom(capsys):
    names = solution(graded=True)
    said = capsys.readouterr().out
    assert said.count("✓") == 6  # two visible checks and four hidden ones
    assert said.count("is right on 2, 3 and 4 ranks: ") == 2
    assert all(hidden > 0.02 for hidden in names["timeline"].merge(names["steps"]).overlap().values())
