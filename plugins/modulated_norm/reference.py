"""ModulatedNorm in float64."""

from __future__ import annotations

import numpy as np


def modulated_norm(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """x: [n, R, C]; scale, shift: [1, R or 1, C]. Returns: [n, R, C] float64."""
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * scale + shift
