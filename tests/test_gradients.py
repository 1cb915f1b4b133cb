"""The gradient doctor: every disease, made on purpose, is recognised; nothing wrong is ever called healthy.

Where the right verdicts come from: each case is built from a reference by the definition of its disease (a slice is cut
out, a factor is multiplied in, random terms are made to add up), so that the verdict is known before the doctor speaks.
"""

import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from course_utils.gradients import RTOL, Disease, diagnose, diagnose_twin
from course_utils.gradients.tolerance import element_size
from course_utils.gradients.twin import weighted_sum

torch.set_num_threads(1)
FEW = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(FEW, max_examples=200)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
SIZES = st.integers(2, 8)
SEEDS = st.integers(0, 10**6)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def clear(shape, seed, dtype=torch.float32):
    """Random values of either sign between 1/2 and 2, so that no element is small next to another."""
    g = generator(seed)
    signs = torch.randint(0, 2, shape, generator=g) * 2 - 1
    return (signs * (0.5 + 1.5 * torch.rand(shape, generator=g, dtype=torch.float64))).to(dtype)


def one(reference, ranks, **options):
    """The verdict on a single tensor."""
    return diagnose({"w": reference}, [{"w": rank} for rank in ranks], **options)["w"]


def cut(tensor, sizes, dim):
    return list(tensor.split(sizes, dim))


@st.composite
def shards(draw, min_ranks=2, at_least=1):
    """A reference, a dimension, and a split of it as torch.chunk, as torch.tensor_split, or with any borders at all."""
    world_size = draw(st.integers(min_ranks, 8))
    shape = list(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = draw(st.integers(at_least, 3 * world_size))
    whole = clear(shape, draw(SEEDS), draw(DTYPES))
    how = draw(st.sampled_from(["chunk", "tensor_split", "any"]))
    if how == "chunk":
        sizes = [len(part) for part in torch.arange(shape[dim]).chunk(world_size)]
        sizes += [0] * (world_size - len(sizes))
    elif how == "tensor_split":
        sizes = [len(part) for part in torch.arange(shape[dim]).tensor_split(world_size)]
    else:
        borders = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=world_size - 1, max_size=world_size - 1)))
        sizes = [stop - start for start, stop in zip([0, *borders], [*borders, shape[dim]], strict=True)]
    return whole, dim, sizes


def zero_padded(whole, sizes, dim, k=1):
    """Per rank: k times its own slice, zeros elsewhere."""
    ranks, start = [], 0
    for size in sizes:
        rank = torch.zeros_like(whole)
        rank.narrow(dim, start, size).copy_(k * whole.narrow(dim, start, size))
        ranks.append(rank)
        start += size
    return ranks


def terms(whole, world_size, seed, k=1.0):
    """Random tensors, one per rank, that add up to k times the whole (in float64, then rounded)."""
    parts = [clear(whole.shape, seed + 1 + rank, torch.float64) for rank in range(world_size - 1)]
    last = k * whole.double() - sum(parts)
    return [part.to(whole.dtype) for part in [*parts, last]]


# ---------------------------------------------------------------- healthy


@FEW
@given(SHAPES, DTYPES, st.integers(1, 8), SEEDS)
def test_equal_gradients_match_on_every_rank(shape, dtype, world_size, seed):
    whole = clear(shape, seed, dtype)
    verdict = one(whole, [whole.clone() for _ in range(world_size)])
    assert verdict.diseases == ("matches",) and verdict.healthy
    assert verdict.errors == (0.0,) * world_size and verdict.ranks == () and verdict.cure == ""


@MANY
@given(shards())
def test_shards_along_any_dimension_even_uneven_or_empty_are_right(case):
    whole, dim, sizes = case
    verdict = one(whole, cut(whole, sizes, dim))
    assert verdict.healthy
    assert verdict.diseases == ("right shard",) and verdict.dim == dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_the_rounding_of_a_real_matrix_product_and_all_reduce_is_no_disease(dtype, seed):
    g = generator(seed)
    tokens, wide, narrow, world_size = 512, 48, 24, 4
    x = torch.randn(tokens, wide, generator=g).to(dtype)
    delta = torch.randn(tokens, narrow, generator=g).to(dtype)
    reference = {"weight": delta.T @ x, "bias": delta.sum(0), "scale": (x * x).sum()}
    weight, bias, scale = 0, 0, 0
    for dx, part in zip(delta.chunk(world_size), x.chunk(world_size), strict=True):  # another order of summation
        weight, bias, scale = weight + dx.T @ part, bias + dx.sum(0), scale + (part * part).sum()
    assert diagnose(reference, [{"weight": weight, "bias": bias, "scale": scale}] * world_size).sick == ()


