"""The checks of exercise 04: right answers of several styles pass, and each plausible mistake gets its own words.

What is enough: ZeRO-2 sends 2 (N-1) Ψ bytes in a step and keeps a share of gradients and moments (Rajbhandari et al.
2020, sections 5 and 7); a norm over shards takes one number from each rank.
"""

from __future__ import annotations

import sys
import threading
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from solution_cells import refused, run_solution
from torch import nn

from course_utils.grading import examine

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the functions of a notebook are sent

solution = partial(run_solution, "04_zero")


# ---------------------------------------------------------------- ZeRO-2: parts to make answers of


class Sliced:
    """Of each parameter, filled up with zeros, every rank keeps and updates one of N slices."""

    def __init__(self, model, lr, eps):
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.slices = {p: self.slice_of(p) for p in self.trained(model)}
        for p in self.slices:
            p.register_post_accumulate_grad_hook(self.reduce)
        self.adam = self.make_adam(lr, eps)

    def trained(self, model):
        return [p for p in model.parameters() if p.requires_grad]

    def make_adam(self, lr, eps):
        return torch.optim.Adam(self.slices.values(), lr=lr, eps=eps)

    def padded(self, x):
        return nn.functional.pad(x.flatten(), (0, -x.numel() % self.n))

    def slice_of(self, p):
        return nn.Parameter(self.padded(p.detach()).chunk(self.n)[self.rank].clone())

    def reduce(self, p):
        self.slices[p].grad = self.averaged_slice(p.grad)
        p.grad = None

    def averaged_slice(self, grad):
        whole = self.padded(grad) / self.n
        own = torch.empty(len(whole) // self.n)
        dist.reduce_scatter_single(own, whole)
        return own

    def step(self):
        self.adam.step()
        self.adam.zero_grad()
        for p, own in self.slices.items():
            self.gather(p, own.detach())

    def gather(self, p, own):
        whole = torch.empty(len(own) * self.n)
        dist.all_gather_single(whole, own)
        p.data.copy_(whole[: p.numel()].view_as(p))


class DataParallel:
    """Gradients averaged on every rank, and an update of everything on every rank: no ZeRO yet."""

    def __init__(self, model, lr, eps):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.adam = torch.optim.Adam(self.parameters, lr=lr, eps=eps)

    def step(self):
        for p in self.parameters:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.adam.step()
        self.adam.zero_grad()


# ---------------------------------------------------------------- ZeRO-2: right answers


class Buckets:
    """Parameters are views of one flat buffer, cut evenly; gradients go out in buckets; Adam is written by hand."""

    def __init__(self, model, lr, eps):
        self.n, self.rank, self.lr, self.eps, self.t = dist.get_world_size(), dist.get_rank(), lr, eps, 0
        self.buckets, waiting = [], []
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            waiting.append(p)
            if sum(q.numel() for q in waiting) > 150:
                self.add(waiting)
                waiting = []
        if waiting:
            self.add(waiting)

    def add(self, parameters):
        flat = torch.cat([p.detach().flatten() for p in parameters])
        flat = nn.functional.pad(flat, (0, -len(flat) % self.n))
        start = 0
        for p in parameters:
            p.data = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        own = flat.chunk(self.n)[self.rank]
        bucket = {"parameters": parameters, "flat": flat, "own": own, "m": torch.zeros_like(own)}
        bucket |= {"v": torch.zeros_like(own), "missing": len(parameters), "gradient": None}
        self.buckets.append(bucket)
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: self.arrived(bucket))

    def arrived(self, bucket):
        bucket["missing"] -= 1
        if bucket["missing"] == 0:
            flat = torch.cat([p.grad.flatten() for p in bucket["parameters"]])
            flat = nn.functional.pad(flat, (0, -len(flat) % self.n))
            bucket["gradient"] = torch.empty_like(bucket["own"])
            dist.reduce_scatter_single(bucket["gradient"], flat, op=dist.ReduceOp.AVG)
            for p in bucket["parameters"]:
                p.grad = None
            bucket["missing"] = len(bucket["parameters"])

    def step(self):
        self.t += 1
        for bucket in self.buckets:
            m, v, g = bucket["m"], bucket["v"], bucket["gradient"]
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            bucket["own"] -= self.lr * m / (1 - 0.9**self.t) / ((v / (1 - 0.999**self.t)).sqrt() + self.eps)
            dist.all_gather_single(bucket["flat"], bucket["own"].clone())
            bucket["gradient"] = None


class Owners:
    """Each parameter whole on one rank, the largest first to whoever has least: reduce to the owner, then broadcast."""

    def __init__(self, model, lr, eps):
        n, rank = dist.get_world_size(), dist.get_rank()
        self.owner, load = {}, [0] * n
        for p in sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: -p.numel()):
            self.owner[p] = load.index(min(load))
            load[self.owner[p]] += p.numel()
            p.register_post_accumulate_grad_hook(self.reduce)
        self.adam = torch.optim.Adam([p for p in self.owner if self.owner[p] == rank], lr=lr, eps=eps)

    def reduce(self, p):
        dist.reduce(p.grad, self.owner[p])
        if self.owner[p] == dist.get_rank():
            p.grad /= dist.get_world_size()
        else:
            p.grad = None

    def step(self):
        self.adam.step()
        self.adam.zero_grad()
        for p, owner in self.owner.items():
            dist.broadcast(p.data, owner)


