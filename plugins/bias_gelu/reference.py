"""BiasGelu in float64."""

from __future__ import annotations

import numpy as np


def bias_gelu(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """x: [..., C]; bias: [C]. Returns: gelu(x + bias), tanh form, float64."""
    y = x.astype(np.float64) + bias
    return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
