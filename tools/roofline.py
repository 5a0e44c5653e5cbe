"""What the arithmetic of a step needs at least: operations and bytes, and the time they take on a machine's peaks.

Counted: matrix products with weights, attention over cache and text, and the bytes of weights, cache and text that are
read or written once. Left out: norms, activations between operators, sampling. So the time is a floor, not a forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toprovar.runtime.manifest import COMPUTE_DTYPES, DTYPE_BYTES, Manifest, Step
from toprovar.runtime.weights import StoredTensor

PRODUCTS = ("qkv", "proj", "cross_q", "cross_proj", "fc1", "fc2")  # of a layer, for every token that runs


@dataclass(frozen=True)
class Work:
    flops: int
    bytes: int

    def floor_ms(self, peak_tflops: float, peak_gbps: float) -> float:
        """The longer of computing and moving, at the machine's peaks."""
        return max(self.flops / (peak_tflops * 1e9), self.bytes / (peak_gbps * 1e6))


def step_work(manifest: Manifest, weights: Mapping[str, StoredTensor], step: Step) -> Work | None:
    """Of one run of a step, or None where its weights go by names that are not known here."""
    rows = step.images * (2 if step.guided else 1)
    width, tokens = manifest.model.width, manifest.text.tokens if manifest.text else 0
    item = DTYPE_BYTES[COMPUTE_DTYPES[manifest.compute]]
    needed = [f"layers.{layer}.{part}" for layer in range(manifest.model.layers) for part in PRODUCTS]
    if not all(name in weights for name in (*needed, "head", "word_embed")):
        return None
    flops = size = 0
    for layer, (count, past) in enumerate(zip(step.counts, step.past, strict=True)):
        if not count:
            continue
        for part in PRODUCTS:
            inputs, outputs = weights[f"layers.{layer}.{part}"].shape
            flops += 2 * rows * count * inputs * outputs
            size += weights[f"layers.{layer}.{part}"].size_bytes
        flops += 4 * rows * count * (past + count + tokens) * width
        size += 2 * rows * (past + 2 * count + tokens) * width * item  # keys and values: read, and the new ones written
    for name in ("head", "word_embed"):
        inputs, outputs = weights[name].shape
        flops += 2 * rows * step.tokens * inputs * outputs
        size += weights[name].size_bytes
    return Work(flops, size)