def as_a_function(model, lr, eps):
    """An object of a class that only this function knows; every rank sends every other its slice."""

    class ByMessages(Sliced):
        def averaged_slice(self, grad):
            whole = self.padded(grad)
            boxes = torch.empty_like(whole)
            dist.all_to_all_single(boxes, whole)
            return boxes.view(self.n, -1).mean(0)

    return ByMessages(model, lr, eps)


class GathersAtOnce(Sliced):
    """All all-gathers are started before the first is waited for, and one is asked until it is done."""

    def step(self):
        self.adam.step()
        self.adam.zero_grad()
        jobs = []
        for p, own in self.slices.items():
            whole = torch.empty(len(own) * self.n)
            jobs.append((p, whole, dist.all_gather_single(whole, own.detach(), async_op=True)))
        while not jobs[0][2].is_completed():
            pass
        for p, whole, work in jobs:
            work.wait()
            p.data.copy_(whole[: p.numel()].view_as(p))


class ManyBroadcasts(Sliced):
    """Each slice goes out by itself, all at once: more collectives under way than emulated links keep in mind."""

    def step(self):
        self.adam.step()
        self.adam.zero_grad()
        jobs = []
        for p, own in self.slices.items():
            whole = torch.empty(len(own) * self.n)
            parts = whole.chunk(self.n)
            parts[self.rank].copy_(own.detach())
            jobs.append((p, whole, [dist.broadcast(part, r, async_op=True) for r, part in enumerate(parts)]))
        for p, whole, works in jobs:
            for work in works:
                work.wait()
            p.data.copy_(whole[: p.numel()].view_as(p))


class BySubgroup(Sliced):
    """Collectives on a group of its own, with lists of tensors."""

    def __init__(self, model, lr, eps):
        self.group = dist.new_group()
        super().__init__(model, lr, eps)

    def averaged_slice(self, grad):
        parts = [part.clone() for part in (self.padded(grad) / self.n).chunk(self.n)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=self.group)
        return own

    def gather(self, p, own):
        parts = [torch.empty_like(own) for _ in range(self.n)]
        dist.all_gather(parts, own, group=self.group)
        p.data.copy_(torch.cat(parts)[: p.numel()].view_as(p))


@pytest.mark.parametrize(
    ("fn", "seed", "sizes"),
    [
        (Buckets, 0, (2, 3)),
        (Buckets, 5, (4,)),
        (Owners, 7, (3, 4)),
        (as_a_function, 11, (2, 5)),
        (GathersAtOnce, 3, (3,)),
        (ManyBroadcasts, 2, (5,)),
        (BySubgroup, 1, (2,)),
    ],
)
def test_a_right_zero_2_passes(fn, seed, sizes):
    report = examine("ZeRO2", fn, world_sizes=sizes, seed=seed)
    assert report.passed and "2 (N - 1) Ψ sent" in report.headline, report


# ---------------------------------------------------------------- ZeRO-2: right by luck


class WaitsForTheLast(Sliced):
    """All all-gathers are started, and only the last is waited for."""

    def step(self):
        self.adam.step()
        self.adam.zero_grad()
        jobs = []
        for p, own in self.slices.items():
            whole = torch.empty(len(own) * self.n)
            jobs.append((p, whole, dist.all_gather_single(whole, own.detach(), async_op=True)))
        jobs[-1][2].wait()
        for p, whole, _ in jobs:
            p.data.copy_(whole[: p.numel()].view_as(p))