def test_a_gradient_that_no_rank_and_no_reference_has_matches():
    diagnosis = diagnose(
        {"w": torch.ones(2), "frozen": None}, [{"w": torch.ones(2), "frozen": None}, {"w": torch.ones(2)}]
    )
    assert diagnosis.healthy and diagnosis["frozen"].note == "no gradient, as in the reference"


def test_an_empty_tensor_and_a_single_rank_are_fine():
    empty = torch.zeros(0, 3)
    assert one(empty, [empty, empty]).disease == "matches"
    assert one(torch.ones(3), [torch.ones(3)]).disease == "matches"


def test_trailing_ranks_without_a_chunk_may_hold_none():
    whole = clear((4, 2), 0)  # torch.chunk(4 rows, 3 ranks) gives two chunks only
    verdict = one(whole, [*whole.chunk(3), None])
    assert (verdict.disease, verdict.dim) == ("right shard", 0)


# ---------------------------------------------------------------- each disease


@MANY
@given(SHAPES, DTYPES, SIZES, SEEDS, st.sampled_from([2.0, 3.0, 0.125, -1.0, 7.5, "world_size", "1/world_size"]))
def test_a_common_factor_is_found_and_named_only_when_it_is_the_world_size(shape, dtype, world_size, seed, k):
    whole = clear(shape, seed, torch.float64)
    names = {"world_size": world_size, "1/world_size": 1 / world_size}
    value = names.get(k, k)
    verdict = one(whole.to(dtype), [(value * whole).to(dtype)] * world_size)
    assert verdict.diseases == ("scaled",) and verdict.ranks == tuple(range(world_size))
    assert verdict.k == pytest.approx(value, rel=RTOL[dtype])
    assert verdict.k_name == {world_size: "world_size", 1 / world_size: "1/world_size"}.get(value, "")


@MANY
@given(SHAPES, DTYPES, SIZES, SEEDS)
def test_terms_that_add_up_to_the_reference_are_partial(shape, dtype, world_size, seed):
    whole = clear(shape, seed, dtype)
    ranks = terms(whole, world_size, seed)
    assume(not torch.allclose(ranks[0], ranks[1], rtol=0.4))  # equal terms are the reference scaled by 1/world_size
    assume(not any(torch.allclose(rank, whole, rtol=0.4) for rank in ranks))  # a lone number may be right by chance
    drowned = 8 * RTOL[dtype] * float(sum(rank.double().abs() for rank in ranks).max())
    assume(drowned < float(whole.abs().min()))  # else the sum drowns in its terms' rounding
    verdict = one(whole, ranks)
    assert verdict.diseases == ("partial",) and "all-reduce (sum)" in verdict.cure


@MANY
@given(
    st.lists(st.integers(3, 6), min_size=1, max_size=3).map(tuple),
    DTYPES,
    SIZES,
    SEEDS,
    st.sampled_from([0, -1, 1.5, 3]),
)
def test_terms_whose_sum_is_k_times_the_reference_are_partial_and_scaled(shape, dtype, world_size, seed, k):
    k = {0: world_size, -1: 1 / world_size}.get(k, k)
    whole = clear(shape, seed, dtype)
    ranks = terms(whole, world_size, seed, k)
    verdict = one(whole, ranks)
    assert not verdict.healthy
    assume(k >= 1 or dtype not in (torch.bfloat16, torch.float16))  # else the sum drowns in its terms' rounding
    assert verdict.diseases == ("partial", "scaled")
    assert verdict.k == pytest.approx(k, rel=0.05)
    assert verdict.note == ("the mean of the ranks is the reference" if k == world_size else "")
    assert ("all-reduce (mean)" in verdict.cure) == (k == world_size)


@MANY
@given(shards(at_least=2), st.sampled_from([1, 3, "world_size", "1/world_size", -0.75]))
def test_zero_padded_slices_are_own_slices_with_their_factor(case, k):
    whole, dim, sizes = case
    world_size = len(sizes)
    value = {"world_size": world_size, "1/world_size": 1 / world_size}.get(k, k)
    verdict = one(whole, zero_padded(whole, sizes, dim, value))
    if sum(size > 0 for size in sizes) == 1:  # a single rank has everything: the others miss it
        expected = {"missing"} if value == 1 else {"partial", "scaled", "ranks disagree"}
        assert set(verdict.diseases) <= expected
        return
    assert verdict.diseases == (("own slice only",) if value == 1 else ("own slice only", "scaled"))
    assert verdict.dim == dim and verdict.ranks == tuple(range(world_size)) and "all-gather" in verdict.cure
    if value != 1:
        assert verdict.k == pytest.approx(value, rel=0.02)


