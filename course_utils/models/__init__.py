"""Shapes of published models, their exact parameter counts, and the small GPT of the demos.

A `Model` lists its weights, tensor by tensor (`Weight`: name, shape, how tensor parallelism cuts it), and every count
is a sum over that list: of all parameters, of those that one token uses, of what one rank holds. The shapes are those
of the published configurations; the tests hold the sums against the published counts. Nothing here needs torch but
`small_gpt`, which imports it when it is called.

Modules: `shapes` (a model and its counts), `published` (models and training runs, each with its source), `small` (the
small GPT).
"""

from __future__ import annotations

from .published import KORTHIKANTI, MODELS, ZERO_SIZES, Run, model
from .shapes import Experts, Latent, Model, Weight, gpt
from .small import small_gpt

__all__ = [
    "KORTHIKANTI", "MODELS", "ZERO_SIZES", "Experts", "Latent", "Model", "Run", "Weight", "gpt", "model", "small_gpt",
]  # fmt: skip