class NeverWaits(Sliced):
    """Reduce-scatters in backward, into buffers that have anything in them."""

    def averaged_slice(self, grad):
        whole = self.padded(grad) / self.n
        own = torch.empty(len(whole) // self.n)
        dist.reduce_scatter_single(own, whole, async_op=True)
        return own


@pytest.mark.parametrize(("fn", "when"), [(WaitsForTheLast, "step"), (NeverWaits, "backward")])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_not_waited_for_is_found_whether_or_not_it_has_arrived(fn, when, seed):
    report = refused("ZeRO2", fn, world_sizes=(2,), seed=seed)
    assert "ZeRO2 on 2 ranks: on rank 0 step 1 ends before" in report.headline, report
    assert "have been waited for" in report.headline and "call its wait()" in report.hint
    assert when in {row.cells[1] for row in report.rows if not row.ok} and all(
        "line " in row.cells[3] for row in report.rows
    )


# ---------------------------------------------------------------- ZeRO-2: wrong parameters


class NeverReduced(DataParallel):
    def step(self):
        self.adam.step()
        self.adam.zero_grad()


class OwnGradients(Sliced):
    def averaged_slice(self, grad):
        return self.padded(grad).chunk(self.n)[self.rank].clone()


class TheSum(Sliced):
    def averaged_slice(self, grad):
        return super().averaged_slice(grad) * self.n


class DividedTwice(Sliced):
    def averaged_slice(self, grad):
        return super().averaged_slice(grad) / self.n


class NoGather(Sliced):
    def gather(self, p, own):
        start, whole = self.rank * len(own), p.data.view(-1)
        whole[start : start + len(own)] = own[: max(0, p.numel() - start)]


class NotWrittenBack(Sliced):
    def gather(self, p, own):
        dist.all_gather_single(torch.empty(len(own) * self.n), own)


class OwnEps(Sliced):
    def make_adam(self, lr, eps):
        return torch.optim.Adam(self.slices.values(), lr=lr)


class OwnLr(Sliced):
    def make_adam(self, lr, eps):
        return torch.optim.Adam(self.slices.values(), eps=eps)


class NewAdam(Sliced):
    def step(self):
        self.adam = self.make_adam(0.05, 1e-3)
        super().step()


class Accumulates(Sliced):
    """`zero_grad` is forgotten, and the shares add up."""

    def reduce(self, p):
        own, old = self.averaged_slice(p.grad), self.slices[p].grad
        self.slices[p].grad = own if old is None else old + own
        p.grad = None

    def step(self):
        self.adam.step()
        for p, own in self.slices.items():
            self.gather(p, own.detach())


class KeepsTheWhole(Sliced):
    """`p.grad` is never let go."""

    def reduce(self, p):
        self.slices[p].grad = self.averaged_slice(p.grad)


class OwnersKeep(Owners):
    def step(self):
        self.adam.step()
        for p, owner in self.owner.items():
            dist.broadcast(p.data, owner)


class ByHand(Sliced):
    """Adam by hand, with one of its lines wrong."""

    decay, counts, corrects, keeps = (0.9, 0.999), True, True, True

    def make_adam(self, lr, eps):
        self.lr, self.eps, self.t = lr, eps, 0
        self.moments = {p: [torch.zeros_like(own), torch.zeros_like(own)] for p, own in self.slices.items()}

    def order(self):
        return list(self.slices)

    @torch.no_grad()
    def step(self):
        self.t = self.t + 1 if self.counts else 1
        for p in self.order():
            own, moments = self.slices[p], self.moments[p]
            g, (a, b) = own.grad, self.decay
            moments[0] = a * moments[0] * self.keeps + (1 - a) * g
            moments[1] = b * moments[1] * self.keeps + (1 - b) * g * g
            m, v = (x / (1 - d**self.t if self.corrects else 1) for x, d in zip(moments, self.decay))
            own -= self.lr * m / (v.sqrt() + self.eps)
        for p, own in self.slices.items():
            own.grad = None
            self.gather(p, own.detach())


class NoCorrection(ByHand):
    corrects = False


class StepIsOne(ByHand):
    counts = False


class StepIsZero(ByHand):
    def make_adam(self, lr, eps):
        super().make_adam(lr, eps)
        self.t = -1


class NoMemory(ByHand):
    keeps = False


class OtherBetas(ByHand):
    decay = (0.9, 0.99)


class TiedTwice(ByHand):
    def trained(self, model):
        self.names = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
        return super().trained(model)

    def order(self):
        return self.names


class OnlyRankZeroHandsOut(Owners):
    """Every rank updates everything with its own gradients, and takes over only what rank 0 owns."""

    def __init__(self, model, lr, eps):
        super().__init__(model, lr, eps)
        self.adam = torch.optim.Adam(self.owner, lr=lr, eps=eps)

    def reduce(self, p):
        pass

    def step(self):
        self.adam.step()
        self.adam.zero_grad()
        for p, owner in self.owner.items():
            if owner == 0:
                dist.broadcast(p.data, owner)


class FromRankZero(Owners):
    def step(self):
        self.adam.step()
        self.adam.zero_grad()
        for p in self.owner:
            dist.broadcast(p.data, 0)


class BigBucket(Sliced):
    """A bucket of three quarters of all gradients: less than all of them, and too many."""

    def __init__(self, model, lr, eps):
        super().__init__(model, lr, eps)
        self.bucket, self.arrived = [], 0

    def reduce(self, p):
        self.bucket.append(p)
        self.arrived += 1
        if len(self.bucket) > 3 * len(self.slices) / 4 or self.is_last():
            for each in self.bucket:
                super().reduce(each)
            self.bucket = []

    def is_last(self):
        return self.arrived % len(self.slices) == 0


class LastBucketStays(BigBucket):
    """A bucket goes when it is full, and the last never is."""

    def is_last(self):
        return False


class Frozen(Sliced):
    """Weight decay for everything that there is."""

    def __init__(self, model, lr, eps):
        super().__init__(model, lr, eps)
        self.model = model

    def step(self):
        super().step()
        for p in self.model.parameters():
            if p not in self.slices:
                p.data *= 0.99


class Shifted(Buckets):
    """Every parameter starts one number too late in the flat buffer."""

    def add(self, parameters):
        super().add(parameters)
        for p in parameters:
            p.data = p.data.flatten().roll(1).view_as(p)


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (NeverReduced, "after step 1 each rank has trained on its own batch alone", "those of all ranks' batches"),
        (OwnGradients, "after step 1 every rank has the same parameters", "reduced before the update"),
        (TheSum, "after step 1 the parameters are not Adam's", "divide by the number of ranks"),
        (DividedTwice, "after step 1 the parameters are not Adam's", "twice"),
        (NoGather, "after step 1 each rank has updated a share of its own", "an all-gather, or broadcasts"),
        (NotWrittenBack, "after step 1 no parameter has changed", "write it back"),
        (OwnEps, "after step 1", "eps is an argument"),
        (OwnLr, "after step 1", "lr is an argument"),
        (NoCorrection, "after step 1", "1 - beta^t"),
        (NewAdam, "after step 2", "Adam starts anew in every step"),
        (StepIsZero, "after step 1 some parameters are not finite", "1 - beta^t is 0 for t = 0"),
        (StepIsOne, "after step 2", "step counter stays at 1"),
        (NoMemory, "after step 2", "moments are forgotten"),
        (Accumulates, "after step 2", "nobody calls zero_grad"),
        (KeepsTheWhole, "after step 2", "nobody calls zero_grad"),
        (OwnersKeep, "after step 2", ".grad was still there after the step before"),
        (OtherBetas, "after step 2", "betas 0.9 and 0.999"),
        (TiedTwice, "after step 1 'embedding' is wrong, and all others are right", "one parameter with two names"),
        (OnlyRankZeroHandsOut, "after step 1 the ranks hold different parameters", "take over what the owner"),
        (FromRankZero, "some parameters have not changed on any rank", "which rank updates them"),
        (LastBucketStays, "some parameters have not changed on any rank: embedding, ", "from which bucket"),
        (Frozen, "after step 1 'positions' has another value on rank 0", "it is frozen"),
        (Shifted, "the constructor has changed 'embedding'", ""),
    ],
)
def test_wrong_parameters_are_explained(fn, says, hint):
    report = refused("ZeRO2", fn, world_sizes=(2,))
    assert says in report.headline and hint in report.hint, report


