"""The checks of exercise 05: right answers of several styles pass, and each plausible mistake gets its own diagnosis.

What the right verdict on each mistake is follows from what Megatron-LM's f and g do (Shoeybi et al. 2019, section 3): a
replicated tensor that meets shards has partial gradients; a gradient that is whole on every rank and is added up again
comes out world_size times too large.
"""

from __future__ import annotations

import html
import sys
import threading
import time
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from solution_cells import run_solution

from course_utils.grading import CheckFailed, check, examine
from course_utils.grading.checks import EXERCISES
from course_utils.grading.exercises import Case

ROOT = Path(__file__).resolve().parent.parent
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the functions of a notebook are sent
SOLUTION = ROOT / "solutions" / "05_sharded_autograd" / "05_sharded_autograd.ipynb"


NAMES = ("copy_to_parallel", "reduce_from_parallel", "pooled_logits", "modulated_norm")
STUB = "your code goes here, in place of this line"  # nbgrader_config.py


def total(x):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad)


class CopyMean(Copy):
    @staticmethod
    def backward(ctx, grad):
        return total(grad) / dist.get_world_size()


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class ReduceTwice(Reduce):
    @staticmethod
    def backward(ctx, grad):
        return total(grad)


class Gather(torch.autograd.Function):
    """All tokens on every rank; backward hands on this rank's slice."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class GatherReduceScatter(Gather):
    """The same forward; its backward is the reduce-scatter that an all-gather's is."""

    @staticmethod
    def backward(ctx, grad):
        return total(grad).chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


f, f_mean, g, g_twice = Copy.apply, CopyMean.apply, Reduce.apply, ReduceTwice.apply


def tokens(x):
    return x.shape[1] * dist.get_world_size()


solution = partial(run_solution, "05_sharded_autograd")


def answers() -> dict:
    """The solution's function for each name that `check` knows."""
    made = solution()
    operators = {"copy_to_parallel": "CopyToParallel", "reduce_from_parallel": "ReduceFromParallel"}
    return {name: made[operators[name]].apply if name in operators else made[name] for name in NAMES}


def refused(name, fn, **options):
    """The report on a function that must not pass, whose two views say the same."""
    with pytest.raises(CheckFailed) as caught:
        check(name, fn, **options)
    report = caught.value.report
    assert not report.passed
    assert str(caught.value) == str(report) == repr(report)
    page = report._repr_html_()
    for said in (report.headline, report.hint[1:], *(cell for row in report.rows for cell in row.cells)):
        assert html.escape(said) in page
    return report


def verdicts(report) -> dict[str, str]:
    return {row.cells[0]: row.cells[1] for row in report.rows}


# ---------------------------------------------------------------- right answers


def divided_last(x, up, head):
    return g(F.gelu(F.linear(x, f(up).T)).sum(dim=1)) @ head / tokens(x)


def one_tensor(x, gain, cond, weight):
    """Concatenated along the channels, with a hook in place of an autograd function."""
    hidden = x.shape[-1]
    modulation = cond @ weight
    both = torch.cat([gain * (1 + modulation[:, :hidden]), modulation[:, hidden:]], dim=-1)
    both.register_hook(total)
    scale, shift = both.unsqueeze(1).split(hidden, dim=-1)
    return x + shift + scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)


class CopyAsItIs(Copy):
    @staticmethod
    def forward(ctx, x):
        return x


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name):
    report = examine(name, answers()[name])
    assert report.passed and "right on 2, 3 and 4 ranks: the output" in report.headline
    assert "✓ right" in report._repr_html_()


def test_the_solution_runs_from_top_to_bottom(capsys):
    solution(graded=True)
    assert capsys.readouterr().out.count("✓") == 8  # four visible checks and four hidden ones


@pytest.mark.parametrize(
    ("name", "fn"),
    [("copy_to_parallel", CopyAsItIs.apply), ("pooled_logits", divided_last), ("modulated_norm", one_tensor)],
)
def test_a_right_answer_of_another_style_passes(name, fn):
    assert examine(name, fn, world_sizes=(2, 3), seed=7).passed


