"""FastVAR: late scales run the tokens that differ most from their mean (arXiv 2503.23367, ICCV 2025).

Score: squared distance of a block's input from its mean over tokens. Pruned positions get the residual that the block
had at the last dense scale. Source: csguoh/FastVAR. One choice per block, shared by both rows, on the grid of 64, is
ours; `exact` repeats the published run: three choices per block, each row for itself, counts as they are.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from toprovar.calibrate.methods.common import (
    keep_count,
    late_ratios,
    provenance,
    reach,
    skipped_scales,
    strengthened,
    tokens_per_scale,
)
from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.settings import MethodOptions, MethodSettings, options_of
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.parts import Index, Share
from toprovar.runtime.plan import Backbone, Plan, Restore, Score
from toprovar.runtime.version import VERSION

RATIOS = (0.4, 0.5, 0.75, 0.85)  # 32x32 and 40x40 as published; the last two, there skipped, are ours
FIRST_LAYER, LAST_LAYER, LAYERS = 3, 27, 32  # published for Infinity-2B


class FastvarOptions(MethodOptions):
    """ratios: pruned share of each of the last scales; first_layer, last_layer: layers that are pruned, 0-based, last
    included, in proportion to the published 3 to 27 of 32 if left out; exact: the published run, token for token."""

    ratios: Annotated[tuple[Share, ...], Field(min_length=1)] = RATIOS
    first_layer: Annotated[Index | None, Field()] = None
    last_layer: Annotated[Index | None, Field()] = None
    exact: bool = False

    def largest(self, scales: int, layers: int) -> dict[str, int]:
        return {"ratios": scales, "first_layer": layers - 1, "last_layer": layers - 1}


def fastvar_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    if settings.target_speedup is None:
        return _plan(stats, backbone, settings, 0.5)
    return reach(
        settings.target_speedup, lambda strength: _plan(stats, backbone, settings, strength), "use --preset paper"
    )


def pruned_layers(options: FastvarOptions, layers: int) -> range:
    first = math.ceil(layers * FIRST_LAYER / LAYERS) if options.first_layer is None else options.first_layer
    last = math.floor(layers * LAST_LAYER / LAYERS) if options.last_layer is None else options.last_layer
    return range(first, min(last, layers - 1) + 1)


def _plan(stats: Statistics, backbone: Backbone, settings: MethodSettings, strength: float) -> Plan:
    options = options_of(FastvarOptions, settings, "fastvar")
    tokens, skip = tokens_per_scale(stats), skipped_scales(stats, settings, backbone)
    pruned = pruned_layers(options, backbone.layers)
    keep = {}
    for k, ratio in late_ratios(stats, options.ratios, skip).items():
        share = strengthened(ratio, strength)
        count = tokens[k] - math.floor(tokens[k] * share) if options.exact else keep_count(tokens[k], share)
        if count < tokens[k]:
            keep[k] = tuple(count if layer in pruned else tokens[k] for layer in range(backbone.layers))
    kind = settings.restore or "cached_residual"
    reference = min(keep) - 1 if keep and kind == "cached_residual" else None
    score = Score(kind="variance", granularity="sublayer", row="each") if options.exact else Score(kind="variance")
    return Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=stats.schedule,
        method="fastvar",
        preset=settings.preset,
        skip_scales=skip,
        score=score if keep else Score(),
        keep=keep,
        grid=1 if options.exact else 64,
        restore=Restore(kind=kind, ref_scale=reference, resample=settings.resample or "area") if keep else Restore(),
        calib=provenance(stats, settings, settings={"exact": options.exact, "strength": strength}),
    )


FASTVAR = Method("FastVAR", fastvar_plan_from_stats, FastvarOptions, reads=("preset", "restore", "resample"))