def test_the_doctor_says_how_each_parameter_has_changed():
    rows = refused("ZeRO2", OwnLr, world_sizes=(2,)).rows
    assert {row.cells[1] for row in rows} == {"scaled by 0.02"} and all(row.cells[2] == "all" for row in rows)
    rows = {row.cells[0]: row for row in refused("ZeRO2", TiedTwice, world_sizes=(2,)).rows}
    assert [name for name, row in rows.items() if not row.ok] == ["embedding"]
    assert rows["gain"].cells[1] == "matches" and len(rows) > 12


# ---------------------------------------------------------------- ZeRO-2: right parameters, too much held or sent


class ZeRO1(Sliced):
    """Gradients stay whole until step()."""

    def reduce(self, p):
        pass

    def step(self):
        for p in self.slices:
            super().reduce(p)
        super().step()


class EverySecondStep(Sliced):
    """ZeRO-2 in every second step, and ZeRO-1 in the others."""

    done, odd = 0, 1

    def reduce(self, p):
        if self.done % 2 != self.odd:
            super().reduce(p)

    def step(self):
        for p in self.slices if self.done % 2 == self.odd else ():
            super().reduce(p)
        self.done += 1
        super().step()


class TheOtherSteps(EverySecondStep):
    odd = 0


class HiddenInAList(Sliced):
    def __init__(self, model, lr, eps):
        super().__init__(model, lr, eps)
        self.waiting = []

    def reduce(self, p):
        self.waiting.append((p, p.grad))
        p.grad = None

    def step(self):
        for p, grad in self.waiting:
            self.slices[p].grad = self.averaged_slice(grad)
        self.waiting = []
        super().step()


class KeepsACopy(Sliced):
    """The buffers that all-gather fills are kept."""

    def gather(self, p, own):
        self.wholes = getattr(self, "wholes", {})
        whole = self.wholes.setdefault(p, torch.empty(len(own) * self.n))
        dist.all_gather_single(whole, own)
        p.data.copy_(whole[: p.numel()].view_as(p))


class LeavesZeros(Sliced):
    """`p.grad` is None in backward, and all zeros after the step."""

    def step(self):
        super().step()
        for p in self.slices:
            p.grad = torch.zeros_like(p)


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (DataParallel, "bytes besides the model, where", "two moments for every parameter are 2 Ψ"),
        (KeepsACopy, "bytes besides the model, where", "a buffer for gathering"),
        (ZeRO1, "whole to the end, which is ZeRO-1", "register_post_accumulate_grad_hook"),
        (EverySecondStep, "whole to the end, which is ZeRO-1", "register_post_accumulate_grad_hook"),
        (TheOtherSteps, "whole to the end, which is ZeRO-1", "register_post_accumulate_grad_hook"),
        (HiddenInAList, "whole to the end, which is ZeRO-1", "set p.grad to None before the next comes"),
        (BigBucket, "holds gradients of", "as soon as a bucket is full"),
        (LeavesZeros, "after a step rank 0 still has .grad of embedding, gain", "set p.grad to None"),
    ],
)
def test_what_is_held_is_compared_with_what_is_enough(fn, says, hint):
    report = refused("ZeRO2", fn, world_sizes=(4,))
    assert "on 4 ranks: the parameters are right, but " in report.headline
    assert says in report.headline and hint in report.hint, report


