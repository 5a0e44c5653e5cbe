"""Token gate: the n tokens with the lowest score, in order of position.

Ties go to the smaller index and the result is sorted, so that gathers are coalesced and every backend agrees.
"""

from __future__ import annotations

import numpy as np


def lowest_scores(score: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` smallest scores, ascending.

    score: [N] float; NaN is refused, since it would rank arbitrarily.
    Returns: [count] int64.
    Raises:  ValueError if count is not in 0..N or a score is NaN.
    """
    if not 0 <= count <= score.size:
        raise ValueError(f"count {count} is outside 0..{score.size}")
    if np.isnan(score).any():
        raise ValueError("score holds NaN")
    return np.sort(np.argsort(score, kind="stable")[:count])
