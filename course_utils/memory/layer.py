"""The layer that the formulas of `activations` are about, as a torch module: Korthikanti et al. 2022, Figures 2 and 3.

Needs torch. One deviation: where the paper's layer has its mask inside a fused softmax, `unfused_attention` fills in
minus infinity, and autograd keeps the mask for it (a named term of `torch_terms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import gelu, scaled_dot_product_attention

from .checks import whole

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def unfused_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Causal attention with all its scores; the three tensors and the result are [batch, heads, sequence, size].

    >>> unfused_attention(*torch.ones(3, 1, 2, 4, 8), dropout=0.0).shape
    torch.Size([1, 2, 4, 8])
    """
    # scores and weights are [batch, heads, sequence, sequence]
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(later, -math.inf)
    weights = scores.softmax(-1)
    weights = drop(weights, dropout)
    return weights @ value


def fused_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Causal attention by torch's `scaled_dot_product_attention`, which keeps no scores where it has a flash kernel.

    On the CPU it has none for dropout: then it computes, and keeps, all scores in float32.

    >>> fused_attention(*torch.ones(3, 1, 2, 4, 8), dropout=0.0).shape
    torch.Size([1, 2, 4, 8])
    """
    return scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)


def transformer_layer(
    hidden: int,
    heads: int,
    *,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    attention: Attention = unfused_attention,
) -> nn.Module:
    """A transformer layer as in the paper; it maps [batch, sequence, hidden] to the same.

    LayerNorm, attention, dropout, added to the input; LayerNorm, an MLP of 4 × hidden with GELU, dropout, added again.

    Args:
        dropout: probability after the attention and after the MLP.
        attention_dropout: probability for the attention's weights; None for the same.
        attention: `unfused_attention`, `fused_attention`, or your own function of query, key, value and dropout.

    Raises:
        TypeError, ValueError: a size is no whole number of at least 1, `heads` does not divide `hidden`, or a
            probability is not between 0 and 1.

    >>> sum(p.numel() for p in transformer_layer(hidden=64, heads=4).parameters())    # 12 h² + 13 h
    49984
    """
    if whole("hidden", hidden) % whole("heads", heads):
        raise ValueError(f"heads={heads} does not divide hidden={hidden}: a head is a slice of hidden")
    attention_dropout = dropout if attention_dropout is None else attention_dropout
    for name, value in (("dropout", dropout), ("attention_dropout", attention_dropout)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"{name}={value!r}: a probability of at least 0 and below 1 was expected")
    if not callable(attention):
        raise TypeError(f"attention={attention!r}: a function of query, key, value and dropout was expected")
    return Layer(hidden, heads, dropout, attention_dropout, attention)


class Layer(nn.Module):
    """What `transformer_layer` makes.

    >>> Layer(8, 2, 0.0, 0.0, unfused_attention)(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, hidden: int, heads: int, dropout: float, attention_dropout: float, attention: Attention):
        super().__init__()
        self.heads, self.dropout, self.attention_dropout = heads, dropout, attention_dropout
        self.attention = attention
        self.norm_1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # one operation a line: `saved_bytes` names lines
        batch, sequence, hidden = x.shape
        normed = self.norm_1(x)
        qkv = self.qkv(normed)  # [batch, sequence, 3 * hidden]
        by_head = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.split(hidden, dim=-1))
        mixed = self.attention(*by_head, self.attention_dropout if self.training else 0.0)
        mixed = mixed.transpose(1, 2).reshape(batch, sequence, hidden)
        out = self.projection(mixed)
        out = drop(out, self.dropout, self.training)
        x = x + out
        normed = self.norm_2(x)
        inner = self.up(normed)
        inner = gelu(inner)
        out = self.down(inner)
        out = drop(out, self.dropout, self.training)
        return x + out
