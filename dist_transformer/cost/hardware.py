"""Makers' data of the GPUs that a run can be planned for.

Rates are for dense matrices, without sparsity. Memory is the amount that torch reports, rounded down. `node_gbit` is
the network of the maker's own server (DGX) if there is one, otherwise a guess; --network-gbit overrides it.
"""

import re
from dataclasses import dataclass

from dist_transformer.base.errors import UserError
from dist_transformer.config.schema import require, require_positive

ENOUGH = 0.95
"""Share of the best speed that counts as the same: the model of speed is not more exact."""
MFU = 0.33
"""Default share of the GPU's peak: the value of NVIDIA's DeepLearningExamples with `big` on one A100 (its MLPerf v0.7
submission: 0.41). This project reached 0.32 on one H100, and 0.38 compiled (2026-11-23,
`results/speed/gpu-check-h100.json`). Small models reach less."""

LINK_LATENCY, NETWORK_LATENCY = 5e-6, 15e-6
"""Seconds per small message between two GPUs of a node, and between two nodes: round figures, not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The machines of the run."""

    nodes: int = 1
    """Number of machines."""
    gpus: int = 1
    """GPUs per node, one process each; with --gpu cpu, processes per node."""
    gpu: str = "h100"
    """Kind of GPU; an unknown name lists the known ones. cpu: predict memory only."""
    network_gbit: float | None = None
    """Network of a node in Gbit/s, one way; default: that of the GPU maker's server."""
    job_hours: float = 24.0
    """Longest job in hours that the scheduler allows."""
    mfu: float = MFU
    """Assumed share of the GPU's peak that training reaches."""

    def __post_init__(self) -> None:
        require_positive(self, "nodes", "gpus", "job_hours", "network_gbit")
        require(0 < self.mfu <= 1, "mfu", self.mfu, "it must be a share of the peak, above 0 and at most 1")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus

    @property
    def is_one_gpu(self) -> bool:
        """Whether nothing is described but a single GPU and its share of the peak."""
        return self == Cluster(gpu=self.gpu, mfu=self.mfu)


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A row of the table of GPUs."""

    memory_gib: float
    bf16_tflops: float | None
    """Rate in bf16 with fp32 sums; None: the GPU has no bf16."""
    fp32_tflops: float
    """Rate outside the matrix units."""
    memory_gb_per_second: float
    link_gb_per_second: float
    """Rate to the other GPUs of the node, one way: half of NVLink's advertised rate, or PCI Express."""
    node_gbit: float
    """Network of a node, one way."""

    def tflops(self, precision: str) -> float | None:
        """Return the peak rate; None: the GPU lacks the precision."""
        return self.bf16_tflops if precision == "bf16" else self.fp32_tflops


# Memory in GiB, TFLOP/s in bf16 and in fp32, GB/s of the memory and of a link, Gbit/s of a node.
GPUS = {
    # NVIDIA HGX B200 and DGX B200 datasheets, an eighth of each; 8 x 400 Gbit/s.
    "b200": GpuKind(178, 2250, 75, 8000, 900, 3200),
    # NVIDIA H200 and H100 (SXM) datasheets; DGX H100: 8 x 400 Gbit/s.
    "h200": GpuKind(139, 989, 67, 4800, 450, 3200),
    "h100": GpuKind(79, 989, 67, 3350, 450, 3200),
    # NVIDIA A100 (SXM) datasheet; DGX A100: 8 x 200 Gbit/s.
    "a100-80": GpuKind(79, 312, 19.5, 2039, 300, 1600),
    "a100-40": GpuKind(39, 312, 19.5, 1555, 300, 1600),
    # NVIDIA L40S datasheet; PCI Express 4.0 x16.
    "l40s": GpuKind(44, 362, 91.6, 864, 32, 200),
    # NVIDIA A10 datasheet; PCI Express 4.0 x16.
    "a10": GpuKind(22, 125, 31.2, 600, 32, 100),
    # NVIDIA V100 (SXM2) datasheet; DGX-1: 4 x 100 Gbit/s.
    "v100-32": GpuKind(31, None, 15.7, 900, 150, 400),
    "v100-16": GpuKind(15, None, 15.7, 900, 150, 400),
    # NVIDIA Ada and Ampere GA102 whitepapers; PCI Express 4.0 x16.
    "rtx4090": GpuKind(23, 165, 82.6, 1008, 32, 10),
    "rtx3090": GpuKind(23, 71, 35.6, 936, 32, 10),
}
CPU = "cpu"


def gpu_kind(name: str, precision: str) -> GpuKind | None:
    """Look up a kind of GPU; return None for `cpu`.

    Raises:
        UserError: the GPU is unknown, or does not support the precision.
    """
    if name == CPU:
        return None
    if name not in GPUS:
        raise UserError(f"--gpu {name} is unknown: choose one of {', '.join(GPUS)}, or {CPU}")
    kind = GPUS[name]
    if kind.tflops(precision) is None:
        raise UserError(f"--gpu {name} has no bf16: plan and train with --precision fp32, or choose another GPU")
    return kind


def peak_flops(described: str, precision: str) -> float | None:
    """Look up the operations per second of a device by torch's name; None if the table lacks it."""
    name = kind_of_device(described)
    tflops = GPUS[name].tflops(precision) if name else None
    return tflops and tflops * 1e12


def kind_of_device(described: str) -> str | None:
    """Find the table's name of a device by torch's name: `NVIDIA H100 80GB HBM3, 79 GiB` → `h100`."""
    words = re.findall(r"[a-z0-9]+", described.lower().replace("rtx ", "rtx"))
    exact = [name for name in GPUS if name in words]
    if exact:
        return exact[0]
    # Members of one family differ by memory.
    families = [name for name in GPUS if name.partition("-")[0] in words]
    size = described.rpartition(", ")[2].removesuffix(" GiB")
    fitting = [name for name in families if size.isdigit() and GPUS[name].memory_gib <= int(size)]
    return max(fitting, key=lambda name: GPUS[name].memory_gib, default=None)
