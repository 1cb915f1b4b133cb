"""Shapes of published models, their exact parameter counts, and the small GPT of the demos.

A `Model` lists its weights, tensor by tensor (`Weight`: name, shape, how tensor parallelism cuts it), and every count
is a sum over that list: of all parameters, of those that one token uses, of what one rank holds. The shapes are those
of the published configurations; the tests hold the sums against the published counts. Nothing here needs torch but
`small_gpt`, which imports it when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def _whole(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: a whole number was expected, not a {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value}: at least {least} was expected")
    return value


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, or `copies` equal ones (experts).

    Attributes:
        name: "query", "gate", ...
        part: what it belongs to: "embedding", "attention", "mlp", "router", "routing bias", "experts", "norms", "head".
        shape: as in torch, [out, in] for a matrix.
        cut: the dimension that tensor parallelism cuts; None if every rank of the group holds the tensor whole.
        most: into how many pieces it can be cut at most (key and value heads), 0 for any number.
        copies: how many there are of it; expert parallelism spreads them.

    >>> Weight("up", "mlp", (4096, 1024), cut=0).parameters
    4194304
    """

    name: str
    part: str
    shape: tuple[int, ...]
    cut: int | None = None
    most: int = 0
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Of all copies."""
        return math.prod(self.shape) * self.copies


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: `routed` experts of which `top_k` see a token, `shared` that see all.

    `dense_layers` first layers keep the dense MLP; `bias` is one number per routed expert that only the routing uses.

    >>> Experts(routed=8, top_k=2, ffn=14336).shared
    0
    """

    routed: int
    top_k: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0
    bias: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: the ranks of the compressed query and of the compressed key and value, and the sizes
    of a head's parts. Source: DeepSeek-AI 2024, arXiv 2412.19437, Section 2.1.1.

    >>> Latent(query=1536, key_value=512, nope=128, rope=64, value=128).rope
    64
    """

    query: int
    key_value: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Model:
    """The shape of a decoder-only transformer.

    Attributes:
        name: as in `model(name)`.
        layers, hidden, heads, ffn, vocabulary: sizes; `ffn` is the inner size of the (dense) MLP.
        sequence: tokens of the context that it was published with.
        kv_heads: heads of key and value (grouped-query attention); None for as many as `heads`.
        positions: rows of a learned position embedding; 0 for none (rotary).
        gpt: True for LayerNorm, biases, dropout and an MLP of 4 × hidden, two matrices with GELU between them; False
            for RMSNorm, no biases, no dropout and SwiGLU's three matrices.
        tied: the output head is the token embedding.
        experts, latent: where the MLP or the attention is another.
        source: of the shape.

    Raises:
        TypeError, ValueError: a size is no whole number of at least 1, `heads` does not divide `hidden` (without
            `latent`), `kv_heads` does not divide `heads`, or a GPT has an `ffn` that isn't 4 × hidden.

    >>> model("llama3-70b").parameters
    70553706496
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    sequence: int
    kv_heads: int | None = None
    positions: int = 0
    gpt: bool = False
    tied: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocabulary", "sequence", "kv_heads", "positions"):
            value = getattr(self, name)
            if not (name == "kv_heads" and value is None):
                _whole(name, value, least=0 if name == "positions" else 1)
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}: each key head serves as many query heads"
            )
        if self.latent is None and self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}: a head is a slice of hidden")

        if self.gpt and (self.ffn, self.groups, self.experts, self.latent) != (4 * self.hidden, self.heads, None, None):
            raise ValueError(
                f"gpt=True with ffn={self.ffn}: a GPT here has 4 × hidden, {4 * self.hidden}, and no variants"
            )

    @property
    def head_size(self) -> int:
        """hidden / heads."""
        return self.hidden // self.heads

    @property
    def groups(self) -> int:
        """Heads of key and value."""
        return self.kv_heads or self.heads

    def first_weights(self) -> tuple[Weight, ...]:
        """What stands before the layers: the embeddings."""
        weights = (Weight("token embedding", "embedding", (self.vocabulary, self.hidden), cut=0),)
        if self.positions:
            weights += (Weight("position embedding", "embedding", (self.positions, self.hidden)),)
        return weights

    def layer_weights(self, layer: int) -> tuple[Weight, ...]:
        """The weights of layer `layer`, counted from 0."""
        norms = ("norm 1", "norm 2")
        sparse = self.experts is not None and layer >= self.experts.dense_layers
        return (
            *(weight for name in norms for weight in self._norm(name)),
            *(self._latent_attention(self.latent) if self.latent else self._attention()),
            *(self._experts(self.experts) if sparse else self._mlp("mlp", self.ffn)),
        )

    def last_weights(self) -> tuple[Weight, ...]:
        """What stands after the layers: the final norm, and the head where it is not the embedding."""
        head = () if self.tied else (Weight("head", "head", (self.vocabulary, self.hidden), cut=0),)
        return (*self._norm("final norm"), *head)

    def weights(self) -> tuple[Weight, ...]:
        """All of them, in the order of the forward pass."""
        layers = (weight for layer in range(self.layers) for weight in self.layer_weights(layer))
        return (*self.first_weights(), *layers, *self.last_weights())

    @property
    def parameters(self) -> int:
        """All parameters.

        >>> model("gpt2-small").parameters
        124439808
        """
        return sum(weight.parameters for weight in self.weights())

    @property
    def active_parameters(self) -> int:
        """The parameters that a token is multiplied with: of the routed experts only `top_k`, and no routing bias, for
        that only chooses them. Both embeddings are counted.

        >>> model("mixtral-8x7b").active_parameters
        12879925248
        """
        if self.experts is None:
            return self.parameters
        terms = self.parameter_terms()
        idle = terms["experts"] // self.experts.routed * (self.experts.routed - self.experts.top_k)
        return self.parameters - idle - terms.get("routing bias", 0)

    def parameter_terms(self) -> dict[str, int]:
        """Parameters by part, in the order of the forward pass; shared experts count as "mlp".

        >>> model("gpt2-small").parameter_terms()
        {'embedding': 39383808, 'norms': 38400, 'attention': 28348416, 'mlp': 56669184}
        """
        terms: dict[str, int] = {}
        for weight in self.weights():
            terms[weight.part] = terms.get(weight.part, 0) + weight.parameters
        return terms

    def _norm(self, name: str, size: int = 0, part: str = "norms") -> tuple[Weight, ...]:
        shape = (size or self.hidden,)
        return (Weight(name, part, shape), Weight(f"{name} bias", part, shape))[: 2 if self.gpt else 1]

    def _attention(self) -> tuple[Weight, ...]:
        hidden, of_groups = self.hidden, self.groups * self.head_size
        bias = self.gpt
        return (
            *_linear("query", "attention", hidden, hidden, 0, bias, most=self.heads),
            *_linear("key", "attention", of_groups, hidden, 0, bias, most=self.groups),
            *_linear("value", "attention", of_groups, hidden, 0, bias, most=self.groups),
            *_linear("projection", "attention", hidden, hidden, 1, bias, most=self.heads),
        )

    def _latent_attention(self, latent: Latent) -> tuple[Weight, ...]:
        hidden, heads = self.hidden, self.heads
        return (
            Weight("query down", "attention", (latent.query, hidden)),
            *self._norm("query norm", latent.query, "attention"),
            Weight("query up", "attention", (heads * (latent.nope + latent.rope), latent.query), 0, heads),
            Weight("key and value down", "attention", (latent.key_value + latent.rope, hidden)),
            *self._norm("key and value norm", latent.key_value, "attention"),
            Weight("key and value up", "attention", (heads * (latent.nope + latent.value), latent.key_value), 0, heads),
            Weight("projection", "attention", (hidden, heads * latent.value), 1, heads),
        )

    def _mlp(self, part: str, ffn: int, copies: int = 1) -> tuple[Weight, ...]:
        if self.gpt:
            return (
                *_linear("up", part, ffn, self.hidden, 0, bias=True),
                *_linear("down", part, self.hidden, ffn, 1, bias=True),
            )
        return (
            Weight("gate", part, (ffn, self.hidden), 0, copies=copies),
            Weight("up", part, (ffn, self.hidden), 0, copies=copies),
            Weight("down", part, (self.hidden, ffn), 1, copies=copies),
        )

    def _experts(self, experts: Experts) -> tuple[Weight, ...]:
        bias = (Weight("routing bias", "routing bias", (experts.routed,)),) if experts.bias else ()
        return (
            Weight("router", "router", (experts.routed, self.hidden)),
            *bias,
            *self._mlp("experts", experts.ffn, copies=experts.routed),
            *(self._mlp("mlp", experts.ffn, copies=experts.shared) if experts.shared else ()),
        )


