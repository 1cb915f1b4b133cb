"""Precisions and optimizers as data: bytes per parameter, each with its source. A new one is a new constant."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .checks import size, whole
from .value import Bytes


@dataclass(frozen=True)
class Precision:
    """Bytes per value in a training run.

    Attributes:
        name: for tables.
        parameters: of the weights that the forward pass uses.
        gradients: of the gradients that are accumulated and communicated.
        moments: of the numbers that an optimizer remembers.
        master: of the copy of the weights that the optimizer updates; 0 if it updates the weights themselves.
        master_gradients: of the copy of the gradients that the optimizer reads; 0 if it reads the gradients.
        activations: of the values that the forward pass keeps.
        source: who counts so.

    Raises:
        TypeError, ValueError: a field is no finite number of at least 0.

    >>> MIXED_BF16.master + 2 * MIXED_BF16.moments     # the K = 12 of the ZeRO paper
    12
    """

    name: str
    parameters: Bytes
    gradients: Bytes
    moments: Bytes
    master: Bytes = 0
    master_gradients: Bytes = 0
    activations: Bytes = 2
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "moments", "master", "master_gradients", "activations"):
            object.__setattr__(self, name, size(name, getattr(self, name)))


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer remembers for each parameter.

    Attributes:
        name: for tables.
        moments: values per parameter.
        bytes_per_moment: None for the precision's own.
        step_bytes: of a step counter per parameter tensor, as torch keeps it; the formulas leave it out.
        elsewhere: the optimizer of the parameters that are no matrix of a layer (embeddings, head, norms, biases); None
            for this one.
        source: of the count.

    Raises:
        TypeError, ValueError: `moments` or `step_bytes` is no whole number of at least 0.

    >>> ADAM.bytes_per_parameter(FP32), MOMENTUM.bytes_per_parameter(FP32)
    (8, 4)
    """

    name: str
    moments: int
    bytes_per_moment: Bytes | None = None
    step_bytes: int = 0
    elsewhere: Optimizer | None = None
    source: str = ""

    def __post_init__(self) -> None:
        whole("moments", self.moments, least=0)
        whole("step_bytes", self.step_bytes, least=0)
        if self.bytes_per_moment is not None:
            object.__setattr__(self, "bytes_per_moment", size("bytes_per_moment", self.bytes_per_moment))

    def bytes_per_parameter(self, precision: Precision) -> Bytes:
        """Bytes of the moments of one parameter; the master copies are the precision's, not the optimizer's.

        >>> ADAM.bytes_per_parameter(BF16), float(ADAM_8BIT.bytes_per_parameter(BF16))
        (4, 2.00390625)
        """
        each = precision.moments if self.bytes_per_moment is None else self.bytes_per_moment
        return size("bytes_per_parameter", self.moments * each)


_ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054, Section 3.1"
_MEGATRON = "NVIDIA Megatron-LM, docs/user-guide/features/dist_optimizer.md"

FP32 = Precision("FP32", 4, 4, 4, activations=4, source=_MEGATRON)
BF16 = Precision("BF16 for everything", 2, 2, 2, source="torch: optimizer state has its parameter's dtype")
BF16_FP32_MOMENTS = Precision("BF16, FP32 moments", 2, 2, 4, source="How to Scale Your Model, training")
MIXED_FP16 = Precision("FP16, FP32 master weights", 2, 2, 4, master=4, source=_ZERO)
MIXED_BF16 = Precision("BF16, FP32 master weights", 2, 2, 4, master=4, source=f"as with FP16: {_ZERO}")
MEGATRON_BF16 = Precision(
    "BF16, FP32 gradients and master weights", 2, 4, 4, master=4,
    source=f"{_MEGATRON}; Hugging Face transformers, Anatomy of Model's Memory, counts alike",
)  # fmt: skip
MEGATRON_FP16 = Precision(
    "FP16, FP32 master weights and gradients", 2, 2, 4, master=4, master_gradients=4, source=_MEGATRON
)

SGD = Optimizer("SGD", 0, source="torch.optim.SGD without momentum keeps nothing")
MOMENTUM = Optimizer("SGD with momentum", 1, source="torch.optim.SGD: momentum_buffer")
ADAM = Optimizer("Adam", 2, step_bytes=4, source="Kingma, Ba 2015, arXiv 1412.6980, Algorithm 1; torch.optim.Adam")
ADAM_8BIT = Optimizer(
    "8-bit Adam", 2,
    bytes_per_moment=1 + Fraction(4, 2048),  # and an FP32 scale for every block
    source="Dettmers et al. 2022, arXiv 2110.02861, Section 2.1: blocks of 2,048 values (later bitsandbytes: 256)",
)  # fmt: skip
MUON = Optimizer(
    "Muon", 1, elsewhere=ADAM,
    source="Liu et al. 2025, arXiv 2502.16982, Section 2; torch.optim.Muon: momentum_buffer of matrices, nothing else",
)  # fmt: skip
