"""ToProVAR: entropy-guided pruning of scales, layers and tokens (arXiv 2602.22948, ICLR 2026).

Scale: pruning may start after the depth D at which the share of low-entropy tokens crosses tau. Layer: sigma1/sigma2 of
the entropy map splits layers into Global (dense) and Detail (prunable). Token: Detail layers keep the tokens of lowest
entropy, as many as the expected-count rule says. What the paper leaves open is decided in methods.md 2 and named below.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from toprovar.calibrate.measures import otsu_threshold, rank_correlation
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import Statistics, prompts_digest
from toprovar.runtime.plan import (
    COUNT_GRID,
    MIN_PRUNED_TOKENS,
    Backbone,
    Calibration,
    LayerScores,
    Plan,
    Restore,
    ScaleDepth,
    Score,
)
from toprovar.runtime.version import VERSION

AMBIGUOUS_SHARE = 0.2  # a layer whose class flips in more than this share of prompts stays dense
PLAUSIBLE_TAU = (0.3, 0.55)  # around the paper's 0.4
PAPER_SKIPPED_SCALES = 2


@dataclass(frozen=True)
class LayerFit:
    """R per layer (mean over prompts), beta, class per layer and which of them were ambiguous."""

    R: np.ndarray
    beta: float
    is_detail: np.ndarray
    ambiguous: np.ndarray


def fit_layers(singular_ratio: np.ndarray) -> LayerFit:
    """Layer scores of [P, L] ratios: R = exp(-beta (ratio - 1)), with R = 1/2 at Otsu's split of ln(ratio)."""
    log_ratio = np.log(singular_ratio)
    split = otsu_threshold(log_ratio)
    beta = math.log(2) / max(math.exp(split) - 1, 1e-9)
    R = np.exp(-beta * (singular_ratio - 1))  # [P, L]
    votes = (R >= 0.5).mean(0)  # share of prompts that call the layer Detail
    ambiguous = np.minimum(votes, 1 - votes) > AMBIGUOUS_SHARE
    return LayerFit(R.mean(0), beta, (votes >= 0.5) & ~ambiguous, ambiguous)


@dataclass(frozen=True)
class DepthFit:
    """tau, its direction, D per prompt (None where rho never crosses), and the static D (their mode)."""

    tau: float
    direction: str
    per_prompt: list[int | None]
    value: int | None


def fit_depth(stats: Statistics, settings: MethodSettings) -> DepthFit:
    """D = first scale from the guard scale on at which rho has crossed tau."""
    guard = stats.guard_scale
    direction = settings.direction
    if direction == "auto":
        direction = "le" if rank_correlation(stats.rho[:, guard:].mean(0)) <= 0 else "ge"
    settled = stats.truncated_ssim[:, guard:-1] > settings.ssim_threshold
    tau = settings.tau
    if tau is None:
        values = stats.rho[:, guard:-1][settled]
        tau = float(np.median(values)) if values.size else 0.4
    crossed = stats.rho[:, guard:] <= tau if direction == "le" else stats.rho[:, guard:] >= tau
    per_prompt = [guard + int(np.argmax(row)) if row.any() else None for row in crossed]
    if settings.scale_depth is not None:
        return DepthFit(tau, direction, per_prompt, settings.scale_depth)
    found = Counter(per_prompt)
    # the mode; the later scale on a tie, which prunes less
    value = max(found, key=lambda depth: (found[depth], math.inf if depth is None else depth))
    return DepthFit(tau, direction, per_prompt, value)


def keep_count(tokens: int, pruned_share: float) -> int:
    """Tokens kept of `tokens` at an expected pruned share, rounded up to the grid; small maps stay whole."""
    if tokens < MIN_PRUNED_TOKENS:
        return tokens
    kept = COUNT_GRID * math.ceil(tokens * (1 - pruned_share) / COUNT_GRID - 1e-9)
    return tokens if kept >= tokens else kept


def toprovar_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    """Static ToProVAR plan; dense where no scale crosses tau (paper A.5.4)."""
    schedule, layers = stats.schedule, stats.layers
    scales = len(schedule)
    depth, fit = fit_depth(stats, settings), fit_layers(stats.singular_ratio)
    warnings = []
    if not PLAUSIBLE_TAU[0] <= depth.tau <= PLAUSIBLE_TAU[1]:
        warnings.append(f"tau {depth.tau:.3f} is outside {PLAUSIBLE_TAU[0]} to {PLAUSIBLE_TAU[1]} (paper: 0.4)")
    if fit.ambiguous.any():
        unclear = np.flatnonzero(fit.ambiguous).tolist()
        warnings.append(f"layers {unclear} change class between prompts; they stay dense")
    spread = [d for d in depth.per_prompt if d is not None]
    if len(spread) > 1 and np.subtract(*np.percentile(spread, [75, 25])) > 1:
        warnings.append("scale depth D varies by more than one scale between prompts (inter-quartile range)")
    is_detail = fit.is_detail.copy()
    if is_detail[0]:
        is_detail[0] = False  # the first layer ranks the tokens for those behind it
        warnings.append("layer 0 is Detail by its score; it stays dense, since a gate needs a score before it")
    skip = tuple(range(scales - PAPER_SKIPPED_SCALES, scales)) if settings.preset == "paper" else ()
    first_pruned = scales if depth.value is None else depth.value + 1
    last_scale = scales - len(skip)
    keep: dict[int, tuple[int, ...]] = {}
    sources: dict[int, dict[int, int]] = {}
    for k in range(first_pruned, last_scale):
        tokens = schedule[k][0] * schedule[k][1]
        growth = (k + 1) / last_scale  # phi(s) = s / S_max, s counted from 1
        counts, source = [], {}
        last_dense = 0
        for layer in range(layers):
            share = settings.alpha_min + (settings.alpha_max - settings.alpha_min) * growth * float(fit.R[layer])
            count = keep_count(tokens, min(max(share, 0.0), 1.0)) if is_detail[layer] else tokens
            if count == tokens:
                last_dense = layer
            elif count > 0:
                source[layer] = last_dense  # entropy of the most recent dense layer at this scale
            counts.append(count)
        if any(count < tokens for count in counts):
            keep[k] = tuple(counts)
            sources[k] = source
    reference = first_pruned - 1 if keep and settings.restore == "cached_residual" else None
    return Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=schedule,
        method="toprovar",
        preset=settings.preset,
        skip_scales=skip,
        score=Score(kind="entropy", source_layer=sources) if keep else Score(),
        keep=keep,
        restore=Restore(kind=settings.restore, ref_scale=reference, resample=settings.resample) if keep else Restore(),
        layers=LayerScores(
            R=tuple(round(float(r), 6) for r in fit.R),
            classes=tuple("detail" if detail else "global" for detail in is_detail),  # type: ignore[call-arg]
        ),
        D=ScaleDepth(
            mode="none" if depth.value is None else "static",
            value=depth.value,
            tau=round(depth.tau, 6),
            direction=depth.direction,  # type: ignore[arg-type]
        ),
        calib=Calibration(
            prompts_sha256=prompts_digest(stats.prompts),
            prompts=len(stats.prompts),
            ssim_threshold=settings.ssim_threshold,
            alpha=(settings.alpha_min, settings.alpha_max),
            beta=round(fit.beta, 9),
            stats=stats.digest,
            warnings=tuple(warnings),
        ),
    )