@MANY
@given(shards(at_least=2), st.sampled_from([2.5, "world_size", "1/world_size"]))
def test_shards_times_k_are_scaled_with_their_dimension(case, k):
    whole, dim, sizes = case
    value = {"world_size": len(sizes), "1/world_size": 1 / len(sizes)}.get(k, k)
    verdict = one(whole, [value * part for part in cut(whole, sizes, dim)])
    assert verdict.diseases == ("scaled",) and verdict.dim == dim and not verdict.healthy
    assert verdict.k_name == {len(sizes): "world_size", 1 / len(sizes): "1/world_size"}.get(value, "")


@MANY
@given(
    SIZES, st.integers(1, 3), st.integers(3, 5), st.integers(0, 1), SEEDS, st.data(), st.sampled_from([1, 1, 4.5, -1])
)
def test_shards_that_changed_places_are_wrong_shards_on_the_ranks_that_hold_them(n, rows, columns, dim, seed, data, k):
    whole = clear((n * rows, columns) if dim == 0 else (columns, n * rows), seed)
    order = data.draw(st.permutations(range(n)).filter(lambda order: list(order) != list(range(n))))
    parts = whole.chunk(n, dim)
    verdict = one(whole, [k * parts[other] for other in order])
    moved = tuple(rank for rank, other in enumerate(order) if rank != other)
    if k == 1:
        assert (verdict.diseases, verdict.ranks, verdict.dim) == (("wrong shard",), moved, dim)
        assert f"rank {moved[0]} holds the shard of rank {order[moved[0]]}" in verdict.note
    else:
        assert verdict.diseases == ("wrong shard", "scaled") and verdict.k == pytest.approx(k, rel=1e-5)


def test_every_rank_with_the_first_shard_is_wrong_on_all_but_the_first():
    whole = clear((6, 2), 1)
    verdict = one(whole, [whole[:2]] * 3)
    assert (verdict.disease, verdict.ranks) == ("wrong shard", (1, 2))


@FEW
@given(SHAPES, DTYPES, SIZES, SEEDS, st.data(), st.sampled_from(["none", "no key", "zero"]))
def test_a_gradient_that_some_ranks_lack_is_missing_there(shape, dtype, world_size, seed, data, how):
    whole = clear(shape, seed, dtype)
    lacking = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1))
    absent = {"none": {"w": None}, "no key": {}, "zero": {"w": torch.zeros_like(whole)}}[how]
    verdict = diagnose({"w": whole}, [absent if rank in lacking else {"w": whole} for rank in range(world_size)])["w"]
    assert verdict.diseases == ("missing",) and set(verdict.ranks) == lacking
    assert verdict.error == float(whole.abs().max())


def test_a_missing_gradient_does_not_hide_what_the_others_have():
    whole = clear((4, 4), 2)
    verdict = one(whole, [3 * whole, None, 3 * whole])
    assert verdict.diseases == ("missing", "scaled") and verdict.ranks == (0, 1, 2) and verdict.k == 3
    first, second, third = terms(whole, 3, seed=2)
    assert one(whole, [first, None, second, third]).diseases == ("missing", "partial")


def test_a_shard_that_one_rank_lacks_is_missing_there():
    whole = clear((6, 2), 3)
    verdict = one(whole, [whole[:2], None, whole[4:]])
    assert (verdict.disease, verdict.ranks, verdict.dim) == ("missing", (1,), 0)


@FEW
@given(shards(), SEEDS, st.booleans(), st.booleans())
def test_the_gradient_of_the_step_before_is_stale_and_its_sum_with_the_right_one_accumulated(case, seed, split, added):
    whole, dim, sizes = case
    before = 3 * clear(whole.shape, seed + 7, whole.dtype)
    now = whole + before if added else before
    ranks = cut(now, sizes, dim) if split else [now] * len(sizes)
    assert one(whole, ranks, previous={"w": before}).diseases == ("accumulated" if added else "stale",)
    assert one(whole, [whole, now], previous={"w": before}).ranks == (1,)
    assert not one(whole, ranks).healthy  # without `previous` the name is not known, but it is no match either


