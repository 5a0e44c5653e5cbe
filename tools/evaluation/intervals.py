"""95 % intervals: of shares, of the difference of two shares over the same prompts, and of means and medians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 10_000  # of a bootstrap
Z = 1.959963984540054  # 97.5 % point of the normal distribution


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Interval of a share. Source: Wilson 1927, score interval.

    right: how many of `count` hold. Raises: ValueError if nothing was counted.
    """
    if not 0 <= right <= count or count == 0:
        raise ValueError(f"{right} of {count} is no share")
    share = right / count
    centre = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(mine: Sequence[bool], base: Sequence[bool]) -> tuple[float, float, float]:
    """Share of `mine` less share of `base` over the same prompts, with its interval.

    Only prompts on which the two disagree tell anything. Source: Agresti and Min 2005, adjusted Wald interval for
    matched pairs (half a prompt added to each of the four cells).
    Returns: difference, lower and upper edge. Raises: ValueError if nothing, or not the same number, was compared.
    """
    if len(mine) != len(base) or not mine:
        raise ValueError(f"{len(mine)} and {len(base)} verdicts cannot be paired")
    gained, lost = _disagreements(mine, base)
    count = len(mine)
    centre = (gained - lost) / (count + 2)
    spread = math.sqrt(max(0.0, gained + lost + 1 - (gained - lost) ** 2 / (count + 2))) / (count + 2)
    return (gained - lost) / count, max(-1.0, centre - Z * spread), min(1.0, centre + Z * spread)


def mcnemar_p(mine: Sequence[bool], base: Sequence[bool]) -> float:
    """Two-sided exact p of "neither is better": the prompts that disagree fall to either side by a fair coin."""
    gained, lost = _disagreements(mine, base)
    count, fewer = gained + lost, min(gained, lost)
    if count == 0:
        return 1.0
    tail = sum(math.comb(count, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**count)


def bootstrap_interval(
    values: np.ndarray, of: Callable[..., np.ndarray] = np.mean, resamples: int = RESAMPLES
) -> list[float]:
    """Percentile bootstrap over prompts of the mean of [P] values; resamples are the same for every call of one P.

    of: the number that is bootstrapped, called with values [resamples, P] and axis=1, such as np.median
    """
    picks = np.random.Generator(np.random.PCG64(0)).integers(len(values), size=(resamples, len(values)))
    return [round(float(edge), 6) for edge in np.percentile(of(values[picks], axis=1), [2.5, 97.5])]


def _disagreements(mine: Sequence[bool], base: Sequence[bool]) -> tuple[int, int]:
    gained = sum(m and not b for m, b in zip(mine, base, strict=True))
    lost = sum(b and not m for m, b in zip(mine, base, strict=True))
    return gained, lost