def _linear(name: str, part: str, out: int, into: int, cut: int, bias: bool, most: int = 0) -> tuple[Weight, ...]:
    """A matrix and its bias: cut by rows, the bias is cut with it; cut by columns, every rank holds the bias."""
    matrix = Weight(name, part, (out, into), cut, most)
    return (matrix, Weight(f"{name} bias", part, (out,), 0 if cut == 0 else None, most)) if bias else (matrix,)


def gpt(
    layers: int, hidden: int, heads: int, vocabulary: int, sequence: int, *, tied: bool = True, name: str = "gpt"
) -> Model:
    """A GPT: LayerNorm, biases, learned positions, an MLP of 4 × hidden with GELU.

    Raises:
        TypeError, ValueError: as for `Model`.

    Source: Brown et al. 2020, arXiv 2005.14165, Section 2.1; the count is Narayanan et al. 2021, arXiv 2104.04473,
    Eq. 2, and the 2 × hidden of the final LayerNorm, which that formula leaves out.

    >>> gpt(layers=2, hidden=64, heads=4, vocabulary=100, sequence=32).parameters
    108544
    """
    ffn = 4 * _whole("hidden", hidden)
    return Model(name, layers, hidden, heads, ffn, vocabulary, sequence, positions=sequence, gpt=True, tied=tied)


