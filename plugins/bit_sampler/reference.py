"""BitSampler in float64."""

from __future__ import annotations

import numpy as np


def bit_sampler(logits: np.ndarray, noise: np.ndarray, limit: float) -> np.ndarray:
    """logits: [..., 2]; noise: [...] in [0, 1). Returns: [...] int32, 1 where noise < sigmoid(one - zero)."""
    odds = logits[..., 1].astype(np.float64) - logits[..., 0]
    chance = np.where(odds <= -limit, 0.0, np.where(odds >= limit, 1.0, 1 / (1 + np.exp(-odds))))
    return (noise < chance).astype(np.int32)
