"""Accelerators and the links between them: capacity, bandwidth and peak rate, each with where the figure was read.

They are a data sheet's numbers, which a program gets near to and never reaches. GB is 10⁹ bytes, and a card's name is
taken at its word: an "80 GB" H100 counts as 80e9 bytes here, while `nvidia-smi` and `torch.cuda` speak of GiB, 2³⁰
bytes, and the driver keeps some of what there is. Rates are dense: the bold number of a data sheet is often the one
with sparsity, twice as large.
"""

from __future__ import annotations

from dataclasses import dataclass

_VENDOR = "NVIDIA's figures as tabulated in stas00/ml-engineering (accelerators; intra-node and inter-node networking)"
_TUNER = "NVIDIA NCCL, src/graph/tuning.cc"


@dataclass(frozen=True)
class Link:
    """One GPU's link to others.

    Attributes:
        name: as it is sold.
        bytes_per_second: in one direction (data sheets of NVLink print the sum of both).
        latencies: seconds that NCCL's tuner adds for a message, by algorithm ("tree", "ring") and protocol ("LL",
            "LL128", "Simple"); empty where it has none.
        source: where the bandwidth was read.

    >>> NVLINK_H100.bytes_per_second / INFINIBAND_NDR.bytes_per_second    # leaving the node costs a factor of nine
    9.0
    """

    name: str
    bytes_per_second: float
    latencies: tuple[tuple[str, str, float], ...] = ()
    source: str = _VENDOR

    def latency(self, algorithm: str, protocol: str) -> float:
        """Seconds by NCCL's tuner.

        Raises:
            ValueError: there is no figure for this algorithm and protocol.

        Source: NVIDIA NCCL, `src/graph/tuning.cc`, the hardware latencies of NVLINK and NET.

        >>> NVLINK_H100.latency("ring", "Simple")
        3.4e-06
        """
        for known_algorithm, known_protocol, seconds in self.latencies:
            if (algorithm, protocol) == (known_algorithm, known_protocol):
                return seconds
        known = ", ".join(f"{a} with {p}" for a, p, _ in self.latencies) or "none"
        raise ValueError(f"{self.name} has no latency for {algorithm!r} with {protocol!r}: NCCL's tuner has {known}")


@dataclass(frozen=True)
class Accelerator:
    """What one accelerator has.

    Attributes:
        name: as it is sold.
        memory_bytes: of its own memory, by the name on the box (GB = 10⁹).
        memory_bytes_per_second: between that memory and the chip.
        fp16_flops, bf16_flops, fp8_flops: dense peak in operations per second (a multiply-add is two); None where the
            chip has no unit for the format.
        link: to the other GPUs of its node.
        source: where the figures were read.

    >>> 140e9 > H100.memory_bytes        # 70 B parameters in BF16 against an "80 GB" card
    True
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    fp16_flops: float
    bf16_flops: float | None
    fp8_flops: float | None
    link: Link
    source: str = _VENDOR

    def peak_flops(self, precision: str) -> float:
        """Dense peak in operations per second for "fp16", "bf16" or "fp8".

        Raises:
            ValueError: another precision, or one that this chip has no unit for.

        >>> A100.peak_flops("bf16")
        312000000000000.0
        """
        rates = {"fp16": self.fp16_flops, "bf16": self.bf16_flops, "fp8": self.fp8_flops}
        if rates.get(precision) is None:
            has = ", ".join(name for name, rate in rates.items() if rate is not None)
            raise ValueError(f"{self.name} has no peak rate for {precision!r}: it has {has}")
        return rates[precision]


def _tuner(tree: tuple[float, float, float], ring: tuple[float, float, float]) -> tuple[tuple[str, str, float], ...]:
    """Microseconds for LL, LL128 and Simple, as NCCL's table has them."""
    rows = (("tree", tree), ("ring", ring))
    return tuple(
        (algorithm, protocol, microseconds / 1e6)
        for algorithm, row in rows
        for protocol, microseconds in zip(("LL", "LL128", "Simple"), row)
    )


_NVLINK = _tuner(tree=(0.6, 1.25, 4.0), ring=(0.6, 1.9, 3.4))
_NET = _tuner(tree=(5.0, 8.5, 14.0), ring=(2.7, 4.0, 14.0))
_WITH_TUNER = f"{_VENDOR}; latencies: {_TUNER}"

NVLINK_V100 = Link("NVLink of a V100", 150e9, _NVLINK, _WITH_TUNER)
NVLINK_A100 = Link("NVLink of an A100", 300e9, _NVLINK, _WITH_TUNER)
NVLINK_H100 = Link("NVLink of an H100", 450e9, _NVLINK, _WITH_TUNER)
NVLINK_H200 = Link("NVLink of an H200", 450e9, _NVLINK, _WITH_TUNER)
NVLINK_B200 = Link("NVLink of a B200", 900e9, _NVLINK, _WITH_TUNER)

PCIE_4 = Link("PCIe 4.0 x16", 31e9)
PCIE_5 = Link("PCIe 5.0 x16", 63e9)
PCIE_6 = Link("PCIe 6.0 x16", 121e9)

# sold in Gbit/s, 8 of which are one GB/s
INFINIBAND_EDR = Link("InfiniBand EDR, 100 Gbit/s", 100e9 / 8, _NET, _WITH_TUNER)
INFINIBAND_HDR = Link("InfiniBand HDR, 200 Gbit/s", 200e9 / 8, _NET, _WITH_TUNER)
INFINIBAND_NDR = Link("InfiniBand NDR, 400 Gbit/s", 400e9 / 8, _NET, _WITH_TUNER)
INFINIBAND_XDR = Link("InfiniBand XDR, 800 Gbit/s", 800e9 / 8, _NET, _WITH_TUNER)

V100 = Accelerator("V100 SXM 32 GB", 32 * 10**9, 0.9e12, 125e12, None, None, NVLINK_V100)
A100 = Accelerator("A100 SXM 80 GB", 80 * 10**9, 2.0e12, 312e12, 312e12, None, NVLINK_A100)
H100 = Accelerator("H100 SXM 80 GB", 80 * 10**9, 3.35e12, 989e12, 989e12, 1979e12, NVLINK_H100)
H200 = Accelerator("H200 141 GB", 141 * 10**9, 4.8e12, 989e12, 989e12, 1979e12, NVLINK_H200)
B200 = Accelerator(
    "B200 180 GB",
    180 * 10**9,
    8.0e12,
    2250e12,
    2250e12,
    4500e12,
    NVLINK_B200,
    source=_VENDOR + "; its memory is printed as 180 and as 192 GB",
)

ACCELERATORS = (V100, A100, H100, H200, B200)
LINKS = (
    *(accelerator.link for accelerator in ACCELERATORS),
    PCIE_4,
    PCIE_5,
    PCIE_6,
    INFINIBAND_EDR,
    INFINIBAND_HDR,
    INFINIBAND_NDR,
    INFINIBAND_XDR,
)
