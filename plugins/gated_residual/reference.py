"""GatedResidual in float64."""

from __future__ import annotations

import numpy as np


def gated_residual(x: np.ndarray, y: np.ndarray, bias: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """x, y: [n, R, C]; bias: [C]; gate: [1, R or 1, C]. Returns: [n, R, C] float64."""
    return x.astype(np.float64) + (y.astype(np.float64) + bias) * gate
