"""StepVAR: late scales run the tokens that carry structure or texture, chosen once per scale (arXiv 2603.01757).

Score: projection of the scale's input on its main direction (power iteration) plus distance from the mean of its 3 x
3 neighbourhood. A pruned position gets the hidden state of the nearest kept one. Both parts are divided by their
mean, so that weight 1 means equal parts; weight, ratios and iterations are unpublished and ours.
"""

from __future__ import annotations

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
from toprovar.calibrate.methods.fastvar import RATIOS
from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.settings import MethodOptions, MethodSettings, options_of
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.parts import Share
from toprovar.runtime.plan import Backbone, Plan, Restore, Score
from toprovar.runtime.version import VERSION


class StepvarOptions(MethodOptions):
    """ratios: pruned share of each of the last scales; weight: of the structure part; iterations: of the power
    iteration."""

    ratios: Annotated[tuple[Share, ...], Field(min_length=1)] = RATIOS
    weight: Annotated[float, Field(ge=0, le=1e6)] = (
        1.0  # both parts have mean 1: far beyond, the other is lost to rounding
    )
    iterations: Annotated[int, Field(ge=1, le=64)] = 4

    def largest(self, scales: int, layers: int) -> dict[str, int]:
        return {"ratios": scales}


def stepvar_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    if settings.target_speedup is None:
        return _plan(stats, backbone, settings, 0.5)
    return reach(
        settings.target_speedup, lambda strength: _plan(stats, backbone, settings, strength), "use --preset paper"
    )


def _plan(stats: Statistics, backbone: Backbone, settings: MethodSettings, strength: float) -> Plan:
    options = options_of(StepvarOptions, settings, "stepvar")
    tokens, skip = tokens_per_scale(stats), skipped_scales(stats, settings, backbone)
    keep = {}
    for k, ratio in late_ratios(stats, options.ratios, skip).items():
        count = keep_count(tokens[k], strengthened(ratio, strength))
        if count < tokens[k]:
            keep[k] = (count,) * backbone.layers
    score = Score(kind="structure", granularity="scale", structure_weight=options.weight, iterations=options.iterations)
    return Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=stats.schedule,
        method="stepvar",
        preset=settings.preset,
        skip_scales=skip,
        score=score if keep else Score(),
        keep=keep,
        restore=Restore(kind="nn_kept") if keep else Restore(),
        calib=provenance(stats, settings, settings={"strength": strength}),
    )


STEPVAR = Method("StepVAR", stepvar_plan_from_stats, StepvarOptions, reads=("preset",))
