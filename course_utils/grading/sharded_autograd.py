"""The two exercises of notebook 05: where the border between replicated and sharded runs, and what crossing it costs.

The border and its two functions: Shoeybi et al., "Megatron-LM" (2019), section 3, the operators f and g of figure 3.
"""

from __future__ import annotations

import random

import torch.nn.functional as F
from torch import Tensor

from course_utils.gradients import Disease
from course_utils.grading.exercises import Evidence, Exercise, Input, Price, Sizes

# ---------------------------------------------------------------- 1: a classifier that pools over sharded tokens


def pooled_logits(x: Tensor, up: Tensor, head: Tensor) -> Tensor:
    """[batch, tokens, hidden], [hidden, features], [features, classes] -> [batch, classes]"""
    return F.gelu(x @ up).mean(dim=1) @ head


def _pooled_sizes(draw: random.Random) -> Sizes:
    return {
        "batch": draw.randint(2, 4),
        "tokens": draw.randint(2, 5),
        "hidden": draw.randint(5, 9),
        "features": draw.randint(6, 10),
        "classes": draw.randint(3, 6),
    }


def _pooled_hint(evidence: Evidence) -> str:
    if evidence.stage == "forward":
        found = evidence.diagnosis["output"].diseases
        if Disease.PARTIAL in found:
            return "each rank has pooled its own tokens only: what must be added up over the ranks before head sees it?"
        if Disease.SCALED in found:
            return "the mean is over the tokens of the whole sequence: how many are there, and how many has one rank?"
        return "write down the shape of every intermediate result, and beside it: whole, sharded, or one term of a sum?"
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
        if any(phase == "forward" for phase, _ in evidence.counted):
            return "the output stays sharded, and no rank needs another's tokens: what has forward to send?"
        if len(evidence.counted) > 1:
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
    price=Price(lambda sizes: 2 * sizes["batch"] * sizes["hidden"], "2 · batch · hidden numbers"),
)

EXERCISES = (POOLED_LOGITS, MODULATED_NORM)