@FEW
@given(SHAPES, SIZES, SEEDS, st.data())
def test_ranks_that_stray_from_a_right_majority_are_named(shape, world_size, seed, data):
    whole = clear(shape, seed)
    stray = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=(world_size - 1) // 2 or 1))
    ranks = [whole + 3 * clear(shape, seed + 9 + rank) if rank in stray else whole for rank in range(world_size)]
    verdict = one(whole, ranks)
    if world_size > 2:
        assert verdict.disease == "ranks disagree" and set(verdict.ranks) == stray
    assert not verdict.healthy


def test_a_factor_on_some_ranks_only_is_disagreement_with_that_factor():
    whole = clear((5, 3), 4)
    verdict = one(whole, [whole, 2 * whole, whole, 2 * whole])
    assert verdict.diseases == ("ranks disagree", "scaled") and verdict.ranks == (1, 3) and verdict.k == 2


def test_a_factor_of_its_own_on_every_rank_is_disagreement_and_lists_them():
    whole = clear((5, 3), 4)
    verdict = one(whole, [2 * whole, 5 * whole, 11 * whole])
    assert verdict.diseases == ("ranks disagree",) and "rank 1: 5" in verdict.note


@FEW
@given(st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple), SIZES, SEEDS)
def test_unrelated_gradients_are_wrong_if_the_ranks_agree_and_disagree_if_not(shape, world_size, seed):
    whole = clear(shape, seed)
    strange = 5 * clear(shape, seed + 1) + torch.arange(whole.numel()).reshape(shape)
    assert one(whole, [strange] * world_size).diseases == ("wrong",)
    ranks = [strange * torch.rand(shape, generator=generator(rank)) for rank in range(world_size)]
    assert not one(whole, ranks).healthy
    if whole.numel() > 3:
        assert one(whole, ranks).diseases == ("ranks disagree",)


@FEW
@given(SHAPES, SIZES, SEEDS, st.data(), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_nan_and_infinity_are_not_finite_on_the_ranks_that_have_them(shape, world_size, seed, data, bad):
    whole = clear(shape, seed)
    off = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1))
    ranks = [whole.clone() for _ in range(world_size)]
    for rank in off:
        ranks[rank].view(-1)[-1] = bad
    verdict = one(whole, ranks)
    assert verdict.diseases == ("not finite",) and set(verdict.ranks) == off and verdict.error is None


def test_a_gradient_where_the_reference_has_none_is_unexpected_even_if_it_is_zero():
    reference = {"w": torch.ones(2), "frozen": None}
    for value, note in ((torch.ones(3), ""), (torch.zeros(3), "it is all zero")):
        verdict = diagnose(reference, [{"w": torch.ones(2)}, {"w": torch.ones(2), "frozen": value}])["frozen"]
        assert (verdict.disease, verdict.ranks, verdict.note) == ("unexpected", (1,), note)


@pytest.mark.parametrize("shapes", [[(4, 3), (3, 4)], [(2, 3), (3, 3)], [(12,), (12,)], [(2, 2), (2, 2)], [(), ()]])
def test_shapes_that_are_neither_whole_nor_shards_are_wrong_shapes(shapes):
    verdict = one(clear((4, 3), 5), [torch.ones(shape) for shape in shapes])
    assert verdict.disease == "wrong shape" and "(4, 3)" in verdict.note


def test_ranks_without_the_name_may_hold_it_elsewhere_if_told_so():
    reference = {"first": clear((3,), 6), "last": clear((4, 2), 7)}
    stages = [{"first": reference["first"]}, {"last": reference["last"]}]
    assert diagnose(reference, stages, elsewhere=True).healthy
    assert [verdict.disease for verdict in diagnose(reference, stages)] == ["missing", "missing"]
    stages[1]["last"] = 2 * reference["last"]
    assert diagnose(reference, stages, elsewhere=True)["last"].ranks == (1,)
    assert diagnose(reference, [{}, {"last": reference["last"]}], elsewhere=True)["first"].disease == "missing"


# ---------------------------------------------------------------- never a false "matches"


@MANY
@given(shards(min_ranks=1), st.booleans(), st.data(), st.floats(10, 1e5), st.sampled_from([1, -1]))
def test_one_element_off_on_one_rank_is_never_healthy(case, split, data, times, sign):
    whole, dim, sizes = case
    ranks = [part.clone() for part in cut(whole, sizes, dim)] if split else [whole.clone() for _ in sizes]
    rank = data.draw(st.sampled_from([rank for rank, part in enumerate(ranks) if part.numel()]))
    element = data.draw(st.integers(0, ranks[rank].numel() - 1))
    offset = times * RTOL[whole.dtype] * float(whole.abs().max())
    ranks[rank].view(-1)[element] = (ranks[rank].view(-1)[element].double() + sign * min(offset, 1000)).to(whole.dtype)
    verdict = one(whole, ranks)
    assert not verdict.healthy
    assert verdict.ranks and verdict.cure


