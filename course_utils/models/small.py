"""The small GPT of the demos, in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from .shapes import Model, gpt

if TYPE_CHECKING:
    from torch import Tensor, nn


def small_gpt(
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    sequence: int,
    *,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None,
    tied: bool = True,
) -> nn.Module:
    """The GPT of the demos: maps tokens [batch, tokens] to logits [batch, tokens, vocabulary]; tokens ≤ sequence.

    Its modules are `token`, `position`, `layers` (a ModuleList of `course_utils.memory.transformer_layer`), `norm` and
    `head`. It has exactly `gpt(layers, hidden, heads, vocabulary, sequence, tied=tied).parameters` parameters.

    Args:
        dropout: probability after the embeddings, each attention and each MLP.
        attention_dropout, attention: as for `transformer_layer`; None for the fused attention.

    Raises:
        TypeError, ValueError: as for `transformer_layer` and `Model`.

    Source: the architecture is GPT-2's, in the order of Brown et al. 2020, Section 2.1.

    >>> sum(p.numel() for p in small_gpt(layers=2, hidden=64, heads=4, vocabulary=100, sequence=32).parameters())
    108544
    """
    from course_utils.memory.layer import fused_attention, transformer_layer

    shape = gpt(layers, hidden, heads, vocabulary, sequence, tied=tied)
    options = {"attention_dropout": attention_dropout, "attention": attention or fused_attention}
    blocks = [transformer_layer(hidden, heads, dropout=dropout, **options) for _ in range(layers)]
    return _gpt_module()(shape, blocks, dropout)


@cache
def _gpt_module() -> type:
    """The module's class, made when it is first needed, because its base class is torch's."""
    import torch
    from torch import nn

    class GPT(nn.Module):
        def __init__(self, shape: Model, layers: list[nn.Module], dropout: float):
            super().__init__()
            self.dropout = dropout
            self.token = nn.Embedding(shape.vocabulary, shape.hidden)
            self.position = nn.Embedding(shape.positions, shape.hidden)
            self.layers = nn.ModuleList(layers)
            self.norm = nn.LayerNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
            for embedding in (self.token, self.position, self.head):
                nn.init.normal_(embedding.weight, std=0.02)  # with the default of 1, tied logits would be huge
            if shape.tied:
                self.head.weight = self.token.weight

        def forward(self, tokens: Tensor) -> Tensor:
            places = torch.arange(tokens.size(1), device=tokens.device)
            x = self.token(tokens) + self.position(places)  # [batch, tokens, hidden]
            x = nn.functional.dropout(x, self.dropout, self.training)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    return GPT
