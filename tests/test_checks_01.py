"""The checks of exercise 01: right answers of several styles pass, and each plausible mistake gets its own words.

What is right in the first exercise are the ZeRO paper's totals (Rajbhandari et al. 2020, Figure 1 and Table 1) and 16
or 18 bytes per parameter; in the second, what live ranks hold.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import sys
import time
from fractions import Fraction
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from solution_cells import run_solution

from course_utils.grading import CheckFailed, check, examine
from course_utils.grading.assumptions import PUBLISHED, claims
from course_utils.grading.assumptions import suspects as found_by_the_check
from course_utils.grading.held_bytes import PURPOSES, layers_of

ROOT = Path(__file__).resolve().parent.parent
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the functions of a notebook are sent


solution = partial(run_solution, "01_memory")


def refused(name, fn, **options):
    """The report on a function that must not pass, whose two views say the same."""
    with pytest.raises(CheckFailed) as caught:
        check(name, fn, **options)
    report = caught.value.report
    assert not report.passed
    assert str(caught.value) == str(report)
    page = report._repr_html_()
    for said in (report.headline, report.hint[1:], *(cell for row in report.rows for cell in row.cells)):
        assert html.escape(said) in page
    return report


# ---------------------------------------------------------------- right answers


@pytest.mark.parametrize("name", ["suspects", "held"])
def test_the_solution_passes(name):
    report = examine(name, solution()[name])
    assert report.passed and f"{name} is right on" in report.headline


def test_the_solution_runs_from_top_to_bottom(capsys):
    solution(graded=True)
    assert capsys.readouterr().out.count("✓") == 6  # two visible checks and four hidden ones


def in_one_expression(total, unit, parameters, world_size):
    """Exact, with every stage's divisors written out; a list, not a set."""
    kinds = {
        "all BF16": (2, 2, 4),
        "BF16 with FP32 moments": (2, 2, 8),
        "all FP32": (4, 4, 8),
        "mixed": (2, 2, 12),
        "mixed, FP32 gradients": (2, 4, 12),
        "mixed, 8-bit moments": (2, 2, 6),
    }
    n = world_size
    divisors = [(1, 1, 1), (1, 1, n), (1, n, n), (n, n, n)]
    per_parameter = Fraction(str(total)) * (1024**3 if unit == "GiB" else 1000**3) / parameters
    return [
        (name, stage)
        for (name, of_kind), (stage, by) in itertools.product(kinds.items(), enumerate(divisors))
        if 0.99 <= sum(Fraction(b, d) for b, d in zip(of_kind, by)) / per_parameter <= 1.01
    ]