@MANY
@given(shards(min_ranks=1), st.booleans(), st.sampled_from([-1, 1]))
def test_a_small_factor_on_all_elements_is_never_healthy(case, split, sign):
    whole, dim, sizes = case
    off = whole.double() * (1 + sign * 10 * RTOL[whole.dtype])
    verdict = one(whole, cut(off.to(whole.dtype), sizes, dim) if split else [off.to(whole.dtype)] * len(sizes))
    assert not verdict.healthy


@MANY
@given(shards(), st.sampled_from(["zero", "other sign", "double", "shuffled", "noise", "next rank's"]), st.data())
def test_one_rank_that_is_wrong_in_any_way_is_never_healthy(case, how, data):
    whole, dim, sizes = case
    rank = data.draw(st.integers(0, len(sizes) - 1))
    changed = {
        "zero": torch.zeros_like,
        "other sign": torch.neg,
        "double": lambda x: 2 * x,
        "shuffled": lambda x: x.flatten().roll(1).reshape(x.shape),
        "noise": lambda x: clear(x.shape, 99, x.dtype),
        "next rank's": lambda x: x.roll(sizes[0], dim),
    }[how](whole)
    ranks = [changed if r == rank else whole for r in range(len(sizes))]
    off = float((changed.double() - whole.double()).abs().max())
    assume(off > 10 * RTOL[whole.dtype] * float(whole.abs().max()))  # shuffling equal numbers changes nothing
    assert not one(whole, ranks).healthy


@pytest.mark.parametrize(
    ("reference", "element"),
    [
        (torch.tensor([1e4, 1e-3]), 1),
        (torch.tensor([1e4] + 9 * [1e-3]), 5),
        (torch.cat([torch.full((1, 20), 1e4), torch.full((19, 20), 1e-3)]), 30),  # one loud row
        (torch.cat([torch.full((20, 1), 1e4), torch.full((20, 19), 1e-3)], 1), 30),  # one loud column
        (torch.cat([torch.zeros(5, 20), torch.full((15, 20), 1e3)]), 3),  # rows of tokens that do not occur
    ],
)
def test_a_small_element_beside_large_ones_is_judged_by_its_own_size(reference, element):
    wrong = reference.clone()
    wrong.view(-1)[element] += 1e-3
    assert one(reference, [reference, reference]).healthy
    assert not one(reference, [reference, wrong]).healthy


def test_a_tiny_tensor_beside_large_ones_is_judged_by_its_own_size_but_rounding_is_not_called_wrong():
    loud, tiny = 1e3 * clear((4, 4), 8), 1e-6 * clear((5,), 9)
    assert diagnose({"loud": loud, "tiny": tiny}, [{"loud": loud, "tiny": 2 * tiny}] * 2)["tiny"].diseases == (
        "scaled",
    )
    noise = {"loud": loud, "tiny": 1e-6 * clear((5,), 10)}
    verdict = diagnose({"loud": loud, "tiny": tiny}, [noise] * 2)["tiny"]
    assert verdict.diseases == ("too small to tell",) and not verdict.healthy and "atol" in verdict.cure
    assert diagnose({"loud": loud, "tiny": tiny}, [noise] * 2, atol=1e-5).healthy


def test_a_zero_reference_matches_zeros_only_and_claims_no_relation():
    zero = torch.zeros(4, 2)
    assert one(zero, [zero, zero]).healthy and one(zero, list(zero.chunk(2))).healthy
    opposite = diagnose({"w": zero, "v": torch.ones(1)}, [{"w": zero + s, "v": torch.ones(1)} for s in (1, -1)])["w"]
    assert opposite.diseases == ("ranks disagree",)  # their sum is zero too, but that says nothing
    same = diagnose({"w": zero, "v": torch.ones(1)}, [{"w": zero + 1, "v": torch.ones(1)}] * 2)["w"]
    assert same.diseases == ("wrong",) and "nothing can be said" in same.note


def test_a_single_number_is_not_said_to_be_scaled_or_partial_by_an_arbitrary_factor():
    assert one(torch.tensor(1.0), [torch.tensor(0.37)]).diseases == ("wrong",)
    assert one(torch.tensor([1.0]), [torch.tensor([0.37]), torch.tensor([2.9])]).diseases == ("ranks disagree",)
    assert one(torch.tensor([1.0]), [torch.tensor([0.25]), torch.tensor([0.75])]).diseases == ("partial",)