def test_two_ranks_are_enough_to_tell_zero_1_and_data_parallelism():
    assert "which is ZeRO-1" in refused("ZeRO2", ZeRO1, world_sizes=(2,)).headline
    assert "2 Ψ" in refused("ZeRO2", DataParallel, world_sizes=(2,)).hint


class AllReduced(Sliced):
    def averaged_slice(self, grad):
        whole = self.padded(grad) / self.n
        dist.all_reduce(whole)
        return whole.chunk(self.n)[self.rank].clone()


class FrozenTravels(Sliced):
    def __init__(self, model, lr, eps):
        super().__init__(model, lr, eps)
        self.frozen = [p for p in model.parameters() if not p.requires_grad]

    def step(self):
        super().step()
        for p in self.frozen:
            self.averaged_slice(torch.zeros_like(p))
            self.gather(p, self.slice_of(p).detach())


class TiedTravelsTwice(Sliced):
    def __init__(self, model, lr, eps):
        super().__init__(model, lr, eps)
        self.tied = model.output

    def step(self):
        super().step()
        self.gather(self.tied, self.slices[self.tied].detach())


class TiedReducedTwice(TiedTravelsTwice):
    def reduce(self, p):
        if p is self.tied:
            self.averaged_slice(p.grad)
        super().reduce(p)

    def step(self):
        Sliced.step(self)


class Everybody(Sliced):
    """Every rank hands out its slice by a broadcast of the whole."""

    def gather(self, p, own):
        super().gather(p, own)
        dist.broadcast(p.data, 0)


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (AllReduced, "a reduce-scatter and an all-gather in one"),
        (FrozenTravels, "'positions' is frozen"),
        (TiedReducedTwice, "the gradient of 'embedding' travels twice: it is tied"),
        (TiedTravelsTwice, "'embedding' is handed out twice: it is tied"),
        (Everybody, "what is sent twice?"),
    ],
)
def test_what_is_sent_is_compared_with_what_is_enough(fn, hint):
    report = refused("ZeRO2", fn, world_sizes=(4,))
    assert "the parameters are right, but in one step all ranks send" in report.headline
    assert "are enough: 2 (N - 1) Ψ" in report.headline and hint in report.hint, report


class InAThread(AllReduced):
    def averaged_slice(self, grad):
        whole = self.padded(grad) / self.n
        thread = threading.Thread(target=dist.all_reduce, args=(whole,))
        thread.start()
        thread.join()
        return whole.chunk(self.n)[self.rank].clone()


class BehindTorchDistributed(AllReduced):
    def averaged_slice(self, grad):
        whole = self.padded(grad) / self.n
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([whole]).wait()
        return whole.chunk(self.n)[self.rank].clone()


@pytest.mark.parametrize("fn", [InAThread, BehindTorchDistributed])
def test_what_cannot_be_counted_is_missed(fn):
    report = refused("ZeRO2", fn, world_sizes=(2,))
    assert "the parameters are right, but only" in report.headline, report
    assert "bytes could be seen in a step, where 2 (N - 1) Ψ = " in report.headline
    assert "call collectives from the thread that calls you" in report.hint


# ---------------------------------------------------------------- ZeRO-2: what is no answer yet


class HooksOnAll(Sliced):
    def __init__(self, model, lr, eps):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.reduce)
        super().__init__(model, lr, eps)


class NoPadding(Sliced):
    def averaged_slice(self, grad):
        own = torch.empty(grad.numel() // self.n)
        dist.reduce_scatter_single(own, grad.flatten() / self.n)
        return own


class TiedHookedTwice(Sliced):
    def __init__(self, model, lr, eps):
        super().__init__(model, lr, eps)
        model.output.register_post_accumulate_grad_hook(self.reduce)


def forgets_to_return(model, lr, eps):
    Sliced(model, lr, eps)


def by_fsdp(model, lr, eps):
    from torch.distributed.fsdp import fully_shard

    return torch.optim.Adam(fully_shard(model).parameters(), lr=lr, eps=eps)


class InBfloat16(Sliced):
    def __init__(self, model, lr, eps):
        super().__init__(model.bfloat16(), lr, eps)


class WritesBfloat16(Sliced):
    def gather(self, p, own):
        super().gather(p, own)
        p.data = p.data.bfloat16()


class ReadsTooEarly(Sliced):
    def averaged_slice(self, grad):
        return super().averaged_slice(grad) * float("nan")


class NotWritten:
    def __init__(self, model, lr, eps):
        raise NotImplementedError("your code goes here, in place of this line")


class StepNotWritten(Sliced):
    def step(self):
        raise NotImplementedError("your code goes here, in place of this line")


class OneRankWaits(Sliced):
    def step(self):
        super().step()
        if self.rank:
            dist.barrier()


class CutsTheModel(Sliced):
    def gather(self, p, own):
        p.data = own.clone()


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (HooksOnAll, "RuntimeError: cannot register a hook", "one parameter is frozen"),
        (NoPadding, "raised RuntimeError", "fill up with zeros"),
        (TiedHookedTwice, "raised AttributeError: 'NoneType' object has no attribute 'flatten'", ""),
        (forgets_to_return, "ZeRO2(model, lr, eps) gives a NoneType, which has no step()", ""),
        (by_fsdp, "are DTensors: fully_shard is not to be used here", "plain float32 tensors"),
        (InBfloat16, "on rank 0 the model's parameters are bfloat16, and they were float32", "plain float32 tensors"),
        (WritesBfloat16, "parameters are bfloat16, and they were float32", "plain float32 tensors"),
        (ReadsTooEarly, "after step 1 some parameters are not finite", "before anything has arrived in it"),
        (NotWritten, "not written yet: your code goes here", "which rank updates what"),
        (StepNotWritten, "not written yet: your code goes here", "which rank updates what"),
        (CutsTheModel, "after step 1 the shape of 'embedding' on rank 0 is [", "leaves the parameters whole"),
    ],
)
def test_what_is_no_answer_is_said_in_a_sentence(fn, says, hint):
    report = refused("ZeRO2", fn, world_sizes=(2,))
    assert says in report.headline and hint in report.hint, report


