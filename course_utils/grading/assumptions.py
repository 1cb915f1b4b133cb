"""The first exercise of notebook 01: from a total, find every recipe and stage of ZeRO that it can be about.

The formulas are those of Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, Section 3.1; the claims of seed 0 are
published, each with its source, and those of other seeds are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from course_utils.grading.judged import Argument, Judged, Slip, calls
from course_utils.grading.reports import Report, Row
from course_utils.models import MODELS
from course_utils.world import World


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter.

    >>> Recipe(2, 2, moments=8, master=4).optimizer
    12
    """

    weights: Fraction | int
    gradients: Fraction | int
    moments: Fraction | int
    master: Fraction | int = 0

    @property
    def optimizer(self) -> Fraction | int:
        """What stage 1 cuts."""
        return self.moments + self.master


RECIPES = {
    "all BF16": Recipe(2, 2, moments=4),
    "BF16 with FP32 moments": Recipe(2, 2, moments=8),
    "all FP32": Recipe(4, 4, moments=8),
    "mixed": Recipe(2, 2, moments=8, master=4),
    "mixed, FP32 gradients": Recipe(2, 4, moments=8, master=4),
    "mixed, 8-bit moments": Recipe(2, 2, moments=2, master=4),
}
STAGES = (0, 1, 2, 3)
UNITS = {"GB": 10**9, "GiB": 2**30}
CLOSE = 0.01  # a claim is rounded: totals agree within one per cent

Suspect = tuple[str, int]


@dataclass(frozen=True)
class Claim:
    """What somebody says that one rank holds; `text` is how the report quotes it."""

    total: float
    unit: str
    parameters: int
    world_size: int
    source: str = ""

    @property
    def arguments(self) -> tuple[float, str, int, int]:
        return self.total, self.unit, self.parameters, self.world_size

    @property
    def text(self) -> str:
        ranks = "one rank" if self.world_size == 1 else f"{self.world_size:,} ranks"
        return f"{self.total:,g} {self.unit}, {self.parameters / 1e9:,.4g} billion parameters, {ranks}"


PUBLISHED = (
    Claim(1120, "GB", 70 * 10**9, 1, "16 bytes per parameter: Rajbhandari et al. 2020, Section 3.1"),
    Claim(560, "GB", 70 * 10**9, 1, "three more copies, all BF16, with the weights"),
    Claim(31.4, "GB", 7_500_000_000, 64, "Rajbhandari et al. 2020, Figure 1"),
    Claim(16.6, "GB", 7_500_000_000, 64, "Rajbhandari et al. 2020, Figure 1"),
    Claim(62.5, "GB", 10**12, 256, "Rajbhandari et al. 2020, Table 1"),
    Claim(
        700,
        "GB",
        70 * 10**9,
        1,
        "8-bit moments: Dettmers et al. 2022, with 16-bit weights and gradients and a master copy",
    ),
    Claim(1173, "GiB", 70 * 10**9, 1, "18 bytes: Megatron-LM, dist_optimizer.md, in GiB"),
)


def of_rank(recipe: Recipe, stage: int, parameters: int, world_size: int) -> Fraction:
    """Bytes of one rank: parameters, gradients and optimizer, cut by the stage of ZeRO.

    >>> float(of_rank(RECIPES["mixed"], 1, 7_500_000_000, 64) / 10**9)
    31.40625
    """
    share = Fraction(1, world_size)
    weights = recipe.weights * (share if stage >= 3 else 1)
    gradients = recipe.gradients * (share if stage >= 2 else 1)
    optimizer = recipe.optimizer * (share if stage >= 1 else 1)
    return parameters * (weights + gradients + optimizer)


def _search(claim: Claim, rank_bytes=of_rank, recipes=RECIPES, units=UNITS, close: float = CLOSE) -> set[Suspect]:
    total = Fraction(claim.total) * units[claim.unit]
    return {
        (name, stage)
        for name, recipe in recipes.items()
        for stage in STAGES
        if abs(rank_bytes(recipe, stage, claim.parameters, claim.world_size) / total - 1) <= close
    }


def suspects(claim: Claim) -> set[Suspect]:
    """Every recipe and stage of ZeRO that the claim can be about.

    >>> sorted(suspects(PUBLISHED[2]))    # ZeRO-1 of the paper's recipe and ZeRO-2 of another: 4 Ψ + 12 Ψ/N both
    [('all FP32', 2), ('mixed', 1)]
    """
    return _search(claim)


