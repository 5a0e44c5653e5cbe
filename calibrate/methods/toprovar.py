"""ToProVAR: entropy-guided pruning of scales, layers and tokens (arXiv 2602.22948, ICLR 2026).

Scale: pruning may start after the depth D at which the share of low-entropy tokens crosses tau. Layer: sigma1/sigma2 of
the entropy map splits layers into Global (dense) and Detail (prunable). Token: Detail layers keep the tokens of lowest
entropy, as many as the expected-count rule says. What the paper leaves open is listed in docs/calibration.md.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from toprovar.calibrate.measures import otsu_threshold, rank_correlation
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import Statistics, prompts_digest
from toprovar.runtime.errors import ToprovarError
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
FEWEST_GLOBAL_SHARE = 1 / 10  # four of 40 layers explain the paper's 8B timings
BISECTIONS = 24
STRONGEST = 3.0


@dataclass(frozen=True)
class LayerFit:
    """R per layer (mean over prompts), beta, class per layer and which of them were ambiguous."""

    R: np.ndarray
    beta: float
    is_detail: np.ndarray
    ambiguous: np.ndarray


def fit_layers(singular_ratio: np.ndarray, global_layers: int | None = None, beta: float | None = None) -> LayerFit:
    """Layer scores of [P, L] ratios: R = exp(-beta (ratio - 1)), with R = 1/2 at the split of ln(ratio).

    global_layers: that many layers with the largest mean ln(ratio) are Global; None splits by Otsu's rule, and layers
                   whose side changes between prompts stay Global
    beta:          replaces the beta that the split gives
    """
    log_ratio = np.log(singular_ratio)
    layers = singular_ratio.shape[1]
    if global_layers is None:
        split = otsu_threshold(log_ratio)
        votes = (log_ratio <= split).mean(0)  # share of prompts that call the layer Detail
        ambiguous = np.minimum(votes, 1 - votes) > AMBIGUOUS_SHARE
        is_detail = (votes >= 0.5) & ~ambiguous
    else:
        mean = log_ratio.mean(0)
        order = np.argsort(-mean, kind="stable")
        is_detail = np.ones(layers, bool)
        is_detail[order[:global_layers]] = False
        edges = mean[order[max(global_layers - 1, 0) : global_layers + 1]]
        split, ambiguous = float(edges.mean()), np.zeros(layers, bool)
    if beta is None:
        beta = math.log(2) / max(math.exp(split) - 1, 1e-9)
    return LayerFit(np.exp(-beta * (singular_ratio - 1)).mean(0), beta, is_detail, ambiguous)


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
    """Static ToProVAR plan; dense where no scale crosses tau (paper A.5.4).

    Raises: ToprovarError if a target speed-up is out of reach.
    """
    if settings.target_speedup is not None:
        settings = reach_target(stats, backbone, settings, settings.target_speedup)
    return _plan(stats, backbone, settings)


def reach_target(stats: Statistics, backbone: Backbone, settings: MethodSettings, target: float) -> MethodSettings:
    """The gentlest settings whose plan saves `target` times the work, in this order of preference:

    the latest D that can reach it (coarse scales cost little and add most), then as many Global layers as can, then the
    largest beta, then, where even beta = 0 is not enough, the smallest alpha_max, then the smallest floor of phi.
    On the demo model a late D kept the most of the picture at equal work (docs/calibration.md).

    Raises: ToprovarError naming the speed-up that is in reach.
    """
    settings = replace(settings, target_speedup=None)
    base = fit_layers(stats.singular_ratio, settings.global_layers, settings.beta)
    fewest = max(1, int(stats.layers * FEWEST_GLOBAL_SHARE))
    most = max(fewest, int((~base.is_detail).sum()))
    fitted = fit_depth(stats, settings).value
    last = len(stats.schedule) - 2
    depths = [settings.scale_depth] if settings.scale_depth is not None else range(last, (fitted or 0) - 1, -1)
    layer_counts = [settings.global_layers] if settings.global_layers is not None else range(most, fewest - 1, -1)

    def at(depth: int | None, count: int | None, strength: float) -> MethodSettings:
        """strength 0..1 lowers beta to 0, 1..2 raises alpha_max to 1, 2..3 raises phi's floor to 1."""
        beta = base.beta * max(0.0, 1 - strength)
        alpha = settings.alpha_max + (1 - settings.alpha_max) * min(max(0.0, strength - 1), 1.0)
        floor = settings.phi_floor + (1 - settings.phi_floor) * max(0.0, strength - 2)
        return replace(settings, scale_depth=depth, global_layers=count, beta=beta, alpha_max=alpha, phi_floor=floor)

    best = 1.0
    for depth in depths:
        for count in layer_counts:
            reached = _plan(stats, backbone, at(depth, count, STRONGEST)).tle_speedup
            best = max(best, reached)
            if reached < target:
                continue
            low, high = 0.0, STRONGEST
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                if _plan(stats, backbone, at(depth, count, middle)).tle_speedup >= target:
                    high = middle
                else:
                    low = middle
            return at(depth, count, high)
    raise ToprovarError(
        f"target speed-up {target:g} is out of reach: at most {best:.2f} times",
        "lower the target, set an earlier --scale-depth, or use --preset paper",
    )


def _plan(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    schedule, layers = stats.schedule, stats.layers
    scales = len(schedule)
    depth = fit_depth(stats, settings)
    fit = fit_layers(stats.singular_ratio, settings.global_layers, settings.beta)
    warnings = []
    if not PLAUSIBLE_TAU[0] <= depth.tau <= PLAUSIBLE_TAU[1]:
        warnings.append(f"tau {depth.tau:.3f} is outside {PLAUSIBLE_TAU[0]} to {PLAUSIBLE_TAU[1]} (paper: 0.4)")
    if fit.ambiguous.any():
        unclear = np.flatnonzero(fit.ambiguous).tolist()
        warnings.append(f"layers {unclear} change class between prompts; they stay dense")
    spread = [d for d in depth.per_prompt if d is not None]
    if len(spread) > 1 and np.subtract(*np.percentile(spread, [75, 25])) > 1:
        warnings.append("scale depth D varies by more than one scale between prompts (inter-quartile range)")
    if fit.beta == 0:
        warnings.append("beta is 0 to reach the target: R grades no layer, all Detail layers are pruned alike")
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
        growth = max((k + 1) / last_scale, settings.phi_floor)  # phi(s) = s / S_max, s counted from 1
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