def by_lists(layers, world_size, value_bytes):
    """Rows dealt out one after the other, as torch.chunk does."""
    ranks = [{"parameters": 0, "gradients": 0, "optimizer": 0, "gathered": 0} for _ in range(world_size)]
    for layer in layers:
        buffer = 0
        for rows, *rest in layer:
            width, longest = math.prod(rest) * value_bytes, -(-rows // world_size)
            pieces = [range(rows)[r * longest : (r + 1) * longest] for r in range(world_size)]
            for held, piece in zip(ranks, pieces):
                held["parameters"] += longest * width
                held["gradients"] += longest * width
                held["optimizer"] += 2 * len(piece) * width + 4
            buffer += world_size * longest * width
        for held in ranks:
            held["gathered"] = max(held["gathered"], buffer)
    return tuple(ranks)


@pytest.mark.parametrize(("name", "fn"), [("suspects", in_one_expression), ("held", by_lists)])
def test_a_right_answer_of_another_style_passes(name, fn):
    assert examine(name, fn, world_sizes=(2, 3), seed=7).passed


def test_the_published_totals_have_the_recipe_behind_them_among_their_suspects():
    recipes = [("mixed", 0), ("all BF16", 0), ("mixed", 1), ("mixed", 2), ("mixed", 3)]
    recipes += [("mixed, 8-bit moments", 0), ("mixed, FP32 gradients", 0)]
    for claim, recipe in zip(PUBLISHED, recipes, strict=True):
        assert recipe in found_by_the_check(claim)
        assert claim.source


def test_no_claim_is_on_the_border_of_the_one_per_cent():
    fn = solution()["suspects"]
    for seed in (0, 5101, 5102, *range(20)):
        for claim in claims(seed):
            right = found_by_the_check(claim)
            assert fn(*claim.arguments) == right == set(in_one_expression(*claim.arguments)) != set()


# ---------------------------------------------------------------- wrong answers to the first exercise


def no_master_beside_8_bit_moments(total, unit, parameters, world_size):
    found = in_one_expression(total, unit, parameters, world_size)
    return [suspect for suspect in found if suspect[0] != "mixed, 8-bit moments"]


def test_a_recipe_that_is_wrong_does_not_pass_the_visible_check():
    assert not examine("suspects", no_master_beside_8_bit_moments).passed


BYTES = {
    "all BF16": (2, 2, 4, 0),
    "BF16 with FP32 moments": (2, 2, 8, 0),
    "all FP32": (4, 4, 8, 0),
    "mixed": (2, 2, 8, 4),
    "mixed, FP32 gradients": (2, 4, 8, 4),
    "mixed, 8-bit moments": (2, 2, 2, 4),
}


def search(claim, recipes=BYTES, held=None, giga=None, close=0.01):
    total, unit, parameters, n = claim
    giga = giga or {"GB": 10**9, "GiB": 2**30}
    found = set()
    for (name, (w, g, m, k)), stage in itertools.product(recipes.items(), range(4)):
        cut = [n if stage >= at else 1 for at in (0, 1, 2, 3)]
        each = held(w, g, m, k, stage, n) if held else w / cut[3] + g / cut[2] + (m + k) / cut[1]
        if abs(parameters * each / (total * giga[unit]) - 1) <= close:
            found.add((name, stage))
    return found


def changed(change):
    return {name: change(*values) for name, values in BYTES.items()}


def gib_for_gb(*claim):
    return search(claim, giga={"GB": 2**30, "GiB": 2**30})


def gb_for_gib(*claim):
    return search(claim, giga={"GB": 10**9, "GiB": 10**9})


def no_master(*claim):
    return search(claim, changed(lambda w, g, m, k: (w, g, m, 0)))


def no_gradients(*claim):
    return search(claim, changed(lambda w, g, m, k: (w, 0, m, k)))


def one_moment(*claim):
    return search(claim, changed(lambda w, g, m, k: (w, g, m / 2, k)))


def no_weights(*claim):
    return search(claim, changed(lambda w, g, m, k: (0, g, m, k)))


def all_divided(*claim):
    return search(claim, held=lambda w, g, m, k, stage, n: (w + g + m + k) / (n if stage else 1))


def nothing_divided(*claim):
    return search(claim, held=lambda w, g, m, k, stage, n: w + g + m + k)


def gradients_in_stage_1(*claim):
    def held(w, g, m, k, stage, n):
        return w / (n if stage >= 2 else 1) + (g + m + k) / (n if stage >= 1 else 1)

    return search(claim, held=held)


def master_whole(*claim):
    def held(w, g, m, k, stage, n):
        cut = [n if stage >= at else 1 for at in (0, 1, 2, 3)]
        return (w + k) / cut[3] + g / cut[2] + m / cut[1]

    return search(claim, held=held)


def exactly_equal(*claim):
    return search(claim, close=0)


def first_only(*claim):
    return set(sorted(search(claim))[:1])


def megatron_with_bf16_gradients(*claim):
    return search(claim, BYTES | {"mixed, FP32 gradients": (2, 2, 8, 4)})


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (gib_for_gb, "how many bytes has one GB"),
        (gb_for_gib, "how many bytes has one GiB"),
        (no_master, "who updates the weights"),
        (no_gradients, "backward has to put them somewhere"),
        (one_moment, "one of them is missing"),
        (no_weights, "a total is of all that the rank holds"),
        (all_divided, "what does stage 1 leave whole"),
        (nothing_divided, "the same at every stage"),
        (gradients_in_stage_1, "one purpose too many"),
        (master_whole, "the master weights are the optimizer's"),
        (exactly_equal, "claims are rounded"),
        (first_only, "you stop at the first that fits"),
        (megatron_with_bf16_gradients, "only 'mixed, FP32 gradients' is not right"),
    ],
)
@pytest.mark.parametrize("seed", [0, 5101])
def test_a_wrong_search_is_told_what_it_has_forgotten(fn, hint, seed):
    report = refused("suspects", fn, seed=seed)
    assert "claims are not right" in report.headline
    assert hint in report.hint