def claims(seed: int) -> list[Claim]:
    """The published claims for seed 0, and for any other claims about published models, drawn with it.

    None is on the border of the one per cent, so every way of computing gives the same answer.

    >>> len(claims(0)), len(claims(1))
    (7, 8)
    """
    if seed == 0:
        return list(PUBLISHED)
    draw = random.Random(f"claims {seed}")
    names = [name for name in sorted(MODELS) if MODELS[name].parameters > 10**9]
    found = []
    while len(found) < 8:
        parameters, world_size = MODELS[draw.choice(names)].parameters, draw.choice((1, 8, 24, 64, 256))
        recipe, stage = RECIPES[draw.choice(list(RECIPES))], draw.choice(STAGES)
        unit = ("GB", "GiB")[len(found) % 2]
        exact = of_rank(recipe, stage, parameters, world_size) / UNITS[unit]
        claim = Claim(float(f"{float(exact):.3g}"), unit, parameters, world_size)
        if _search(claim, close=0.008) == _search(claim, close=0.012) != set():
            found.append(claim)
    return found


def _recipes(change: Callable[[Recipe], Recipe]) -> dict[str, Recipe]:
    return {name: change(recipe) for name, recipe in RECIPES.items()}


def _all_cut(recipe: Recipe, stage: int, parameters: int, world_size: int) -> Fraction:
    return of_rank(recipe, 3 if stage else 0, parameters, world_size)


def _nothing_cut(recipe: Recipe, stage: int, parameters: int, world_size: int) -> Fraction:
    return of_rank(recipe, 0, parameters, world_size)


def _one_early(recipe: Recipe, stage: int, parameters: int, world_size: int) -> Fraction:
    return of_rank(recipe, min(stage + 1, 3) if stage else 0, parameters, world_size)


def _master_stays(recipe: Recipe, stage: int, parameters: int, world_size: int) -> Fraction:
    cut = of_rank(Recipe(recipe.weights, recipe.gradients, recipe.moments), stage, parameters, world_size)
    return cut + parameters * recipe.master * (Fraction(1, world_size) if stage == 3 else 1)


_SLIPS = (
    Slip(
        lambda claim: _search(claim, units={"GB": 10**9, "GiB": 10**9}),
        "every total in GB is right, those in GiB are not: how many bytes has one GiB?",
    ),
    Slip(
        lambda claim: _search(claim, units={"GB": 2**30, "GiB": 2**30}),
        "every total in GiB is right, those in GB are not: how many bytes has one GB?",
    ),
    Slip(
        lambda claim: _search(claim, units={"GB": 2**30, "GiB": 10**9}),
        "you have the two units the wrong way round: GB is a power of ten, GiB a power of two",
    ),
    Slip(
        lambda claim: _search(claim, recipes=_recipes(lambda r: Recipe(r.weights, r.gradients, r.moments))),
        "the mixed recipes come out 4 bytes per parameter too low: who updates the weights, and in which precision?",
    ),
    Slip(
        lambda claim: _search(claim, recipes=_recipes(lambda r: Recipe(r.weights, 0, r.moments, r.master))),
        "every recipe comes out too low by as much as its gradients: backward has to put them somewhere",
    ),
    Slip(
        lambda claim: _search(
            claim, recipes=_recipes(lambda r: Recipe(r.weights, r.gradients, Fraction(r.moments, 2), r.master))
        ),
        "Adam remembers two numbers for each parameter, and one of them is missing in your bytes",
    ),
    Slip(
        lambda claim: _search(claim, recipes=_recipes(lambda r: Recipe(0, r.gradients, r.moments, r.master))),
        "every recipe comes out too low by as much as its weights: a total is of all that the rank holds",
    ),
    Slip(
        lambda claim: _search(claim, rank_bytes=_all_cut),
        "you divide all bytes by the number of ranks, at every stage: what does stage 1 leave whole, and what stage 2?",
    ),
    Slip(
        lambda claim: _search(claim, rank_bytes=_nothing_cut),
        "your totals are the same at every stage: which of the three purposes does stage 1 divide by the ranks?",
    ),
    Slip(
        lambda claim: _search(claim, rank_bytes=_one_early),
        "each of your stages cuts one purpose too many: stage 1 cuts the optimizer only, stage 2 the gradients besides",
    ),
    Slip(
        lambda claim: _search(claim, rank_bytes=_master_stays),
        "stage 1 cuts all that the optimizer holds, and the master weights are the optimizer's",
    ),
    Slip(
        lambda claim: _search(claim, close=0),
        "claims are rounded: 31.4 is printed for 31.40625; two totals agree if they differ by at most one per cent",
    ),
)


