"""What GPUs can do at best, as their makers publish it. Nothing runs this fast: it is the roof of a roofline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuPeaks:
    """tflops: of bf16 matrix products with fp32 sums, without sparsity; gbps: memory bandwidth, 1e9 bytes per second;
    memory_gb: 1e9 bytes."""

    label: str
    tflops: float
    gbps: float
    memory_gb: float


# NVIDIA's data sheets (H200 and H100 SXM5; A100 80 GB SXM4; L40S) and the Ada architecture white paper (RTX 4090).
# Where a sheet gives the number with sparsity, half of it.
GPUS = {
    "h200": GpuPeaks("H200 SXM", 989.5, 4800, 141),
    "h100": GpuPeaks("H100 SXM", 989.5, 3350, 80),
    "a100": GpuPeaks("A100 80 GB SXM", 312, 2039, 80),
    "l40s": GpuPeaks("L40S", 362.05, 864, 48),
    "rtx4090": GpuPeaks("RTX 4090", 165.2, 1008, 24),
}