def test_an_innocent_suspect_is_shown_with_its_own_total():
    report = refused("suspects", no_master)
    wrong = next(row for row in report.rows if row.cells[0].startswith("1,120 GB"))
    assert "missing" in wrong.cells[2]
    wrong = next(row for row in report.rows if row.cells[0].startswith("560 GB"))
    assert wrong.ok or "comes to" in wrong.cells[2]
    innocent = refused("suspects", nothing_divided, seed=5101)
    assert any("comes to" in row.cells[2] for row in innocent.rows)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda total, unit, parameters, world_size: None, "it returned None: is there a return at its end?"),
        (lambda total, unit, parameters, world_size: "mixed", "a str: a set of pairs (recipe, stage) was expected"),
        (lambda total, unit, parameters, world_size: {"mixed"}, "'mixed' among others: a pair (recipe, stage)"),
        (lambda total, unit, parameters, world_size: {("Mixed", 1)}, "the recipe 'Mixed': the names are 'all BF16', "),
        (lambda total, unit, parameters, world_size: {("mixed", 4)}, "the stage 4: 0, 1, 2 or 3 was expected"),
        (lambda total, unit, parameters, world_size: total / 0, "ZeroDivisionError"),
        (lambda total, unit: set(), "suspects is called as suspects(total, unit, parameters, world_size), and yours"),
    ],
)
def test_what_is_no_set_of_suspects_is_said_in_a_sentence(fn, says):
    assert says in refused("suspects", fn).headline


def not_written(*anything):
    raise NotImplementedError()


def never_ends(*anything):
    time.sleep(30)


@pytest.mark.parametrize(("name", "hint"), [("suspects", "two loops"), ("held", "how many rows does it own")])
def test_a_function_that_is_not_written_yet_is_helped_on(name, hint):
    report = refused(name, not_written)
    assert report.headline == f"{name}: not written yet" and hint in report.hint


def test_a_function_that_never_ends_is_stopped():
    assert "no result after 2 s" in refused("suspects", never_ends, timeout=2).headline


# ---------------------------------------------------------------- wrong answers to the second exercise