@pytest.mark.parametrize("name", ["pooled_logits", "modulated_norm"])
def test_the_solution_passes_with_every_seed(name):
    fn = answers()[name]
    for seed in range(100, 106, 2):  # each check takes its seed and the next
        assert examine(name, fn, world_sizes=(5,), seed=seed).passed


# ---------------------------------------------------------------- wrong answers for f and g


def terms(x):
    """Every rank's x, gathered."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


class CopyOnly(Copy):
    @staticmethod
    def backward(ctx, grad):
        return grad


class CopyTwice(Copy):
    @staticmethod
    def backward(ctx, grad):
        return total(total(grad))


class CopyTimes(Copy):
    @staticmethod
    def backward(ctx, grad):
        return grad * dist.get_world_size()


class CopyForgets(Copy):
    @staticmethod
    def backward(ctx, grad):
        total(grad)


class CopyRankZero(Copy):
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.reduce(grad, 0)
        return grad if dist.get_rank() == 0 else torch.zeros_like(grad)


class ReduceMeanBack(Reduce):
    @staticmethod
    def backward(ctx, grad):
        return grad / dist.get_world_size()


class ReduceRankZero(Reduce):
    @staticmethod
    def backward(ctx, grad):
        return grad if dist.get_rank() == 0 else torch.zeros_like(grad)


class ReduceForgets(Reduce):
    @staticmethod
    def backward(ctx, grad):
        pass


SCALED, SCALED_DOWN = "scaled by world_size (2)", "scaled by 1/world_size (0.5)"


@pytest.mark.parametrize(
    ("name", "fn", "words", "hint"),
    [
        ("copy_to_parallel", CopyOnly.apply, "partial", "who adds up the terms?"),
        ("copy_to_parallel", lambda x: x, "partial", "who adds up the terms?"),
        ("copy_to_parallel", CopyTimes.apply, f"partial + {SCALED}", "who adds up the terms?"),
        ("copy_to_parallel", CopyMean.apply, SCALED_DOWN, "a sum or a mean"),
        ("copy_to_parallel", CopyTwice.apply, SCALED, "added up, once"),
        ("copy_to_parallel", CopyForgets.apply, "missing", "does it return one at its end"),
        ("copy_to_parallel", CopyRankZero.apply, "missing", "on every rank?"),
        ("reduce_from_parallel", ReduceTwice.apply, f"{SCALED}, shards of dim 0", "the same gradient of the sum"),
        ("reduce_from_parallel", ReduceMeanBack.apply, f"{SCALED_DOWN}, shards of dim 0", "with which factor"),
        ("reduce_from_parallel", ReduceForgets.apply, "missing", "does it return one at its end"),
        ("reduce_from_parallel", ReduceRankZero.apply, "missing", "on every rank?"),
    ],
)
def test_a_wrong_backward_of_f_or_g_is_diagnosed(name, fn, words, hint):
    report = refused(name, fn)
    assert verdicts(report) == {"x.grad": words} and hint in report.hint
    assert report.headline == f"{name} on 2 ranks: the result is right, but x.grad is not"


class CopyAddsUp(Copy):
    @staticmethod
    def forward(ctx, x):
        return total(x)


class ReduceNothing(Reduce):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)


class ReduceMean(Reduce):
    @staticmethod
    def forward(ctx, x):
        return total(x) / dist.get_world_size()


@pytest.mark.parametrize(
    ("name", "fn", "words", "hint"),
    [
        ("copy_to_parallel", CopyAddsUp.apply, SCALED, "the identity"),
        ("reduce_from_parallel", ReduceNothing.apply, "partial", "the sum of all ranks' terms"),
        ("reduce_from_parallel", ReduceMean.apply, SCALED_DOWN, "not their mean"),
    ],
)
def test_a_wrong_forward_of_f_or_g_is_diagnosed(name, fn, words, hint):
    report = refused(name, fn)
    assert verdicts(report) == {"output": words} and hint in report.hint


class CopyInPlace(Copy):
    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad


class ReduceInPlace(Reduce):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x


class ReduceGathers(Reduce):
    @staticmethod
    def forward(ctx, x):
        return torch.cat(terms(x))


@pytest.mark.parametrize(
    ("name", "fn", "says"),
    [
        ("copy_to_parallel", CopyInPlace.apply, "backward changes in place the gradient that it is given"),
        ("copy_to_parallel", total, "the result is not what the specification gives"),
        ("reduce_from_parallel", ReduceInPlace.apply, "it changed its input x in place on every rank"),
        (
            "reduce_from_parallel",
            ReduceGathers.apply,
            "shape [2, 4, 6] on every rank, expected [1, 4, 6]: [sum, rows, columns], whole on every rank",
        ),
        ("reduce_from_parallel", total, "gradients flow through a collective that has no backward"),
    ],
)
def test_f_and_g_leave_alone_what_is_not_theirs(name, fn, says):
    assert says in refused(name, fn).headline


class CopyGathers(Copy):
    @staticmethod
    def backward(ctx, grad):
        return sum(terms(grad))


class CopySends(Copy):
    @staticmethod
    def forward(ctx, x):
        return total(x) / dist.get_world_size()


class ReduceAgain(Reduce):
    @staticmethod
    def backward(ctx, grad):
        return total(grad) / dist.get_world_size()


class ReduceByGather(Reduce):
    @staticmethod
    def forward(ctx, x):
        return sum(terms(x))


@pytest.mark.parametrize(
    ("name", "fn", "sent", "hint"),
    [
        (
            "copy_to_parallel",
            CopyGathers.apply,
            "in backward one all-gather of {twice} bytes, where one all-reduce of {once} bytes (rows · columns",
            "a single collective",
        ),
        (
            "copy_to_parallel",
            CopySends.apply,
            "in forward one all-reduce of {once} bytes, where nothing has to be sent",
            "what has forward to send?",
        ),
        (
            "reduce_from_parallel",
            ReduceAgain.apply,
            "in backward one all-reduce of {once} bytes, where nothing has to be sent",
            "what could a rank learn from the others?",
        ),
        (
            "reduce_from_parallel",
            ReduceByGather.apply,
            "in forward one all-gather of {twice} bytes, where one all-reduce of {once} bytes (rows · columns numbers)",
            "a single collective",
        ),
    ],
)
def test_f_and_g_send_no_more_than_they_must(name, fn, sent, hint):
    report = refused(name, fn)
    sizes = Case(EXERCISES[name], 2, seed=0).sizes
    once = 4 * sizes["rows"] * sizes["columns"]
    assert sent.format(once=once, twice=2 * once) in report.headline and hint in report.hint


class CopyNotWritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        raise NotImplementedError(STUB)


class BackwardNotWritten(Copy):
    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError(STUB)


@pytest.mark.parametrize("fn", [CopyNotWritten.apply, BackwardNotWritten.apply])
def test_the_half_of_f_that_is_not_written_is_shown(fn):
    report = refused("copy_to_parallel", fn)
    assert report.headline == f"copy_to_parallel on 2 ranks: not written yet: {STUB}"
    half = "forward" if fn.__self__ is CopyNotWritten else "backward"
    assert f"in {half}:" in report.detail and "raise NotImplementedError(STUB)" in report.detail


# ---------------------------------------------------------------- wrong answers to the first exercise

RIGHT = {"x.grad": "right shard, dim 1", "up.grad": "matches", "head.grad": "matches"}


def no_f(x, up, head):
    return g(F.gelu(x @ up).sum(dim=1) / tokens(x)) @ head


def g_adds_up_in_backward(x, up, head):
    return g_twice(F.gelu(x @ f(up)).sum(dim=1) / tokens(x)) @ head


def neither(x, up, head):
    return g_twice(F.gelu(x @ up).sum(dim=1) / tokens(x)) @ head


def f_on_the_head(x, up, head):
    return g(F.gelu(x @ f(up)).sum(dim=1) / tokens(x)) @ f(head)


def f_on_the_tokens(x, up, head):
    return g(F.gelu(f(x) @ f(up)).sum(dim=1) / tokens(x)) @ head


def gathered_by_the_book(x, up, head):
    return F.gelu(GatherReduceScatter.apply(x) @ up).mean(dim=1) @ head


def cut(x, up, head):
    return total(F.gelu(x @ f(up)).sum(dim=1).detach()) / tokens(x) @ head


@pytest.mark.parametrize(
    ("fn", "wrong", "hint"),
    [
        (no_f, {"up.grad": "partial"}, "who adds up the terms"),
        (
            g_adds_up_in_backward,
            {"x.grad": "scaled by world_size (2), shards of dim 1", "up.grad": "scaled by world_size (2)"},
            "add it up once more",
        ),
        (
            neither,
            {"x.grad": "scaled by world_size (2), shards of dim 1", "up.grad": "partial + scaled by world_size (2)"},
            "add it up once more",
        ),
        (f_on_the_head, {"head.grad": "scaled by world_size (2)"}, "one term of a sum, or all of it"),
        (f_on_the_tokens, {"x.grad": "wrong"}, "meet nobody else's"),
        (gathered_by_the_book, {"x.grad": "scaled by world_size (2), shards of dim 1"}, "add it up once more"),
        (cut, {"x.grad": "missing", "up.grad": "missing"}, "graph is cut"),
    ],
)
def test_a_wrong_gradient_of_the_classifier_is_diagnosed(fn, wrong, hint):
    report = refused("pooled_logits", fn)
    assert verdicts(report) == RIGHT | wrong
    assert report.headline.startswith("pooled_logits on 2 ranks: the result is right, but ")
    assert all(name in report.headline for name in wrong)
    assert [row.cells[2] for row in report.rows if not row.ok] == ["all"] * len(wrong)
    assert hint in report.hint


def own_tokens(x, up, head):
    return F.gelu(x @ up).mean(dim=1) @ head


def sum_of_means(x, up, head):
    return g(F.gelu(x @ f(up)).mean(dim=1)) @ head


def for_two_ranks(x, up, head):
    return g(F.gelu(x @ f(up)).sum(dim=1) / (2 * x.shape[1])) @ head


@pytest.mark.parametrize(
    ("fn", "words", "headline", "hint"),
    [
        (
            own_tokens,
            "partial + scaled by world_size (2)",
            "on 2 ranks: the result is not",
            "pooled its own tokens only",
        ),
        (sum_of_means, "scaled by world_size (2)", "on 2 ranks: the result is not", "how many has one rank"),
        (
            for_two_ranks,
            "scaled by 1.5",
            "on 3 ranks: the result is not what the specification gives; on 2 ranks all is right",
            "how many has",
        ),
    ],
)
def test_a_wrong_result_of_the_classifier_is_diagnosed(fn, words, headline, hint):
    report = refused("pooled_logits", fn)
    assert verdicts(report) == {"output": words}
    assert headline in report.headline and hint in report.hint


def one_rank_is_off(x, up, head):
    y = g(F.gelu(x @ f(up)).sum(dim=1) / tokens(x)) @ head
    return y + 1 if dist.get_rank() == 1 else y


def test_one_rank_is_a_world_too():
    report = examine("pooled_logits", divided_last, world_sizes=(1,))
    assert report.headline.startswith("pooled_logits is right on 1 rank: ")


def test_the_wrong_rank_is_named():
    (row,) = refused("pooled_logits", one_rank_is_off, world_sizes=(3,)).rows
    assert row.cells[1:3] == ("ranks disagree", "1")


def right_by_luck(x, up, head):
    features = F.gelu(x @ f(up)).sum(dim=1) / tokens(x)
    dist.all_reduce(features)
    return features @ head


def half_right_by_luck(x, up, head):
    return right_by_luck(x, CopyOnly.apply(up), head)


@pytest.mark.parametrize("fn", [right_by_luck, half_right_by_luck])
def test_a_collective_without_backward_in_the_graph_is_named_first(fn):
    report = refused("pooled_logits", fn)
    assert "gradients flow through a collective that has no backward" in report.headline
    assert report.rows == ()  # nothing is shown as right that may be so by luck
    assert report.detail.startswith("torch warns: c10d::allreduce_: an autograd kernel was not registered")
    assert "inside an autograd function" in report.hint


def gathered(x, up, head):
    return F.gelu(Gather.apply(x) @ up).mean(dim=1) @ head


def g_after_the_head(x, up, head):
    return g(F.gelu(x @ f(up)).sum(dim=1) / tokens(x) @ f(head))


def g_sums_and_divides(x, up, head):
    return ReduceAgain.apply(F.gelu(x @ f(up)).sum(dim=1) / tokens(x)) @ head


def g_before_the_pooling(x, up, head):
    return g(F.gelu(x @ f(up)) / tokens(x)).sum(dim=1) @ head


def terms_gathered(x, up, head):
    return Gather.apply(F.gelu(x @ f(up)).sum(dim=1, keepdim=True)).sum(dim=1) / tokens(x) @ head


# Seed 0 on 2 ranks is batch=B, tokens=2T, hidden=H, features=F, classes=C: bytes are 4 times the products of these.
@pytest.mark.parametrize(
    ("fn", "sent", "hint"),
    [
        (
            gathered,
            "in forward one all-gather of {BTH} bytes, where one all-reduce of {BF} bytes (batch · features numbers) "
            "is enough, with one of {HF} bytes (hidden · features numbers) in backward",
            "no rank should ever have all of it",
        ),
        (
            g_after_the_head,
            "in backward 2 all-reduces of {HF+FC} bytes in all, where one of {HF} bytes (hidden · features numbers) is",
            "have been the same on every rank?",
        ),
        (
            g_sums_and_divides,
            "in backward 2 all-reduces of {HF+BF} bytes in all, where one of {HF} bytes (hidden · features numbers) is",
            "each rank has one term",
        ),
        (
            g_before_the_pooling,
            "in forward one all-reduce of {BTF/2} bytes, where one of {BF} bytes (batch · features numbers) is enough",
            "the smallest tensor that has to cross",
        ),
        (
            terms_gathered,
            "in forward one all-gather of {2BF} bytes, where one all-reduce of {BF} bytes (batch · features numbers)",
            "before head sees it",
        ),
    ],
)
def test_a_right_classifier_that_sends_too_much_is_told_what_it_sends_and_what_is_enough(fn, sent, hint):
    report = refused("pooled_logits", fn)
    B, T, H, F, C = SIZES = tuple(Case(EXERCISES["pooled_logits"], 2, seed=0).sizes.values())
    T *= 2
    assert len(set(SIZES)) == 5
    numbers = {"BTH": B * T * H, "BF": B * F, "HF": H * F, "HF+FC": H * F + F * C, "HF+BF": H * F + B * F}
    numbers |= {"BTF/2": B * T * F // 2, "2BF": 2 * B * F}
    for name, count in numbers.items():
        sent = sent.replace(f"{{{name}}}", str(4 * count))
    assert f"on 2 ranks: output and gradients are right, but more is sent than it takes: {sent}" in report.headline
    assert hint in report.hint
    assert any(not row.ok and row.cells[3].startswith("line ") for row in report.rows)


def test_the_price_of_the_classifier_is_the_least_whatever_the_seed():
    """Ring costs: an all-reduce of S sends 2 (n-1)/n S, an all-gather to S sends (n-1)/n S."""
    exercise = EXERCISES["pooled_logits"]
    for seed in range(500):
        sizes = Case(exercise, 2, seed).sizes
        price = 2 * (exercise.price.forward.numbers(sizes) + exercise.price.backward.numbers(sizes))
        head_too = sizes["batch"] * sizes["classes"] + (sizes["hidden"] + sizes["classes"]) * sizes["features"]
        assert price < 2 * sizes["batch"] * sizes["tokens"] * sizes["hidden"]  # all tokens of two ranks
        assert price < 2 * head_too
        assert len(set(sizes.values())) == 5


def remembers(x, up, head):
    kept = vars(dist).setdefault("kept_by_this_test", x.detach())  # on the rank
    return g(F.gelu((x - x.detach() + kept) @ f(up)).sum(dim=1) / tokens(x)) @ head


def test_a_function_that_lives_on_its_first_call_is_found_out():
    report = refused("pooled_logits", remembers)
    assert "on 2 ranks" in report.headline


# ---------------------------------------------------------------- wrong answers to the second exercise

RIGHT_2 = {"x.grad": "right shard, dim 1"} | {f"{name}.grad": "matches" for name in ("gain", "cond", "weight")}


def block(x, gain, cond, weight):
    scale, shift = (cond @ weight)[:, None].chunk(2, dim=-1)
    return x + F.rms_norm(x, x.shape[-1:]) * gain * (1 + scale) + shift


def bordered(border, x, gain, cond, weight):
    scale, shift = (cond @ weight).chunk(2, dim=-1)
    scale, shift = border(torch.stack([gain * (1 + scale), shift]))[:, :, None]
    return x + F.rms_norm(x, x.shape[-1:]) * scale + shift


def no_border(x, gain, cond, weight):
    return block(x, gain, cond, weight)


def gain_inside(x, gain, cond, weight):
    scale, shift = f(cond @ weight)[:, None].chunk(2, dim=-1)
    return x + F.rms_norm(x, x.shape[-1:]) * gain * (1 + scale) + shift


def cond_twice(x, gain, cond, weight):
    return bordered(f, x, gain, f(cond), weight)


def tokens_too(x, gain, cond, weight):
    return bordered(f, f(x), gain, cond, weight)


def mean_for_sum(x, gain, cond, weight):
    return bordered(f_mean, x, gain, cond, weight)


@pytest.mark.parametrize(
    ("fn", "wrong", "hint"),
    [
        (
            no_border,
            dict.fromkeys(("gain.grad", "cond.grad", "weight.grad"), "partial"),
            "gain, cond and weight are whole",
        ),
        (gain_inside, {"gain.grad": "partial"}, "gain is whole on every rank"),
        (cond_twice, {"cond.grad": "scaled by world_size (2)"}, "how often does each gradient cross"),
        (tokens_too, {"x.grad": "wrong"}, "used on this rank alone"),
        (
            mean_for_sum,
            dict.fromkeys(("gain.grad", "cond.grad", "weight.grad"), "scaled by 1/world_size (0.5)"),
            "a sum or a mean",
        ),
    ],
)
def test_a_wrong_gradient_of_the_norm_is_diagnosed(fn, wrong, hint):
    report = refused("modulated_norm", fn)
    assert verdicts(report) == RIGHT_2 | wrong
    assert hint in report.hint


def each_by_itself(x, gain, cond, weight):
    return block(x, f(gain), f(cond), f(weight))


def modulation_and_gain(x, gain, cond, weight):
    scale, shift = f(cond @ weight)[:, None].chunk(2, dim=-1)
    return x + F.rms_norm(x, x.shape[-1:]) * f(gain) * (1 + scale) + shift


def all_parameters_in_one(x, gain, cond, weight):
    flat = f(torch.cat([gain, cond.flatten(), weight.flatten()]))
    a, b, c = flat.split([gain.numel(), cond.numel(), weight.numel()])
    return block(x, a, b.view_as(cond), c.view_as(weight))


def gathers_in_forward(x, gain, cond, weight):
    y = bordered(f, Gather.apply(x), gain, cond, weight)
    return y.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


# Seed 0 is batch=3, hidden=10, cond_dim=6: gain 10, cond 18, weight 120 numbers; enough is 2 * 3 * 10; 4 bytes each.
ENOUGH_2 = "where one of 240 bytes (2 · batch · hidden numbers) is enough"


@pytest.mark.parametrize(
    ("fn", "sent", "hint"),
    [
        (each_by_itself, f"in backward 3 all-reduces of 592 bytes in all, {ENOUGH_2}", "before the border"),
        (modulation_and_gain, f"in backward 2 all-reduces of 280 bytes in all, {ENOUGH_2}", "travel as one tensor"),
        (all_parameters_in_one, f"in backward one all-reduce of 592 bytes, {ENOUGH_2}", "the border is smallest"),
        (
            gathers_in_forward,
            "in forward one all-gather of 960 bytes, where nothing has to be sent",
            "what has forward to send",
        ),
    ],
)
def test_a_right_answer_that_communicates_too_much_is_told_what_is_enough(fn, sent, hint):
    report = refused("modulated_norm", fn)
    assert report.headline.endswith(f": output and gradients are right, but more is sent than it takes: {sent}")
    assert hint in report.hint
    assert report.rows[-1].cells[3].startswith("line ") and "dist.all_" in report.rows[-1].cells[3]


def whole_output(x, gain, cond, weight):
    return Gather.apply(bordered(f, x, gain, cond, weight))


def test_an_output_that_should_have_stayed_sharded_is_described():
    headline = refused("modulated_norm", whole_output).headline
    assert "expected [3, 4, 10]: [batch, tokens / world_size, hidden], the part of this rank's own tokens" in headline


# ---------------------------------------------------------------- what isn't an answer


def not_written(x, up, head):
    raise NotImplementedError(STUB)


def no_message(x, up, head):
    raise NotImplementedError


def forgets_to_return(x, up, head):
    own_tokens(x, up, head)


def a_pair(x, up, head):
    return own_tokens(x, up, head), up


def in_double(x, up, head):
    return own_tokens(x, up, head).double()


def detached(x, up, head):
    return no_f(x, up, head).detach()


def changes_up(x, up, head):
    dist.all_reduce(up.data)
    return no_f(x, up, head)


def only_rank_1(x, up, head):
    return own_tokens(x, up, head) if dist.get_rank() == 1 else None


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (not_written, f"on 2 ranks: not written yet: {STUB}"),
        (no_message, "on 2 ranks: not written yet"),
        (forgets_to_return, "it returned None on every rank: is there a return at its end?"),
        (
            a_pair,
            "it returned a tuple on every rank, expected a tensor of shape [{batch}, {classes}]: [batch, classes], ",
        ),
        (in_double, "it returned float64 on every rank, expected float32"),
        (detached, "the result is cut off from the inputs on every rank, so no gradient can flow back"),
        (changes_up, "it changed its input up in place on every rank"),
        (only_rank_1, "it returned None on rank 0"),
    ],
)
def test_what_is_no_result_is_said_in_a_sentence(fn, says):
    sizes = Case(EXERCISES["pooled_logits"], 2, seed=0).sizes
    assert says.format(**sizes) in refused("pooled_logits", fn).headline


def test_the_place_that_is_not_written_is_shown():
    report = refused("pooled_logits", not_written)
    assert "raise NotImplementedError(STUB)" in report.detail and "single-process specification" in report.hint


def test_the_stub_in_the_exercise_says_what_the_report_repeats():
    for file in (ROOT / "nbgrader_config.py", ROOT / "exercises" / SOLUTION.relative_to(ROOT / "solutions")):
        assert STUB in file.read_text(encoding="utf-8")


def fails_on_rank_1(x, up, head):
    return x @ head if dist.get_rank() == 1 else no_f(x, up, head)


def test_a_function_that_raises_is_shown_with_its_rank_and_line():
    report = refused("pooled_logits", fails_on_rank_1)
    assert "rank 1 raised RuntimeError: mat1 and mat2 shapes" in report.headline
    assert "--> " in report.detail and "return x @ head" in report.detail
    assert "site-packages" not in str(report) and "probe.py" not in str(report)


def only_rank_0_adds_up(x, up, head):
    features = F.gelu(x @ f(up)).sum(dim=1) / tokens(x)
    return (g(features) if dist.get_rank() == 0 else features) @ head


def test_a_hang_is_explained_and_does_not_last():
    start = time.monotonic()
    report = refused("pooled_logits", only_rank_0_adds_up, timeout=3)
    assert "hang" in report.headline and "same collectives in the same order" in report.hint
    assert "rank 0 was waiting in all_reduce" in report.detail and "rank 1 had returned" in report.detail
    assert time.monotonic() - start < 15


def too_slow(x, up, head):
    time.sleep(30)


def test_a_function_that_never_ends_is_stopped():
    report = refused("pooled_logits", too_slow, timeout=2)
    assert report.headline == "pooled_logits on 2 ranks: no result after 2 s"
    assert "time.sleep(30)" in report.detail and report.hint == ""


@pytest.mark.parametrize(
    ("name", "fn", "says"),
    [
        ("pooled_logit", no_f, "did you mean 'pooled_logits'? The names are 'copy_to_parallel', 'reduce_from_"),
        ("ring", no_f, "there is no exercise named 'ring'. The names are 'copy_to_parallel', 'reduce_from_parallel', "),
        ("copy_to_parallel", Copy, "the second argument is the class Copy: pass its function, Copy.apply"),
        ("copy_to_parallel", None, "as in check('copy_to_parallel', CopyToParallel.apply)"),
        (no_f, "pooled_logits", "check needs the exercise's name first"),
        ("pooled_logits", torch.ones(3), "the second argument is of type Tensor, not a function"),
        ("pooled_logits", "pooled_logits", "the second argument is the text 'pooled_logits', not a function"),
        ("pooled_logits", None, "the second argument is of type NoneType, not a function"),
        (
            "pooled_logits",
            lambda x, up: x,
            "pooled_logits is called as pooled_logits(x, up, head), and yours is <lambda>(x, up): too many",
        ),
        ("modulated_norm", no_f, "called as modulated_norm(x, gain, cond, weight), and yours is no_f(x, up, head)"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_without_starting_ranks(name, fn, says):
    assert says in refused(name, fn).headline


def test_a_function_that_cannot_be_sent_says_so():
    lock = threading.Lock()
    assert "can't be sent to the ranks" in refused("pooled_logits", lambda x, up, head: lock).headline


# ---------------------------------------------------------------- where it is shown


def prints(x, up, head):
    print("features", tuple((x @ up).shape))
    return divided_last(x, up, head)


def test_what_is_printed_says_in_which_call_it_was(capsys):
    check("pooled_logits", prints, world_sizes=(2,))
    lines = capsys.readouterr().out.splitlines()
    for number, call in enumerate(("first", "second")):
        sizes = Case(EXERCISES["pooled_logits"], 2, seed=number).sizes
        head, *said = lines[3 * number : 3 * number + 3]
        x, up = [sizes[d] for d in ("batch", "tokens", "hidden")], [sizes[d] for d in ("hidden", "features")]
        assert head.startswith(f"Printed by the {call} call on 2 ranks, with x {x}, up {up}, head [")
        assert said == [f"[rank {rank}] features {(*x[:2], up[1])}" for rank in range(2)]
    assert lines[6].startswith("✓ ") and len(lines) == 7


def prints_and_fails(x, up, head):
    print("this far")
    raise ValueError("no further")


def test_what_is_printed_before_a_failure_is_shown(capsys):
    refused("pooled_logits", prints_and_fails)
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("Printed by the first call on 2 ranks") and lines[0] == "[rank 0] this far"


def test_elsewhere_a_right_answer_is_printed_and_nothing_is_returned(capsys):
    assert check("pooled_logits", solution()["pooled_logits"], world_sizes=(2,)) is None
    assert capsys.readouterr().out.startswith("✓ pooled_logits is right on 2 ranks: the output, x.grad, up")


@pytest.fixture
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    had = InteractiveShell.initialized()
    yield InteractiveShell.instance()
    if not had:
        InteractiveShell.clear_instance()


def test_a_notebook_shows_the_report_and_one_line_of_error(shell, capsys):
    shell.run_cell("from course_utils.grading import check\ncheck('pooled_logits', lambda x, up: x)")
    shown = capsys.readouterr().out
    assert shown.count("✗ pooled_logits is called as") == 1
    assert shown.count("CheckFailed: not right yet, see above (") == 1
    assert "Traceback" not in shown and "checks.py" not in shown


@pytest.mark.parametrize("world_sizes", [2, (), (0,), (2.0,), "234"])
def test_numbers_of_ranks_that_make_no_sense_are_refused_by_a_sentence(world_sizes):
    report = examine("pooled_logits", lambda *inputs: inputs[0], world_sizes=world_sizes)
    assert (
        report.headline == f"world_sizes={world_sizes!r}: numbers of ranks were expected, as in world_sizes=(2, 3, 4)"
    )
