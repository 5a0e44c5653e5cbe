"""ToProVAR: entropy-guided pruning of scales, layers and tokens (arXiv 2602.22948, ICLR 2026).

Scale: pruning may start after the depth D at which the share of low-entropy tokens crosses tau. Layer: sigma1/sigma2
of the entropy map splits layers into Global (dense) and Detail (prunable). Token: Detail layers keep the tokens of
lowest entropy, as many as the expected-count rule says. What the paper leaves open is listed in docs/calibration.md.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import field_validator

from toprovar.calibrate.measures import otsu_threshold, rank_correlation
from toprovar.calibrate.methods.common import BISECTIONS, keep_count, provenance, skipped_scales, tokens_per_scale
from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.settings import MethodOptions, MethodSettings, options_of
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.decisions import RhoDecision
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Backbone, LayerScores, Plan, PlanPath, Restore, ScaleDepth, Score
from toprovar.runtime.version import VERSION

Stage = Literal["scale", "layer", "token"]
AMBIGUOUS_SHARE = 0.2  # a layer whose class flips in more than this share of prompts stays dense
PLAUSIBLE_TAU = (0.3, 0.55)  # around the paper's 0.4
FEWEST_GLOBAL_SHARE = 1 / 10  # four of 40 layers explain the paper's 8B timings
STRONGEST = 3.0
STAGES: tuple[Stage, ...] = ("scale", "layer", "token")


class ToprovarOptions(MethodOptions):
    """stages: which of scale, layer and token act; all three are the method, fewer are rows of the paper's ablation.

    none:         fixed exit after the guard scale, or after the given depth
    scale:        scales behind D are left out
    scale, token: behind D every layer but the first chooses tokens, as if R were 1
    scale, layer: behind D Detail layers are left out whole
    depth:        static, one D for all pictures; adaptive, each picture's own, read off rho while it is made
    stratified:   in each of 4 x 4 regions at least a quarter of an even share runs
    """

    stages: tuple[Stage, ...] = STAGES
    depth: Literal["static", "adaptive"] = "static"
    stratified: bool = False

    @field_validator("stages", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return () if value in (["none"], ("none",)) else value


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


def toprovar_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    """ToProVAR's plan; dense where no scale crosses tau (paper A.5.4).

    Raises: ToprovarError if a target speed-up is out of reach.
    """
    options = options_of(ToprovarOptions, settings, "toprovar")
    if settings.target_speedup is not None:
        if options.depth == "adaptive" or set(options.stages) != set(STAGES):
            raise ToprovarError(
                "a target is reached with all three stages and one depth for all pictures",
                "leave out --set stages and --set depth, or --target-speedup",
            )
        settings = reach_target(stats, backbone, settings, settings.target_speedup)
    if options.depth == "adaptive":
        return _adaptive(stats, backbone, settings)
    return _plan(stats, backbone, settings)


def reach_target(stats: Statistics, backbone: Backbone, settings: MethodSettings, target: float) -> MethodSettings:
    """The gentlest settings whose plan saves `target` times the work, in this order of preference:

    the latest D from the guard scale on that can reach it (coarse scales cost little and add most; where that is
    before the depth that rho tells, the plan warns of it), then as many Global layers as can, then the
    largest beta, then, where even beta = 0 is not enough, the smallest alpha_max, then the smallest floor of phi.
    On the demo model a late D kept the most of the picture at equal work (docs/calibration.md).

    Raises: ToprovarError naming the speed-up that is in reach.
    """
    settings = replace(settings, target_speedup=None)
    base = fit_layers(stats.singular_ratio, settings.global_layers, settings.beta)
    fewest = max(1, int(stats.layers * FEWEST_GLOBAL_SHARE))
    most = max(fewest, int((~base.is_detail).sum()))
    last = len(stats.schedule) - 2
    latest_first = range(last, min(stats.guard_scale, last) - 1, -1)
    depths = latest_first if settings.scale_depth is None else [settings.scale_depth]
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


@dataclass(frozen=True)
class _Pruning:
    """Counts and score sources behind a scale depth."""

    keep: dict[int, tuple[int, ...]]
    sources: dict[int, dict[int, int]]
    skip: tuple[int, ...]


def _prune_behind(
    depth: int | None, stats: Statistics, settings: MethodSettings, options: ToprovarOptions, is_detail: np.ndarray,
    R: np.ndarray, backbone: Backbone,
) -> _Pruning:  # fmt: skip
    """What the stages do behind scale `depth`."""
    scales, layers, tokens = len(stats.schedule), stats.layers, tokens_per_scale(stats)
    skip = skipped_scales(stats, settings, backbone)
    if depth is None:
        return _Pruning({}, {}, skip)
    stages = set(options.stages)
    if not stages & {"layer", "token"}:
        return _Pruning({}, {}, tuple(range(min(depth + 1, scales - len(skip)), scales)))
    last_scale = scales - len(skip)
    keep: dict[int, tuple[int, ...]] = {}
    sources: dict[int, dict[int, int]] = {}
    for k in range(depth + 1, last_scale):
        growth = max((k + 1) / last_scale, settings.phi_floor)  # phi(s) = s / S_max, s counted from 1
        counts, source = [], {}
        last_dense = 0
        for layer in range(layers):
            prunable = is_detail[layer] if "layer" in stages else layer > 0
            strength = float(R[layer]) if "layer" in stages else 1.0
            share = settings.alpha_min + (settings.alpha_max - settings.alpha_min) * growth * strength
            if "token" not in stages:
                share = 1.0
            count = keep_count(tokens[k], min(max(share, 0.0), 1.0)) if prunable else tokens[k]
            if count == tokens[k]:
                last_dense = layer
            elif count > 0:
                source[layer] = last_dense  # entropy of the most recent dense layer at this scale
            counts.append(count)
        if any(count < tokens[k] for count in counts):
            keep[k] = tuple(counts)
            sources[k] = source
    return _Pruning(keep, sources, skip)


def _fixed_depth(stats: Statistics, settings: MethodSettings, options: ToprovarOptions) -> DepthFit:
    """D, or the guard scale where the stage that finds it is off."""
    depth = fit_depth(stats, settings)
    if "scale" in options.stages or settings.scale_depth is not None:
        return depth
    return replace(depth, value=stats.guard_scale)


def _plan(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    options = options_of(ToprovarOptions, settings, "toprovar")
    schedule = stats.schedule
    depth = _fixed_depth(stats, settings, options)
    fit = fit_layers(stats.singular_ratio, settings.global_layers, settings.beta)
    warnings = []
    if not PLAUSIBLE_TAU[0] <= depth.tau <= PLAUSIBLE_TAU[1]:
        warnings.append(f"tau {depth.tau:.3f} is outside {PLAUSIBLE_TAU[0]} to {PLAUSIBLE_TAU[1]} (paper: 0.4)")
    if fit.ambiguous.any():
        unclear = np.flatnonzero(fit.ambiguous).tolist()
        warnings.append(f"layers {unclear} change class between prompts; they stay dense")
    told = fit_depth(stats, replace(settings, scale_depth=None)).value
    if settings.scale_depth is not None and (told is None or settings.scale_depth < told):
        warnings.append(
            f"scale depth {settings.scale_depth} was asked for, or is needed for the target; rho tells "
            f"{'none' if told is None else told}"
        )
    spread = [d for d in depth.per_prompt if d is not None]
    if len(spread) > 1 and np.subtract(*np.percentile(spread, [75, 25])) > 1:
        warnings.append("scale depth D varies by more than one scale between prompts (inter-quartile range)")
    if fit.beta == 0:
        warnings.append("beta is 0 to reach the target: R grades no layer, all Detail layers are pruned alike")
    is_detail = fit.is_detail.copy()
    if is_detail[0]:
        is_detail[0] = False  # the first layer ranks the tokens for those behind it
        warnings.append("layer 0 is Detail by its score; it stays dense, since a gate needs a score before it")
    pruning = _prune_behind(depth.value, stats, settings, options, is_detail, fit.R, backbone)
    kind = settings.restore or "cached_residual"
    keep = pruning.keep
    assert not keep or depth.value is not None
    score = Score(kind="entropy", source_layer=pruning.sources, stratified=options.stratified)
    restore = Restore(
        kind=kind,
        ref_scale=depth.value if kind == "cached_residual" else None,
        resample=settings.resample or "bilinear",
    )
    return Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=schedule,
        method="toprovar",
        preset=settings.preset,
        skip_scales=pruning.skip,
        score=score if keep else Score(),
        keep=keep,
        restore=restore if keep else Restore(),
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
        calib=provenance(
            stats,
            settings,
            warnings,
            alpha=(settings.alpha_min, settings.alpha_max),
            beta=round(fit.beta, 9),
            settings={"stages": ", ".join(options.stages) or "none", "stratified": options.stratified},
        ),
    )


def _adaptive(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    """One path per depth that calibration prompts had; a picture enters that of its own D while it is made."""
    depth = fit_depth(stats, settings)
    last = len(stats.schedule) - 1
    per_prompt = [-1 if d is None else d for d in depth.per_prompt]
    depths = sorted({d for d in per_prompt if 0 <= d < last})
    static = _plan(stats, backbone, settings)
    if not depths:
        return static
    plans = {d: _plan(stats, backbone, replace(settings, scale_depth=d)) for d in depths}
    earliest = plans[depths[0]]  # its counts and sources cover all scales that a later depth prunes
    skip = skipped_scales(stats, settings, backbone)
    names = {d: f"D = {d}" for d in depths}
    paths = {
        names[d]: PlanPath(
            keep=plan.keep,
            skip_scales=plan.skip_scales,
            ref_scale=d if plan.restore.kind == "cached_residual" else None,
        )
        for d, plan in plans.items()
    }
    rho = RhoDecision(
        tau=round(depth.tau, 6),
        direction=depth.direction,  # type: ignore[arg-type]
        layers=tuple(range(stats.layers)),
        paths=names,
    )
    main = earliest.model_copy(update={"keep": {}, "skip_scales": skip})
    dense = sum(tokens_per_scale(stats))
    work = [plans.get(d, main).token_layer_equivalents for d in per_prompt]
    calib = static.calib.model_copy(update={"expected_speedup": round(dense / float(np.mean(work)), 6)})
    return main.model_copy(
        update={
            "paths": paths,
            "decisions": (rho,),
            "D": static.D.model_copy(update={"mode": "adaptive", "value": depth.value}),
            "calib": calib,
        }
    )


TOPROVAR = Method(
    "ToProVAR",
    toprovar_plan_from_stats,
    ToprovarOptions,
    reads=(
        "preset", "tau", "direction", "scale_depth", "beta", "global_layers", "alpha_min", "alpha_max", "phi_floor",
        "restore", "resample",
    ),
)  # fmt: skip