def ledger(
    layers, world_size, value_bytes, *, own=None, allocated=None, counter=4, whole=max, in_optimizer=None, **more
):
    """As the solution, with something changed."""
    own = own or (lambda rows, rank: max(0, min(-(-rows // world_size), rows - rank * -(-rows // world_size))))
    allocated = allocated or (lambda rows, rank: -(-rows // world_size))
    in_optimizer = in_optimizer or own
    each, moments = more.get("each", value_bytes), more.get("moments", 2)
    buffer_rows = more.get("buffer_rows", lambda rows: world_size * -(-rows // world_size))
    shapes = [shape for layer in layers for shape in layer]

    def total(rows_of, some=shapes):
        return each * sum(rows_of(shape[0]) * math.prod(shape[1:]) for shape in some)

    return [
        {
            "parameters": total(lambda rows, rank=rank: allocated(rows, rank)),
            "gradients": total(lambda rows, rank=rank: allocated(rows, rank)),
            "optimizer": moments * total(lambda rows, rank=rank: in_optimizer(rows, rank)) + counter * len(shapes),
            "gathered": whole(total(buffer_rows, layer) for layer in layers),
        }
        for rank in range(world_size)
    ]


def even_shares(layers, world_size, value_bytes):
    def share(rows, rank):
        return rows / world_size

    return ledger(layers, world_size, value_bytes, own=share, allocated=share)


def no_counters(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, counter=0)


def two_counters(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, counter=8)


def counters_in_bf16(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, counter=value_bytes)


def padded_optimizer(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, in_optimizer=lambda rows, rank: -(-rows // world_size))


def padded_optimizer_without_counters(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, in_optimizer=lambda rows, rank: -(-rows // world_size), counter=0)


def no_padding(layers, world_size, value_bytes):
    def own(rows, rank):
        return max(0, min(-(-rows // world_size), rows - rank * -(-rows // world_size)))

    return ledger(layers, world_size, value_bytes, own=own, allocated=own)


def rounded_down(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, allocated=lambda rows, rank: rows // world_size)


def spread_evenly(layers, world_size, value_bytes):
    def own(rows, rank):
        return rows // world_size + (rank < rows % world_size)

    return ledger(layers, world_size, value_bytes, in_optimizer=own)


def whole_model(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, allocated=lambda rows, rank: rows)


def all_gathered(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, whole=sum)


def gathered_without_padding(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, buffer_rows=lambda rows: rows)


def largest_is_first(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, whole=lambda sizes: list(sizes)[0])


def largest_is_last(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, whole=lambda sizes: list(sizes)[-1])


def nothing_gathered(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, buffer_rows=lambda rows: 0)


def one_moment_each(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, moments=1)


def always_fp32(layers, world_size, value_bytes):
    return ledger(layers, world_size, value_bytes, each=4)


@pytest.mark.parametrize(
    ("fn", "wrong", "hint"),
    [
        (even_shares, "parameters, gradients and optimizer are", "half a row is nobody's"),
        (no_counters, "optimizer is", "one thing more for every tensor"),
        (two_counters, "optimizer is", "two moments share it"),
        (padded_optimizer, "optimizer is", "the optimizer has none"),
        (padded_optimizer_without_counters, "optimizer is", "two things: "),
        (no_padding, "parameters and gradients are", "collectives want equal sizes"),
        (rounded_down, "parameters and gradients are", "some rows have no owner"),
        (spread_evenly, "optimizer is", "does not spread the rest evenly"),
        (whole_model, "parameters and gradients are", "that is the whole model"),
        (all_gathered, "gathered is", "freed after its forward"),
        (gathered_without_padding, "gathered is", "every rank sends its padding too"),
        (largest_is_last, "gathered is", "the largest layer, not to the last"),
        (nothing_gathered, "gathered is", "can't compute with a slice"),
        (one_moment_each, "optimizer is", "Adam keeps two moments"),
    ],
)
def test_a_wrong_prediction_is_told_what_the_ranks_have_more(fn, wrong, hint):
    report = refused("held", fn, world_sizes=(3,))
    assert f"held on 3 ranks, FP32: {wrong} not what the ranks hold" in report.headline
    assert hint in report.hint
    assert report.detail.startswith("layers = [[(")
    assert [row.cells[0] for row in report.rows] == ["parameters", "gradients", "optimizer", "gathered"]


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (counters_in_bf16, "a step counter is an FP32 number"),
        (always_fp32, "see value_bytes"),
        (largest_is_first, "the largest layer, not to the first"),
    ],
)
def test_what_holds_in_fp32_only_is_found_in_bf16(fn, hint):
    report = refused("held", fn, world_sizes=(2,))
    assert report.headline.startswith("held on 2 ranks, BF16: ") and hint in report.hint


def test_every_case_has_what_the_mistakes_differ_in():
    for world_size, seed in itertools.product(range(3, 9), range(40)):
        layers, value_bytes = layers_of(world_size, seed)
        right = ledger(layers, world_size, value_bytes)
        for wrong in (
            spread_evenly,
            no_padding,
            rounded_down,
            padded_optimizer,
            all_gathered,
            gathered_without_padding,
        ):
            assert wrong(layers, world_size, value_bytes) != right
        rows = [shape[0] for layer in layers for shape in layer]
        assert any((world_size - 1) * math.ceil(each / world_size) >= each for each in rows)  # the last rank has none


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda layers, world_size, value_bytes: None, "it returned None: is there a return at its end?"),
        (
            lambda layers, world_size, value_bytes: {"parameters": 0},
            "it returned a dict: a list of 2 dictionaries was expected, one for each rank",
        ),
        (lambda layers, world_size, value_bytes: [{}], "it returned a list of 1: a list of 2 dictionaries"),
        (lambda layers, world_size, value_bytes: [1, 2], "it returned a int for rank 0: a dictionary was expected"),
        (
            lambda layers, world_size, value_bytes: [{"parameters": 1, "gradient": 1}] * 2,
            "'parameters', 'gradient' for rank 0: the purposes are 'parameters', 'gradients', 'optimizer', 'gathered'",
        ),
        (
            lambda layers, world_size, value_bytes: [dict.fromkeys(PURPOSES, "8")] * 2,
            "a str for parameters of rank 0: a number of bytes was expected",
        ),
    ],
)
def test_what_is_no_ledger_is_said_in_a_sentence(fn, says):
    assert says in refused("held", fn, world_sizes=(2,)).headline


def test_every_cell_of_the_exercise_can_be_parsed():
    exercise = ROOT / "exercises" / "01_memory" / "01_memory.ipynb"
    for cell in json.loads(exercise.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), cell["id"], "exec")
