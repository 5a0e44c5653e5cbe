"""Attention with entropy in float64, time-major: what every kernel is held against."""

from __future__ import annotations

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """q: [L, R, H, D]; k, v: [S, R, G, D], G divides H; mask: [R, S], added to the scores.

    Returns: o [L, R, H, D] and entropy in nats [L, R, H], both float64.
    Source: ToProVAR eq. 2.
    """
    L, R, H, D = q.shape
    G = k.shape[2]
    queries = q.astype(np.float64).reshape(L, R, G, H // G, D)
    scores = np.einsum("lrgmd,srgd->lrgms", queries, k.astype(np.float64)) * scale
    if mask is not None:
        scores = scores + mask[None, :, None, None, :]
    scores -= scores.max(-1, keepdims=True)
    p = np.exp(scores)
    total = p.sum(-1, keepdims=True)
    p /= total
    entropy = np.log(total[..., 0]) - (p * scores).sum(-1)
    o = np.einsum("lrgms,srgd->lrgmd", p, v.astype(np.float64))
    return o.reshape(q.shape), entropy.reshape(L, R, H)
