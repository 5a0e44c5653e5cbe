"""RotaryHeads in float64."""

from __future__ import annotations

import numpy as np


def rotary_heads(
    qkv: np.ndarray, bias: np.ndarray, gain: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """qkv: [n, R, 3*H*D]; bias: [3*H*D]; gain: [H, 1]; cos, sin: [n, 1 or R, 1, D/2].

    Returns: q, k, v, each [n, R, H, D] float64.
    """
    n, R, width = qkv.shape
    heads = len(gain)
    packed = (qkv.astype(np.float64) + bias).reshape(n, R, 3, heads, width // 3 // heads)
    q, k, v = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    q = _rotated(_unit(q) * gain, cos, sin)
    return q, _rotated(_unit(k), cos, sin), v


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), 1e-12)


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
