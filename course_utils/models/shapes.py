"""`Model`: a list of weights, and the counts that are sums over it."""

from __future__ import annotations

import math
from dataclasses import dataclass


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

    >>> from course_utils.models import model
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

        >>> from course_utils.models import model
        >>> model("gpt2-small").parameters
        124439808
        """
        return sum(weight.parameters for weight in self.weights())

    @property
    def active_parameters(self) -> int:
        """The parameters that a token is multiplied with: of the routed experts only `top_k`, and no routing bias, for
        that only chooses them. Both embeddings are counted.

        >>> from course_utils.models import model
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

        >>> from course_utils.models import model
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
