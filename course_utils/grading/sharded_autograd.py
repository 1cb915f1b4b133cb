"""The exercises of notebook 05: where the border between replicated and sharded runs, and what crossing it costs.

The first has three parts, which are checked one by one: f, g, and the module that has both.

The border and its two functions: Shoeybi et al., "Megatron-LM" (2019), section 3, the operators f and g of figure 3.
"""

from __future__ import annotations

import random

import torch.nn.functional as F
from torch import Tensor

from course_utils.gradients import Disease
from course_utils.grading.exercises import AllReduce, Evidence, Exercise, Input, Price, Sizes

_START = "begin with the single-process specification, and change only what a rank can't know from its own inputs"

# ---------------------------------------------------------------- 1: f, into the shards


def copy_to_parallel(x: Tensor) -> Tensor:
    """[1, rows, columns] -> the same, once on every rank; each rank goes on in its own way"""
    return x


def _operator_sizes(draw: random.Random) -> Sizes:
    return {"copy": 1, "term": 1, "sum": 1, "rows": draw.randint(2, 4), "columns": draw.randint(5, 7)}


def _numbers(sizes: Sizes) -> int:
    return sizes["rows"] * sizes["columns"]


def _copy_hint(evidence: Evidence) -> str:
    if evidence.stage == "forward":
        return "in forward f is the identity: each rank goes on with the x that it has"
    if evidence.stage == "price":
        if evidence.operations("forward"):
            return "x is the same on every rank before f and after it: what has forward to send?"
        return "adding up what all ranks have, for all of them, is a single collective"
    x = evidence.diagnosis["x"]
    if Disease.MISSING in x.diseases:
        return "what backward returns is the gradient of x: does it return one at its end, on every rank?"
    if x.k_name == "1/world_size":
        return "each rank has one term of the gradient: is what joins terms a sum or a mean?"
    if Disease.PARTIAL in x.diseases:
        return "each rank used x in its own way, and its grad is one term of x's gradient: who adds up the terms?"
    return "in backward the gradients of all ranks are added up, once, and every rank returns the sum"


COPY_TO_PARALLEL = Exercise(
    name="copy_to_parallel",
    inputs=(Input("x", ("copy", "rows", "columns")),),
    output=Input("output", ("copy", "rows", "columns"), sharded="copy"),
    specification=copy_to_parallel,
    sizes=_operator_sizes,
    hint=_copy_hint,
    price=Price(backward=AllReduce(_numbers, "rows · columns")),
    written="CopyToParallel.apply",
)

# ---------------------------------------------------------------- 1: g, out of them


def reduce_from_parallel(x: Tensor) -> Tensor:
    """One term [1, rows, columns] on each rank -> their sum [1, rows, columns]; all ranks go on alike"""
    return x.sum(dim=0, keepdim=True)


def _reduce_hint(evidence: Evidence) -> str:
    if evidence.stage == "forward":
        found = evidence.diagnosis["output"].diseases
        if Disease.SCALED in found:
            return "g gives the sum of the terms, not their mean"
        return "after g every rank has the sum of all ranks' terms"
    if evidence.stage == "price":
        if len(evidence.operations("forward")) > 1 or set(evidence.operations("forward")) - {"all_reduce"}:
            return "adding up what all ranks have, for all of them, is a single collective"
        return "what arrives in backward is the same on every rank: what could a rank learn from the others?"
    x = evidence.diagnosis["x"]
    if Disease.MISSING in x.diseases:
        return "what backward returns is the gradient of x: does it return one at its end, on every rank?"
    return (
        "every rank computes the same loss from the sum, so the same gradient of the sum arrives on each; and with "
        "which factor did this rank's term go into the sum?"
    )


REDUCE_FROM_PARALLEL = Exercise(
    name="reduce_from_parallel",
    inputs=(Input("x", ("term", "rows", "columns"), sharded="term"),),
    output=Input("output", ("sum", "rows", "columns")),
    specification=reduce_from_parallel,
    sizes=_operator_sizes,
    hint=_reduce_hint,
    price=Price(forward=AllReduce(_numbers, "rows · columns")),
    written="ReduceFromParallel.apply",
)

# ---------------------------------------------------------------- 1: a classifier that pools over sharded tokens


def pooled_logits(x: Tensor, up: Tensor, head: Tensor) -> Tensor:
    """[batch, tokens, hidden], [hidden, features], [features, classes] -> [batch, classes]"""
    return F.gelu(x @ up).mean(dim=1) @ head


def _pooled_sizes(draw: random.Random) -> Sizes:
    """All different. So many tokens that to gather them is dearer than the price, and more classes than samples."""
    hidden = draw.randint(7, 9)
    return {
        "batch": draw.randint(2, 4),
        "tokens": draw.randint(13, 16),
        "hidden": hidden,
        "features": hidden + draw.randint(1, 3),
        "classes": draw.randint(5, 6),
    }