def _examine_suspects(fn: Callable, world_sizes: Sequence[int], seed: int, timeout: float) -> Report:
    given = claims(seed)
    with World(1, timeout=timeout, device="cpu") as world:
        (answers,) = world.run(calls, fn, [claim.arguments for claim in given])
    for claim, answer in zip(given, answers):
        wrong = _no_suspects(answer)
        if wrong:
            return Report(False, f"suspects: for {claim.text}, it returned {wrong}")
    found = [{(name, int(stage)) for name, stage in answer} for answer in answers]
    right = [suspects(claim) for claim in given]
    rows = tuple(_verdict(*each) for each in zip(given, found, right))
    bad = sum(not row.ok for row in rows)
    if not bad:
        return Report(True, f"suspects is right on {len(given)} claims: every recipe and stage that fits, and no other")
    return Report(
        False,
        f"suspects: {bad} of {len(given)} claims are not right",
        ("claim", "your answer", "what is wrong"),
        rows,
        hint=_hint(given, found, right),
    )


def _no_suspects(answer) -> str:
    """What is wrong with the form of an answer; "" if nothing."""
    if answer is None:
        return "None: is there a return at its end?"
    if isinstance(answer, str | dict) or not isinstance(answer, Iterable):
        return f"a {type(answer).__name__}: a set of pairs (recipe, stage) was expected"
    for one in answer:
        if not isinstance(one, tuple | list) or len(one) != 2:
            return f"{one!r} among others: a pair (recipe, stage) was expected"
        name, stage = one
        if name not in RECIPES:
            return f"the recipe {name!r}: the names are {', '.join(map(repr, RECIPES))}"
        if isinstance(stage, bool) or stage not in STAGES:
            return f"the stage {stage!r}: 0, 1, 2 or 3 was expected"
    return ""


def _verdict(claim: Claim, found: set[Suspect], right: set[Suspect]) -> Row:
    innocent, missing = sorted(found - right), len(right - found)
    words = []
    if innocent:
        name, stage = innocent[0]
        total = float(of_rank(RECIPES[name], stage, claim.parameters, claim.world_size) / UNITS[claim.unit])
        words.append(f"{name}, stage {stage}, comes to {total:,.4g} {claim.unit}")
    if missing:
        words.append(f"{missing} of {len(right)} missing")
    return Row(not words, (claim.text, _listed(found), "; ".join(words)))


def _listed(found: set[Suspect]) -> str:
    stages = {name: [str(s) for n, s in sorted(found) if n == name] for name in RECIPES}
    return "; ".join(f"{name}: {', '.join(those)}" for name, those in stages.items() if those) or "nobody"


def _hint(given: list[Claim], found: list[set[Suspect]], right: list[set[Suspect]]) -> str:
    for slip in _SLIPS:
        if [slip.answer(claim) for claim in given] == found:
            return slip.hint
    if all(f < r or f == r for f, r in zip(found, right)) and all(len(f) <= 1 for f in found):
        return "you stop at the first that fits; a total may have several readings, and all are asked for"
    names = {name for f, r in zip(found, right) for name, _ in f ^ r}
    if len(names) == 1:
        return f"only {names.pop()!r} is not right: write down its bytes of weights, gradients, moments and master copy"
    if all(f == r for claim, f, r in zip(given, found, right) if claim.world_size == 1):
        return "on one rank all is right: what does each stage divide by the number of ranks, and what not?"
    return "take one claim and divide by hand: total in bytes / parameters, and compare with each recipe's bytes"


SUSPECTS = Judged(
    name="suspects",
    inputs=tuple(map(Argument, ("total", "unit", "parameters", "world_size"))),
    start="two loops, over recipes and over stages; for each the bytes of one rank, compared with the total in bytes",
    examine=_examine_suspects,
)