def test_large_terms_that_cancel_are_not_taken_for_a_sum():
    whole = clear((6,), 11)
    loud = 1e9 * clear((6,), 12)
    assert one(whole, [loud, -loud]).diseases == ("ranks disagree",)


def test_rows_of_an_embedding_that_different_ranks_saw_are_partial_not_slices():
    whole = torch.zeros(100, 4)
    whole[[3, 50]] = clear((2, 4), 13)
    first, second = torch.zeros(100, 4), torch.zeros(100, 4)
    first[3], second[50] = whole[3], whole[50]
    nothing = torch.zeros(100, 4)
    assert one(whole, [first, second, nothing, nothing]).diseases == ("partial",)
    assert one(whole, [first, nothing, second, nothing]).diseases == ("own slice only",)  # rows 3 and 50 are theirs


# ---------------------------------------------------------------- what goes in


def tied_and_frozen():
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    model["norm"].bias.requires_grad_(False)
    model["head"](model["norm"](model["embed"](torch.tensor([1, 2, 3])))).square().sum().backward()
    return model


def test_modules_are_read_by_name_tied_parameters_once_and_frozen_ones_without_gradient():
    model = tied_and_frozen()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    diagnosis = diagnose(model, [model, gradients])
    assert [verdict.name for verdict in diagnosis] == ["embed.weight", "norm.weight", "norm.bias"]
    assert diagnosis["norm.weight"].healthy and diagnosis["norm.bias"].note == "no gradient, as in the reference"


def test_sparse_gradients_are_compared_as_dense_ones():
    dense = torch.zeros(5, 2)
    dense[[1, 4]] = 3.0
    assert one(dense, [dense.to_sparse(), dense]).healthy
    assert one(dense.to_sparse(), [2 * dense.to_sparse()] * 3).k == 2


def test_the_coarsest_dtype_sets_the_tolerance_and_rtol_overrides_it():
    whole = clear((20, 20), 14)
    rounded = whole.bfloat16()
    assert one(whole, [whole, rounded]).healthy
    assert not one(whole, [whole, rounded.float()]).healthy
    assert not one(whole, [whole, rounded], rtol=1e-4).healthy
    assert one(whole, [whole, rounded.float()], rtol=0.01).healthy
    assert one(whole, [whole, whole], rtol=0).healthy


def test_the_arguments_are_left_as_they_were():
    whole = clear((4, 2), 15).requires_grad_()
    ranks = [2 * clear((4, 2), 15)] * 2
    before = [ranks[0].clone(), whole.detach().clone()]
    one(whole, ranks)
    assert torch.equal(ranks[0], before[0]) and torch.equal(whole.detach(), before[1]) and whole.requires_grad


class LooksLikeDTensor(torch.Tensor):
    def full_tensor(self):
        return self


W = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("reference", "ranks", "options", "error", "says"),
    [
        ({"w": W}, [], {}, ValueError, "per_rank is empty"),
        ({"w": W}, {"w": W}, {}, TypeError, r"expected a list .* write \[gradients\]"),
        ({"w": W}, 3, {}, TypeError, "per_rank is a int"),
        ({"w": W}, [W], {}, TypeError, "gradients of the rank 0 are a Tensor"),
        ([W], [{"w": W}], {}, TypeError, "gradients of the reference are a list"),
        ({"w": [1.0]}, [{"w": W}], {}, TypeError, "'w' of the reference is a list"),
        ({0: W}, [{0: W}], {}, TypeError, "the name 0, expected a string"),
        ({"w": W}, [{"w": W.int()}], {}, TypeError, "torch.int32, expected floating-point"),
        ({"w": W}, [{"w": W + 1j}], {}, TypeError, "view_as_real"),
        ({"w": W}, [{"w": W.to("meta")}], {}, ValueError, "meta device"),
        ({"w": W}, [{"w": W.as_subclass(LooksLikeDTensor)}], {}, TypeError, r"DTensor: pass its .to_local\(\)"),
        ({"w": W * float("nan")}, [{"w": W}], {}, ValueError, "'w' of the reference has NaN"),
        ({}, [{}], {}, ValueError, "reference is empty"),
        ({"w": None}, [{"w": None}], {}, ValueError, r"nothing to compare: call backward\(\)"),
        ({"w": W}, [{"w": W, "v": W}], {}, ValueError, "rank 0 has a gradient named 'v' that the reference lacks"),
        ({"w": W}, [{"module.w": W}], {}, ValueError, "take the names of the wrapped model"),
        ({"w": W}, [{"w": W}], {"rtol": 0.5}, ValueError, "rtol=0.5 must be"),
        ({"w": W}, [{"w": W}], {"rtol": float("nan")}, ValueError, "rtol=nan must be"),
        ({"w": W}, [{"w": W}], {"atol": -1}, ValueError, "atol=-1 must be"),
        ({"w": W}, [{"w": W}], {"previous": {"w": W[0]}}, ValueError, "previous step has shape"),
    ],
)
def test_what_can_not_be_compared_is_refused_in_a_sentence(reference, ranks, options, error, says):
    with pytest.raises(error, match=says):
        diagnose(reference, ranks, **options)