def _pooled_hint(evidence: Evidence) -> str:
    if evidence.stage == "forward":
        found = evidence.diagnosis["output"].diseases
        if Disease.PARTIAL in found:
            return "each rank has pooled its own tokens only: what must be added up over the ranks before head sees it?"
        if Disease.SCALED in found:
            return "the mean is over the tokens of the whole sequence: how many are there, and how many has one rank?"
        return "write down the shape of every intermediate result, and beside it: whole, sharded, or one term of a sum?"
    if evidence.stage == "price":
        if set(evidence.operations("forward")) - {"all_reduce"}:
            return (
                "the sequence is too long for one rank, so no rank should ever have all of it: what is the smallest "
                "thing that the ranks have to tell each other before head sees it?"
            )
        if evidence.operations("backward") not in ([], ["all_reduce"]):
            return (
                "only a gradient of which each rank has one term needs to be added up: what else is added up in your "
                "backward, and could what it meets have been the same on every rank?"
            )
        return "what is the smallest tensor that has to cross each border, and how often does it cross?"
    x, up, head = (evidence.diagnosis[name] for name in ("x", "up", "head"))
    if Disease.MISSING in x.diseases:
        return "somewhere between x and the logits the graph is cut: a collective that has no backward does that"
    if Disease.SCALED in x.diseases:
        return (
            "every rank computes the same loss from the same logits, so what flows back to the pooled features is the "
            "whole gradient already, on every rank: should the backward of a sum over ranks add it up once more?"
        )
    if not x.healthy:
        return "a rank's tokens meet nobody else's before the pooling: nothing needs to be added to their gradient"
    if Disease.PARTIAL in up.diseases:
        return "up is whole on every rank but meets only that rank's tokens: who adds up the terms of its gradient?"
    if not up.healthy:
        return "follow up.grad back through your function: how often do the ranks add it up, and how often must they?"
    if Disease.SCALED in head.diseases:
        return "what head meets is the same on every rank: is its gradient there one term of a sum, or all of it?"
    return "ask of each tensor whether what it meets is the same on every rank: if it is, its gradient is already whole"


POOLED_LOGITS = Exercise(
    name="pooled_logits",
    inputs=(
        Input("x", ("batch", "tokens", "hidden"), sharded="tokens"),
        Input("up", ("hidden", "features")),
        Input("head", ("features", "classes")),
    ),
    output=Input("output", ("batch", "classes")),
    specification=pooled_logits,
    sizes=_pooled_sizes,
    hint=_pooled_hint,
    price=Price(
        forward=AllReduce(lambda sizes: sizes["batch"] * sizes["features"], "batch · features"),
        backward=AllReduce(lambda sizes: sizes["hidden"] * sizes["features"], "hidden · features"),
    ),
    start=_START,
)

# ---------------------------------------------------------------- 2: a modulated norm, with one collective


def modulated_norm(x: Tensor, gain: Tensor, cond: Tensor, weight: Tensor) -> Tensor:
    """[batch, tokens, hidden], [hidden], [batch, cond_dim], [cond_dim, 2 * hidden] -> [batch, tokens, hidden]"""
    scale, shift = (cond @ weight)[:, None].chunk(2, dim=-1)
    return x + F.rms_norm(x, x.shape[-1:]) * gain * (1 + scale) + shift


def _modulated_sizes(draw: random.Random) -> Sizes:
    batch, tokens, hidden = draw.randint(2, 3), draw.randint(2, 4), draw.randint(6, 10)
    cond_dim = batch + draw.randint(2, 4)  # more than batch: the modulation is smaller than what it is made of
    return {"batch": batch, "tokens": tokens, "hidden": hidden, "cond_dim": cond_dim, "2 * hidden": 2 * hidden}


def _modulated_hint(evidence: Evidence) -> str:
    if evidence.stage == "forward":
        return "forward needs nothing from the other ranks: apply the specification to this rank's tokens"
    x, gain, cond, weight = (evidence.diagnosis[name] for name in ("x", "gain", "cond", "weight"))
    if evidence.stage == "price":
        if evidence.operations("forward"):
            return "the output stays sharded, and no rank needs another's tokens: what has forward to send?"
        if len(evidence.operations("backward")) > 1:
            return (
                "gain, cond and weight meet each other before any of them meets a token: how far can you compute "
                "before the border, and can all that crosses it travel as one tensor?"
            )
        return "one collective it is: now look for the place where what has to cross the border is smallest"
    if not x.healthy:
        return "a rank's tokens are used on this rank alone: nobody else has a term of their gradient"
    replicated = {"gain": gain, "cond": cond, "weight": weight}
    partial = [name for name, verdict in replicated.items() if Disease.PARTIAL in verdict.diseases]
    if partial:
        *most, last = partial
        names = f"{', '.join(most)} and {last} are" if most else f"{last} is"
        return f"{names} whole on every rank but met only this rank's tokens: on which side of the border is that?"
    if any(verdict.k_name == "1/world_size" for verdict in replicated.values()):
        return "each rank has one term of these gradients: is what joins terms a sum or a mean?"
    if any(Disease.SCALED in verdict.diseases for verdict in replicated.values()):
        return "the ranks' terms are to be added up once: how often does each gradient cross a border on its way back?"
    return "one border: on one side what every rank computes alike, on the other what is computed from its own tokens"


MODULATED_NORM = Exercise(
    name="modulated_norm",
    inputs=(
        Input("x", ("batch", "tokens", "hidden"), sharded="tokens"),
        Input("gain", ("hidden",)),
        Input("cond", ("batch", "cond_dim")),
        Input("weight", ("cond_dim", "2 * hidden")),
    ),
    output=Input("output", ("batch", "tokens", "hidden"), sharded="tokens"),
    specification=modulated_norm,
    sizes=_modulated_sizes,
    hint=_modulated_hint,
    price=Price(backward=AllReduce(lambda sizes: 2 * sizes["batch"] * sizes["hidden"], "2 · batch · hidden")),
    start=_START,
)

EXERCISES = (COPY_TO_PARALLEL, REDUCE_FROM_PARALLEL, POOLED_LOGITS, MODULATED_NORM)
