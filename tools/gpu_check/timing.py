"""Warm times with one boundary: the loop over all scales, sampling included; text, prompt and decoder apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def summary(samples_ms: list[float]) -> dict[str, Any]:
    """Median, p90 (nearest rank) and count, with the samples."""
    ordered = sorted(samples_ms)
    return {
        "median_ms": statistics.median(ordered),
        "p90_ms": ordered[max(0, -(-9 * len(ordered) // 10) - 1)],
        "count": len(ordered),
        "samples_ms": samples_ms,
    }


def time_pipeline(
    pipeline: Any, rows: np.ndarray, variant: str, runs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """First call apart; then `runs` warm ones."""
    begin = time.perf_counter()
    pipeline.generate(None, 0, variant, text_rows=rows)
    first_ms = (time.perf_counter() - begin) * 1e3
    say(f"  {variant}: first call {first_ms:.0f} ms")
    totals, walls, scales = [], [], []
    for i in range(runs):
        begin = time.perf_counter()
        result = pipeline.generate(None, i, variant, text_rows=rows)
        walls.append((time.perf_counter() - begin) * 1e3)
        totals.append(result.latency_ms["steps"])
        scales.append([step.latency_ms for step in result.steps])
        say(f"  {variant}: run {i} steps {totals[-1]:.1f} ms, call {walls[-1]:.1f} ms")
    return {
        "first_call_ms": first_ms,
        "steps": summary(totals),
        "call": summary(walls),
        "scale_median_ms": [statistics.median(scale) for scale in zip(*scales, strict=True)],
    }


def time_torch(run: Callable[[int], Any], device: str, runs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """run: draws one picture's codes for a seed."""
    import torch

    def once(seed: int) -> float:
        begin = time.perf_counter()
        run(seed)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    first_ms = once(0)
    say(f"  PyTorch: first call {first_ms:.0f} ms")
    samples = []
    for seed in range(runs):
        samples.append(once(seed))
        say(f"  PyTorch: run {seed} {samples[-1]:.1f} ms")
    return {"first_call_ms": first_ms, "steps": summary(samples)}