def test_ranks_that_part_ways_are_told_so():
    report = refused("ZeRO2", OneRankWaits, world_sizes=(2,))
    assert "the ranks don't agree in collective" in report.headline and "rank 1 calls barrier" in report.headline
    assert report.headline.startswith("ZeRO2 on 2 ranks: ")


class Fails(Sliced):
    def step(self):
        raise ValueError("three")


class HangsInStep(Sliced):
    def step(self):
        if self.rank:
            super().step()


def test_failures_are_told_with_the_number_of_ranks():
    assert refused("ZeRO2", Fails, world_sizes=(3,)).headline == "ZeRO2 on 3 ranks: every rank raised ValueError: three"
    report = refused("ZeRO2", HangsInStep, world_sizes=(2,), timeout=4)
    assert report.headline.startswith("ZeRO2 on 2 ranks: "), report


def test_a_call_that_makes_no_sense_is_refused():
    assert "is called as ZeRO2(model, lr, eps)" in refused("ZeRO2", lambda model: None).headline
    assert "as in check('ZeRO2', ZeRO2)" in str(examine("ZeRO2", 3))


# ---------------------------------------------------------------- clipping: right answers


def squares(tensors):
    return sum(g.square().sum() for g in tensors) if tensors else torch.zeros(())


def scale(gradients, coefficient):
    for g in gradients:
        g.mul_(coefficient)


def total(sharded, replicated):
    mine = squares(sharded).clone()
    dist.all_reduce(mine)
    return (mine + squares(replicated)).sqrt()


