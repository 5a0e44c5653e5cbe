"""TokenRestore in float64."""

from __future__ import annotations

import numpy as np


def token_restore(
    x: np.ndarray, residual: np.ndarray, rows: np.ndarray, columns: np.ndarray, kept: np.ndarray, y: np.ndarray
) -> np.ndarray:
    """x: [h'*w', R, C]; residual: [h*w, R, C]; rows: [h', h]; columns: [w', w]; kept: [n]; y: [n, R, C].

    Returns: [h'*w', R, C] float64.
    """
    height, width = rows.shape[1], columns.shape[1]
    lines = residual.astype(np.float64).reshape(height, width, *residual.shape[1:])
    out = x + np.einsum("ia,jb,abrc->ijrc", rows, columns, lines).reshape(x.shape)
    out[kept] = y
    return out
