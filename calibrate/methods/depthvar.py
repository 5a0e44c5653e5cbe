"""DepthVAR: every token of a late scale runs a number of layers of its own (arXiv 2604.17286, CVPR 2026 Findings).

Tokens are ordered by what the scale before changed; a token's place gives its depth, and layers are handed out in
bit-reversed order, so that few layers are spread over the whole depth. The paper leaves the schedule of depths open:
ours is a linear ramp whose mean spends no more on a scale than on the reference scale, turned by a part of the order
from scale to scale. Codes are scaled by the depth they had.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from toprovar.calibrate.methods.common import keep_count, provenance, reach, skipped_scales, tokens_per_scale
from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.settings import MethodOptions, MethodSettings, options_of
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.parts import Index
from toprovar.runtime.plan import Backbone, CodeWeight, Plan, Restore, Score
from toprovar.runtime.version import VERSION

REFERENCE_FROM_END = 5  # R = 8 of 13 scales, the published setting in the middle
MOST_LEVELS = 8  # distinct depths of a scale, hence distinct counts


class DepthvarOptions(MethodOptions):
    """reference: R, 0-based; scales behind it spend as much each as R does. rotation: share of the order by which
    scales are turned, from 0 at the first behind R towards it at the end. weighted: codes are scaled by depth."""

    reference: Annotated[Index | None, Field()] = None
    rotation: Annotated[float, Field(ge=0, lt=1)] = 0.5
    weighted: bool = True

    def largest(self, scales: int, layers: int) -> dict[str, int]:
        return {"reference": scales - 1}


def layer_order(layers: int) -> list[int]:
    """Layers in the order they are handed out: bit reversal within the next power of two, larger ones left out."""
    bits = max(layers - 1, 1).bit_length()
    reversed_bits = (int(format(i, f"0{bits}b")[::-1], 2) for i in range(2**bits))
    return [layer for layer in reversed_bits if layer < layers]


def depth_ramp(mean: float, layers: int) -> tuple[float, float]:
    """Depth of the last token in order and of the first, as shares of all layers; linear between, mean as given.

    Stays within [1/layers, 1], so that nothing is clipped.
    """
    mean = max(mean, 1 / layers)
    half = min(mean - 1 / layers, 1 - mean)
    return mean - half, mean + half


def active_counts(tokens: int, ramp: tuple[float, float], layers: int) -> list[int]:
    """Tokens that run in each layer, before rounding to the grid."""
    low, high = ramp
    shares = low + (high - low) * (np.arange(tokens) + 0.5) / tokens
    depths = np.floor(shares * layers + 1e-9).astype(int)
    levels = np.unique(np.round(np.linspace(depths[0], depths[-1], MOST_LEVELS)).astype(int))
    if len(np.unique(depths)) > MOST_LEVELS:
        depths = levels[np.abs(depths[:, None] - levels).argmin(1)]
    counts = [0] * layers
    for rank, layer in enumerate(layer_order(layers)):
        counts[layer] = int((depths > rank).sum())
    return counts


def depthvar_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    options = options_of(DepthvarOptions, settings, "depthvar")
    tokens = tokens_per_scale(stats)
    last = len(tokens) - 1
    reference = max(last + 1 - REFERENCE_FROM_END, 0) if options.reference is None else options.reference
    if settings.target_speedup is None:
        return _plan(stats, backbone, settings, options, tokens[reference])
    largest, smallest = tokens[last], tokens[stats.guard_scale] / 2

    def at(strength: float) -> Plan:
        return _plan(stats, backbone, settings, options, largest * (smallest / largest) ** strength)

    return reach(settings.target_speedup, at, "lower the target, or use --preset paper")


def _plan(
    stats: Statistics, backbone: Backbone, settings: MethodSettings, options: DepthvarOptions, budget: float
) -> Plan:
    """budget: tokens through the whole depth that a late scale may spend."""
    tokens, skip, layers = tokens_per_scale(stats), skipped_scales(stats, settings, backbone), backbone.layers
    late = [k for k, n in enumerate(tokens) if n > budget and k > 0 and k not in skip]
    keep, rotation, ramps = {}, {}, {}
    for k in late:
        ramp = depth_ramp(budget / tokens[k], layers)
        counts = [keep_count(tokens[k], 1 - n / tokens[k]) for n in active_counts(tokens[k], ramp, layers)]
        if min(counts) == tokens[k]:
            continue
        keep[k] = tuple(counts)
        rotation[k] = round(options.rotation * (k - late[0]) / (len(tokens) - late[0]), 6)
        ramps[k] = (round(ramp[0], 6), round(ramp[1], 6))
    kind = settings.restore or "cached_residual"
    reference = min(keep) - 1 if keep and kind == "cached_residual" else None
    weight = CodeWeight(kind="depth", ramp=ramps) if keep and options.weighted else CodeWeight()
    return Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=stats.schedule,
        method="depthvar",
        preset=settings.preset,
        skip_scales=skip,
        score=Score(kind="change", rotation=rotation) if keep else Score(),
        keep=keep,
        restore=Restore(kind=kind, ref_scale=reference, resample=settings.resample or "bilinear")
        if keep
        else Restore(),
        code_weight=weight,
        calib=provenance(stats, settings, settings={"budget_tokens": round(budget, 3)}),
    )


DEPTHVAR = Method("DepthVAR", depthvar_plan_from_stats, DepthvarOptions, reads=("preset", "restore", "resample"))