def by_squares(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    scale([*sharded, *replicated], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def by_torchs_functions(sharded, replicated, max_norm):
    """1/N of the replicated, in float64; and torch's own fused functions."""
    mine = torch.nn.utils.get_total_norm(sharded, foreach=True).double() ** 2
    mine += torch.nn.utils.get_total_norm(replicated).double() ** 2 / dist.get_world_size()
    dist.all_reduce(mine)
    norm = mine.sqrt().float()
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if sharded or replicated:
        torch._foreach_mul_([*sharded, *replicated], coefficient)
    return norm


def with_a_branch(sharded, replicated, max_norm):
    """One vector of everything, an all-gather of the squares, a Python number, and a branch."""
    mine = torch.cat([g.flatten() for g in sharded] or [torch.zeros(0)]).norm().square().reshape(1)
    of_all = torch.empty(dist.get_world_size())
    dist.all_gather_single(of_all, mine)
    norm = (of_all.sum() + sum(g.norm() ** 2 for g in replicated)).sqrt().item()
    if norm > max_norm:
        scale([*sharded, *replicated], max_norm / norm)
    return norm


def as_numpys_number(sharded, replicated, max_norm):
    return np.float32(by_squares(sharded, replicated, max_norm).item())


def in_one_element(sharded, replicated, max_norm):
    return by_squares(sharded, replicated, max_norm).reshape(1)


def in_a_new_list(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    sharded = sharded + replicated
    sharded += []
    scale(sharded, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


@pytest.mark.parametrize(
    "fn", [by_squares, by_torchs_functions, with_a_branch, as_numpys_number, in_one_element, in_a_new_list]
)
def test_a_right_clip_passes(fn):
    assert examine("clip", fn, seed=5).passed


# ---------------------------------------------------------------- clipping: wrong answers


def clipped_with(norm_of, sharded, replicated, max_norm):
    norm = norm_of(sharded, replicated)
    scale([*sharded, *replicated], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def local_norm(*arguments):
    return clipped_with(lambda s, r: (squares(s) + squares(r)).sqrt(), *arguments)


def shards_alone(*arguments):
    return clipped_with(lambda s, r: summed(squares(s)).sqrt(), *arguments)


def all_alike(*arguments):
    return clipped_with(lambda s, r: summed(squares(s) + squares(r)).sqrt(), *arguments)


def swapped(*arguments):
    return clipped_with(lambda s, r: (squares(s) + summed(squares(r))).sqrt(), *arguments)


def norms_summed(*arguments):
    return clipped_with(lambda s, r: summed((squares(s) + squares(r)).sqrt()), *arguments)


def shard_norms_summed(*arguments):
    return clipped_with(lambda s, r: (summed(squares(s).sqrt()) ** 2 + squares(r)).sqrt(), *arguments)


def tensor_norms_summed(*arguments):
    return clipped_with(lambda s, r: summed(sum(g.norm() for g in s)) + sum(g.norm() for g in r), *arguments)


def no_root(*arguments):
    return clipped_with(lambda s, r: summed(squares(s)) + squares(r), *arguments)


def averaged(*arguments):
    return clipped_with(lambda s, r: (summed(squares(s)) / dist.get_world_size() + squares(r)).sqrt(), *arguments)


def the_largest(*arguments):
    def norm_of(sharded, replicated):
        norm = (squares(sharded) + squares(replicated)).sqrt()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return norm

    return clipped_with(norm_of, *arguments)


def returns_the_clipped(sharded, replicated, max_norm):
    return by_squares(sharded, replicated, max_norm).clamp(max=max_norm)


def returns_the_coefficient(sharded, replicated, max_norm):
    return (max_norm / (by_squares(sharded, replicated, max_norm) + 1e-6)).clamp(max=1)


@pytest.mark.parametrize(
    ("fn", "is_", "hint"),
    [
        (local_norm, "the norm of what this rank has", "their squares do"),
        (shards_alone, "the norm of the shards alone", "what is replicated is a part of the model too"),
        (all_alike, "what is replicated counted N times", "1/N of it before"),
        (swapped, "sharded and replicated confused", "those of the replicated are not"),
        (norms_summed, "the sum of the ranks' norms", "norms don't add, their squares do"),
        (shard_norms_summed, "the norm, with the shards' norms added up", "norms don't add, their squares do"),
        (tensor_norms_summed, "the sum of all tensors' norms", "not those of tensors either"),
        (no_root, "the square of the norm", "the root is missing"),
        (averaged, "the norm, with the mean of the shards' squares", "not averaged"),
        (the_largest, "the largest norm of a rank", "the sum of all squares"),
        (returns_the_clipped, "the norm after clipping", "before clipping"),
        (returns_the_coefficient, "the coefficient", "not what the gradients were multiplied by"),
    ],
)
def test_a_wrong_norm_is_named(fn, is_, hint):
    report = refused("clip", fn, world_sizes=(3,))
    assert "clip on 3 ranks: the norm is not that of all gradients" in report.headline
    assert [row.cells[3] for row in report.rows] == [is_] * 3 and hint in report.hint


def always_scales(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    scale([*sharded, *replicated], max_norm / (norm + 1e-6))
    return norm


def divides_by_zero(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    scale([*sharded, *replicated], min(1.0, max_norm / norm) if norm else max_norm / norm)
    return norm


def not_in_place(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    for g in [*sharded, *replicated]:
        g = g * (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


def replaces_in_the_lists(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    for gradients in (sharded, replicated):
        gradients[:] = [g * (max_norm / (norm + 1e-6)).clamp(max=1) for g in gradients]
    return norm


def only_the_shards(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    scale(sharded, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def each_by_its_own(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    for g in [*sharded, *replicated]:
        g.mul_((max_norm / (g.norm() + 1e-6)).clamp(max=1))
    return norm


@pytest.mark.parametrize(
    ("fn", "says", "where", "hint"),
    [
        (always_scales, "have changed although their norm is below max_norm", "is below", "and 1 at most"),
        (divides_by_zero, "the gradients are NaN now", "all gradients are zero", "norm + 1e-6"),
        (not_in_place, "the gradients are as they were", "is above", "g.mul_(coefficient), not"),
        (replaces_in_the_lists, "the gradients are as they were", "is above", "your lists have other tensors now"),
        (only_the_shards, "are not what clip_grad_norm_ leaves", "is above", "only replicated ones are wrong"),
        (each_by_its_own, "are not what clip_grad_norm_ leaves", "is above", "multiplied by the same number"),
    ],
)
def test_gradients_that_are_not_clipped_as_torch_does_are_explained(fn, says, where, hint):
    report = refused("clip", fn, world_sizes=(4,))
    assert "clip on 4 ranks: the norm is right, but " in report.headline
    assert says in report.headline and where in report.headline and hint in report.hint, report


def test_the_doctor_compares_shards_too():
    rows = {row.cells[0]: row for row in refused("clip", only_the_shards, world_sizes=(4,)).rows}
    assert rows["gate"].ok and rows["gate"].cells[1] == "right shard, dim 0"
    assert rows["norm.weight"].cells[1] == "scaled by 2.5" and rows["norm.weight"].cells[2] == "all"


def for_each_tensor(sharded, replicated, max_norm):
    squared = sum(summed(g.square().sum()) for g in sharded) + squares(replicated)
    norm = torch.as_tensor(squared).sqrt()
    scale([*sharded, *replicated], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def one_vector_of_norms(sharded, replicated, max_norm):
    numbers = summed(torch.stack([g.square().sum() for g in sharded])) if sharded else torch.zeros(1)
    norm = (numbers.sum() + squares(replicated)).sqrt()
    scale([*sharded, *replicated], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def gathers_tensors(sharded, replicated, max_norm):
    whole = []
    for shard in sharded:
        sizes = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, shard)
        whole += sizes
    norm = torch.nn.utils.get_total_norm([*whole, *replicated])
    scale([*sharded, *replicated], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (for_each_tensor, "a rank takes part in 4 collectives of 16 bytes", "one number travel for all tensors"),
        (one_vector_of_norms, "a rank takes part in 1 collective of 16 bytes", "a number for each of them"),
        (gathers_tensors, "where one all-reduce of one number is enough", "tensors travel"),
    ],
)
def test_more_than_one_number_is_too_much(fn, says, hint):
    report = refused("clip", fn, world_sizes=(3,))
    assert "norm and gradients are right, but" in report.headline and says in report.headline
    assert hint in report.hint and any("line " in row.cells[2] for row in report.rows)


def one_object(sharded, replicated, max_norm):
    mine = [None] * dist.get_world_size()
    dist.all_gather_object(mine, float(squares(sharded)))
    norm = (sum(mine) + squares(replicated)).sqrt()
    scale([*sharded, *replicated], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def test_an_object_is_more_than_its_number():
    report = refused("clip", one_object, world_sizes=(3,))
    assert "a rank takes part in 2 collectives" in report.headline, report
    assert "objects are pickled, and their lengths travel first: put the number into a tensor" in report.hint


def puts_all_into_one(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    sharded += replicated
    scale(sharded, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def empties_the_lists(sharded, replicated, max_norm):
    norm = by_squares(sharded, replicated, max_norm)
    sharded.clear()
    return norm


@pytest.mark.parametrize("fn", [puts_all_into_one, empties_the_lists])
def test_the_lists_are_the_callers(fn):
    report = refused("clip", fn, world_sizes=(2,))
    assert "the norm and the gradients are right, but your function has changed the lists" in report.headline, report
    assert "the caller still needs them" in report.headline and "[*sharded, *replicated]" in report.hint


def in_a_thread(sharded, replicated, max_norm):
    mine = squares(sharded).clone()
    thread = threading.Thread(target=dist.all_reduce, args=(mine,))
    thread.start()
    thread.join()
    return clipped_with(lambda s, r: (mine + squares(r)).sqrt(), sharded, replicated, max_norm)


def test_a_norm_that_nobody_saw_travel_is_refused():
    report = refused("clip", in_a_thread, world_sizes=(2,))
    assert "right, but only 0 bytes could be seen" in report.headline, report
    assert "call collectives from the thread that calls you" in report.hint


def loses_what_is_not_finite(sharded, replicated, max_norm):
    norm = total(sharded, replicated)
    if norm.isfinite():
        scale([*sharded, *replicated], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm.nan_to_num(nan=0.0, posinf=0.0)


def forgets_to_return_it(sharded, replicated, max_norm):
    by_squares(sharded, replicated, max_norm)


def returns_many(sharded, replicated, max_norm):
    return torch.stack([by_squares(sharded, replicated, max_norm)] * 2)


def returns_text(sharded, replicated, max_norm):
    return str(by_squares(sharded, replicated, max_norm))


def stumbles_over_an_empty_list(sharded, replicated, max_norm):
    torch.stack([g.norm() for g in replicated])
    return by_squares(sharded, replicated, max_norm)


def only_rank_0(sharded, replicated, max_norm):
    if dist.get_rank() == 0:
        return by_squares(sharded, replicated, max_norm)


def other_bits(sharded, replicated, max_norm):
    return by_squares(sharded, replicated, max_norm) * (1 + 1e-6 * dist.get_rank())


def not_written_clip(sharded, replicated, max_norm):
    raise NotImplementedError("your code goes here, in place of this line")


@pytest.mark.parametrize(
    ("fn", "says", "hint"),
    [
        (loses_what_is_not_finite, "one shard has an infinity in it", "torch returns inf here, on every rank"),
        (forgets_to_return_it, "it returned None on rank 0: is there a return at its end?", ""),
        (returns_many, "it returned a tensor of shape [2] on rank 0: the global norm, one number, was expected", ""),
        (returns_text, "it returned a str on rank 0", ""),
        (stumbles_over_an_empty_list, "stack expects a non-empty TensorList", "either list may be empty"),
        (other_bits, "not the same on all ranks to the last bit", "the same all-reduced number"),
        (not_written_clip, "not written yet: your code goes here", "what can be added up over the ranks"),
    ],
)
def test_what_is_no_norm_is_said_in_a_sentence(fn, says, hint):
    report = refused("clip", fn, world_sizes=(2,))
    assert says in report.headline and hint in report.hint, report


def test_a_rank_that_waits_alone_is_named():
    report = refused("clip", only_rank_0, world_sizes=(2,), timeout=4)
    assert "clip on 2 ranks: the ranks hang where the norm is above max_norm" in report.headline
    assert "rank 0" in report.detail


# ---------------------------------------------------------------- the solution


def test_the_solution_runs_from_top_to_bottom(capsys):
    solution(graded=True)
    assert capsys.readouterr().out.count("✓") == 6  # two visible checks and four hidden ones