def test_a_name_that_the_reference_module_ties_is_refused_with_the_name_of_its_twin():
    with pytest.raises(ValueError, match="tied to 'embed.weight'"):
        diagnose(tied_and_frozen(), [{"head.weight": torch.ones(6, 4)}])


# ---------------------------------------------------------------- what comes out


def a_diagnosis():
    whole = {"a<b>&": clear((4, 2), 16), "bias": clear((3,), 17)}
    ranks = [{"a<b>&": whole["a<b>&"][2 * rank : 2 * rank + 2], "bias": 2 * whole["bias"]} for rank in range(2)]
    return diagnose(whole, ranks)


def test_a_diagnosis_is_a_value_indexed_by_name_and_true_when_healthy():
    diagnosis = a_diagnosis()
    assert diagnosis["bias"].disease == Disease.SCALED == "scaled"
    assert not diagnosis and not diagnosis.healthy and [verdict.name for verdict in diagnosis.sick] == ["bias"]
    assert len(diagnosis) == 2 and pickle.loads(pickle.dumps(diagnosis)) == diagnosis == a_diagnosis()
    with pytest.raises(KeyError, match="no gradient named 'w'"):
        diagnosis["w"]
    with pytest.raises(AttributeError):
        diagnosis.world_size = 3


def test_the_text_is_a_table_with_the_cure_below_what_is_wrong():
    lines = str(a_diagnosis()).splitlines()
    assert lines[:4] == [
        "Not healthy: 1 of 2 gradients is not right on 2 ranks",
        "    gradient  verdict                   wrong on  error",
        "ok  a<b>&     right shard, dim 0        –         ≈ 0",
        "!!  bias      scaled by world_size (2)  all       2",
    ]
    assert lines[4].startswith("      cure: divide by world_size") and max(map(len, lines)) <= 120


def test_the_html_escapes_names_and_says_every_state_in_words_and_symbols():
    page = a_diagnosis()._repr_html_()
    assert "a&lt;b&gt;&amp;" in page and "<b>" not in page
    assert page.count("✓ ok") == 1 and page.count("✗ sick") == 2  # one row each, and the caption
    assert page.count('scope="row"') == 2 and page.count('scope="col"') == 6 and "<caption" in page


def test_the_frame_has_one_row_per_gradient():
    frame = a_diagnosis().to_frame()
    assert frame.index.tolist() == ["a<b>&", "bias"] and frame["healthy"].tolist() == [True, False]


def test_text_does_not_show_rounding_that_differs_between_machines():
    whole = clear((50,), 18)
    assert str(diagnose({"w": whole}, [{"w": whole * (1 + 1e-7)}] * 2)) == str(
        diagnose({"w": whole}, [{"w": whole}] * 2)
    )


@FEW
@given(st.integers(2, 60), st.integers(2, 60), SEEDS)
def test_the_size_of_an_element_is_never_more_than_the_largest_in_its_row_or_column(rows, columns, seed):
    x = torch.randn(rows, columns, generator=generator(seed)).abs()
    size = element_size(x)
    if columns >= 16:
        assert bool((size <= x.amax(1, keepdim=True)).all())
    if rows >= 16:
        assert bool((size <= x.amax(0, keepdim=True)).all())
    assert bool((size > 0).all())


def test_the_module_loads_no_heavy_package_but_torch():
    code = "import sys, course_utils.gradients; print({'pandas', 'matplotlib', 'IPython'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# ---------------------------------------------------------------- twins on live ranks


class SumBackward(torch.autograd.Function):
    """Megatron's f: nothing in forward, all-reduce of the gradient in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Gather(torch.autograd.Function):
    """All-gather of columns; backward takes this rank's slice, or (careless) first sums the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, careless):
        ctx.careless = careless
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.careless:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()], None


def linear(x, w):
    return torch.tanh(x @ w.T)


