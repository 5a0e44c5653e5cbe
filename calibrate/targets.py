"""Fits a plan, and turns alpha-max until the plan saves as much work as asked for."""

from __future__ import annotations

from dataclasses import replace

from toprovar.calibrate.methods import METHODS
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Backbone, Plan

BISECTIONS = 24


def fit_plan(method: str, stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    """The method's plan; with a target, the one with the smallest alpha_max that reaches it.

    Raises: ToprovarError for an unknown method, a scale depth outside the schedule, or a target out of reach (naming
            what is in reach).
    """
    if method not in METHODS:
        raise ToprovarError(f"unknown method {method}", f"choose one of: {', '.join(METHODS)}")
    scales = len(stats.schedule)
    if settings.scale_depth is not None and settings.scale_depth >= scales:
        raise ToprovarError(f"scale depth {settings.scale_depth} is not in the schedule of scales 0 to {scales - 1}")
    if settings.alpha_min > settings.alpha_max:
        raise ToprovarError(f"alpha-min {settings.alpha_min} is larger than alpha-max {settings.alpha_max}")
    fit = METHODS[method]
    if settings.target_speedup is None:
        plan = fit(stats, backbone, settings)
    else:
        plan = _reach(method, stats, backbone, settings, settings.target_speedup)
    plan.check()
    return plan


def _reach(method: str, stats: Statistics, backbone: Backbone, settings: MethodSettings, target: float) -> Plan:
    fit = METHODS[method]
    low, high = settings.alpha_min, 1.0
    best = fit(stats, backbone, replace(settings, alpha_max=high))
    if best.tle_speedup < target:
        raise ToprovarError(
            f"target speed-up {target:g} is out of reach: at most {best.tle_speedup:.2f} with D = {best.D.value}",
            "lower the target, or set an earlier --scale-depth",
        )
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        plan = fit(stats, backbone, replace(settings, alpha_max=middle))
        if plan.tle_speedup >= target:
            best, high = plan, middle
        else:
            low = middle
    return best
