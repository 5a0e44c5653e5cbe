"""Arithmetic that several methods share: counts on the grid, late scales, provenance, and reaching a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import Statistics, prompts_digest
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import COUNT_GRID, MIN_PRUNED_TOKENS, Backbone, Calibration, Plan

PAPER_SKIPPED_SCALES = 2
BISECTIONS = 24
STRONGEST_PRUNING = 0.9  # share of a scale's tokens, or of a layer's, that a target may prune at most


def keep_count(tokens: int, pruned_share: float) -> int:
    """Tokens kept of `tokens` at an expected pruned share, rounded up to the grid; small maps stay whole."""
    if tokens < MIN_PRUNED_TOKENS:
        return tokens
    kept = COUNT_GRID * math.ceil(tokens * (1 - pruned_share) / COUNT_GRID - 1e-9)
    return tokens if kept >= tokens else kept


def tokens_per_scale(stats: Statistics) -> list[int]:
    return [height * width for height, width in stats.schedule]


def skipped_scales(stats: Statistics, settings: MethodSettings, backbone: Backbone) -> tuple[int, ...]:
    """The last scales that the preset leaves out; none of a family whose last scale always runs."""
    if backbone.needs_last_scale:
        return ()
    scales = len(stats.schedule)
    return tuple(range(scales - PAPER_SKIPPED_SCALES, scales)) if settings.preset == "paper" else ()


def late_ratios(stats: Statistics, ratios: Sequence[float], skip: Sequence[int]) -> dict[int, float]:
    """{scale: pruned share} of the last scales, one per ratio, those that are skipped left out."""
    first = len(stats.schedule) - len(ratios)
    return {first + i: ratio for i, ratio in enumerate(ratios) if first + i > 0 and first + i not in skip}


def strengthened(ratio: float, strength: float) -> float:
    """A pruned share turned from 0 (strength 0) over its own value (1/2) to STRONGEST_PRUNING (1)."""
    if strength <= 0.5:
        return ratio * 2 * strength
    return ratio + max(STRONGEST_PRUNING - ratio, 0.0) * (2 * strength - 1)


def provenance(stats: Statistics, asked: MethodSettings, warnings: Sequence[str] = (), /, **values: Any) -> Calibration:
    """Where the plan's numbers come from, with the method's own options."""
    return Calibration(
        prompts_sha256=prompts_digest(stats.prompts),
        prompts=len(stats.prompts),
        ssim_threshold=asked.ssim_threshold,
        stats=stats.digest,
        warnings=tuple(warnings),
        **values,
    )


def reach(target: float, plan_at: Callable[[float], Plan], hint: str) -> Plan:
    """The gentlest plan of `plan_at(strength)`, strength 0 to 1, that saves `target` times the work.

    Raises: ToprovarError naming the speed-up that is in reach.
    """
    strongest = plan_at(1.0)
    if strongest.expected_speedup < target:
        raise ToprovarError(
            f"target speed-up {target:g} is out of reach: at most {strongest.expected_speedup:.2f} times", hint
        )
    low, high, best = 0.0, 1.0, strongest
    gentlest = plan_at(0.0)
    if gentlest.expected_speedup >= target:
        return gentlest
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        plan = plan_at(middle)
        if plan.expected_speedup >= target:
            high, best = middle, plan
        else:
            low = middle
    return best