def column_parallel(f, careless):
    def sharded(x, w):
        part = f(x) @ w.chunk(dist.get_world_size())[dist.get_rank()].T
        return torch.tanh(Gather.apply(part, careless))

    return sharded


def twin_inputs():
    return {"x": clear((3, 5), 20), "w": clear((6, 5), 21)}


def test_a_column_parallel_twin_gets_the_verdicts_that_its_backward_deserves():
    right = diagnose_twin(linear, column_parallel(SumBackward.apply, careless=False), twin_inputs(), world_size=3)
    assert right.forward.healthy and len(right.forward.errors) == 3 and right.world_size == 3
    assert right["x"].disease == "matches"
    assert (right["w"].diseases, right["w"].dim) == (("own slice only",), 0)  # w was handed over whole
    wrong = diagnose_twin(linear, column_parallel(lambda x: x, careless=True), twin_inputs(), world_size=2)
    assert wrong.forward.healthy  # the bug is silent
    assert wrong["x"].diseases == ("partial", "scaled") and wrong["x"].k_name == "world_size"
    assert wrong["w"].diseases == ("own slice only", "scaled") and wrong["w"].k_name == "world_size"


def test_a_collective_without_autograd_leaves_every_gradient_missing():
    def detached(x, w):
        return column_parallel(lambda x: x, careless=False)(x.detach(), w.detach())

    diagnosis = diagnose_twin(linear, detached, twin_inputs())
    assert diagnosis.forward.healthy and {verdict.disease for verdict in diagnosis} == {"missing"}


def test_a_wrong_output_makes_the_diagnosis_unhealthy_and_is_named():
    diagnosis = diagnose_twin(linear, lambda x, w: linear(x, w) * (1 + dist.get_rank()), twin_inputs())
    assert diagnosis.forward.diseases == ("ranks disagree", "scaled") and diagnosis.forward.ranks == (1,)
    assert not diagnosis.healthy and "forward" in str(diagnosis)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens, shift):
        return self.head(self.norm(self.embed(tokens) + shift))


def model_inputs():
    return (torch.tensor([[0, 1, 2], [7, 9, 9]]), clear((2, 3, 4), 22))


def test_module_twins_with_tied_and_frozen_parameters_agree_and_stay_untouched():
    model = Model()
    diagnosis = diagnose_twin(model, lambda whole: whole, model_inputs())
    assert [verdict.name for verdict in diagnosis] == ["embed.weight", "norm.weight", "norm.bias", "input:1"]
    assert diagnosis.healthy and diagnosis["norm.bias"].note == "no gradient, as in the reference"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ddp_and_fsdp_twins_are_healthy_and_fsdp_holds_shards():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def replicated(whole):
        return DistributedDataParallel(whole)

    assert diagnose_twin(nn.Linear(5, 3), replicated, clear((4, 5), 23)).healthy
    diagnosis = diagnose_twin(nn.Linear(5, 3), fully_shard, clear((4, 5), 23))
    assert diagnosis["weight"].words == "right shard, dim 0"  # 3 rows on 2 ranks: uneven
    assert diagnosis["input:0"].disease == "matches" and diagnosis.healthy


def test_a_twin_that_unties_what_the_reference_ties_is_refused():
    def untied(whole):
        whole.head.weight = nn.Parameter(whole.head.weight.detach().clone())
        return whole

    with pytest.raises(ValueError, match="'head.weight' separately, which the reference ties to 'embed.weight'"):
        diagnose_twin(Model(), untied, model_inputs())


def test_twins_that_can_not_be_run_are_refused_in_a_sentence():
    with pytest.raises(TypeError, match="the reference returned a tuple, expected one tensor"):
        diagnose_twin(lambda x: (x, x), lambda x: x, (W,))
    with pytest.raises(ValueError, match="no gradient reaches"):
        diagnose_twin(lambda n: n.float(), lambda n: n.float(), (torch.arange(3),))
    with pytest.raises(TypeError, match="inputs is a int"):
        diagnose_twin(lambda x: x, lambda x: x, 3)
    with pytest.raises(RuntimeError, match="expected the reference's"):
        diagnose_twin(lambda x: x, lambda x: x[:1], (W,))


def test_the_default_loss_depends_on_the_shape_only_and_tells_every_element_apart():
    x = torch.zeros(4, 5, requires_grad=True)
    weights = torch.autograd.grad(weighted_sum(x), x)[0]
    assert torch.equal(weights, torch.autograd.grad(weighted_sum(x), x)[0])
    assert len(weights.flatten().unique()) == 20
