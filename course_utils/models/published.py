"""The published models, and published training runs, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from .shapes import Experts, Latent, Model, gpt

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
