"""Fixed exit: the last scales are left out whole, whatever the picture. The baseline that every pruning has to beat.

Needs no score and no restore; the picture is decoded from the codes of the scales that ran. Source: "fixed scale exit"
in ToProVAR's ablation.
"""

from __future__ import annotations

from toprovar.calibrate.methods.common import provenance, tokens_per_scale
from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Backbone, Plan
from toprovar.runtime.version import VERSION


def fixed_exit_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    """Runs scales 0 to D: the given scale depth, or the latest one that reaches the target, or the first settled one.

    Settled: the picture truncated there is, on average over prompts, as close to the full one as `ssim_threshold` asks.
    Raises: ToprovarError if the target is out of reach.
    """
    if backbone.needs_last_scale:
        raise ToprovarError(
            f"a model of family {backbone.family} cannot exit early: its residual head hangs on the last scale",
            "choose another --method",
        )
    tokens = tokens_per_scale(stats)
    last = len(tokens) - 1
    if settings.scale_depth is not None:
        depth = settings.scale_depth
    elif settings.target_speedup is not None:
        speedups = [sum(tokens) / sum(tokens[: k + 1]) for k in range(len(tokens))]
        reaching = [k for k in range(stats.guard_scale, last + 1) if speedups[k] >= settings.target_speedup]
        if not reaching:
            raise ToprovarError(
                f"target speed-up {settings.target_speedup:g} is out of reach: at most "
                f"{speedups[stats.guard_scale]:.2f} times with an exit after the guard scale {stats.guard_scale}",
                "lower the target, or set an earlier --scale-depth",
            )
        depth = max(reaching)
    else:
        ssim = stats.truncated_ssim.mean(0)
        depth = next(k for k in range(stats.guard_scale, last + 1) if ssim[k] >= settings.ssim_threshold)
    return Plan(
        tool_version=VERSION,
        backbone=backbone,
        schedule=stats.schedule,
        method="fixed_exit",
        skip_scales=tuple(range(depth + 1, len(tokens))),
        calib=provenance(stats, settings),
    )


FIXED_EXIT = Method("Fixed exit", fixed_exit_plan_from_stats, reads=("scale_depth",))