_GPT2 = "the configurations of openai-community/gpt2, gpt2-medium, gpt2-large and gpt2-xl"
_GPT3 = "Brown et al. 2020, arXiv 2005.14165, Table 2.1"
_LLAMA2 = "Touvron et al. 2023, arXiv 2307.09288, and the models' configurations"
_LLAMA3 = "Llama Team 2024, arXiv 2407.21783, Table 3; vocabulary 128,256 as in the configurations (128,000 there)"
_KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198, Table 3"


def _published() -> tuple[Model, ...]:
    gpts = {
        "gpt2-small": (12, 768, 12, 50257, 1024, _GPT2),
        "gpt2-medium": (24, 1024, 16, 50257, 1024, _GPT2),
        "gpt2-large": (36, 1280, 20, 50257, 1024, _GPT2),
        "gpt2-xl": (48, 1600, 25, 50257, 1024, _GPT2),
        "gpt3": (96, 12288, 96, 50257, 2048, _GPT3),
        "korthikanti-22b": (48, 6144, 64, 51200, 2048, _KORTHIKANTI),
        "korthikanti-175b": (96, 12288, 96, 51200, 2048, _KORTHIKANTI),
        "korthikanti-530b": (105, 20480, 128, 51200, 2048, _KORTHIKANTI),
        "korthikanti-1t": (128, 25600, 160, 51200, 2048, _KORTHIKANTI),
    }
    llamas = {
        "llama2-7b": (32, 4096, 32, 11008, 32000, 4096, 32, _LLAMA2),
        "llama2-13b": (40, 5120, 40, 13824, 32000, 4096, 40, _LLAMA2),
        "llama2-70b": (80, 8192, 64, 28672, 32000, 4096, 8, _LLAMA2),
        "llama3-8b": (32, 4096, 32, 14336, 128256, 8192, 8, _LLAMA3),
        "llama3-70b": (80, 8192, 64, 28672, 128256, 8192, 8, _LLAMA3),
        "llama3-405b": (126, 16384, 128, 53248, 128256, 8192, 8, _LLAMA3),
    }
    return (
        *(replace(gpt(*shape, name=name), source=source) for name, (*shape, source) in gpts.items()),
        *(Model(name, *shape, source=source) for name, (*shape, source) in llamas.items()),
        Model(
            "mixtral-8x7b", 32, 4096, 32, 14336, 32000, 32768, 8,
            experts=Experts(routed=8, top_k=2, ffn=14336),
            source="Jiang et al. 2024, arXiv 2401.04088, Table 1",
        ),
        Model(
            "deepseek-v3", 61, 7168, 128, 18432, 129280, 4096,
            experts=Experts(routed=256, top_k=8, ffn=2048, shared=1, dense_layers=3, bias=True),
            latent=Latent(query=1536, key_value=512, nope=128, rope=64, value=128),
            source="DeepSeek-AI 2024, arXiv 2412.19437, Section 4.2, without the multi-token-prediction module",
        ),
    )  # fmt: skip


MODELS = MappingProxyType({one.name: one for one in _published()})


def model(name: str) -> Model:
    """The published model of this name.

    Raises:
        TypeError, ValueError: there is no such model; the sentence lists the names.

    >>> model("gpt2-xl").hidden
    1600
    """
    if not isinstance(name, str):
        raise TypeError(f"model({name!r}): the name of a model was expected, such as 'llama3-70b'")
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r} here: choose one of {', '.join(MODELS)}, or make your own Model")
    return MODELS[name]


@dataclass(frozen=True)
class Run:
    """A published training run: a model and how it was laid out. `batch` counts sequences, over all ranks.

    >>> KORTHIKANTI["22B"].tensor_parallel
    8
    """

    model: Model
    tensor_parallel: int
    pipeline_parallel: int
    world_size: int
    batch: int
    microbatch: int
    source: str = _KORTHIKANTI


KORTHIKANTI = MappingProxyType(
    {
        "22B": Run(model("korthikanti-22b"), 8, 1, 8, 4, 4),
        "175B": Run(model("korthikanti-175b"), 8, 8, 64, 64, 1),
        "530B": Run(model("korthikanti-530b"), 8, 35, 280, 280, 1),
        "1T": Run(model("korthikanti-1t"), 8, 64, 512, 512, 1),
    }
)
# Parameter counts of Rajbhandari et al. 2020, arXiv 1910.02054, Figure 1 and Table 1
ZERO_SIZES = MappingProxyType({"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000})


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
