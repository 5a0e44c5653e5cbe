"""Fits a plan by a method's name."""

from __future__ import annotations

from toprovar.calibrate.methods import METHODS
from toprovar.calibrate.methods.settings import MethodSettings, options_of
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Backbone, Plan


def fit_plan(method: str, stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    """The method's plan, checked.

    Raises: ToprovarError for an unknown method, settings that contradict the model, or a target out of reach.
    """
    if method not in METHODS:
        raise ToprovarError(f"unknown method {method}", f"choose one of: {', '.join(METHODS)}")
    scales = len(stats.schedule)
    if settings.scale_depth is not None and settings.scale_depth >= scales:
        raise ToprovarError(f"scale depth {settings.scale_depth} is not in the schedule of scales 0 to {scales - 1}")
    if settings.global_layers is not None and not 1 <= settings.global_layers <= stats.layers:
        raise ToprovarError(
            f"{settings.global_layers} Global layers asked for; the model has {stats.layers}, give 1 or more"
        )
    if settings.alpha_min > settings.alpha_max:
        raise ToprovarError(f"alpha-min {settings.alpha_min} is larger than alpha-max {settings.alpha_max}")
    if settings.target_speedup is not None and not METHODS[method].is_tunable:
        raise ToprovarError(
            f"method {method} has one strength; it cannot be fitted to a target", "leave the target out"
        )
    options_of(METHODS[method].options, settings, method)
    plan = METHODS[method].plan(stats, backbone, settings)
    plan.check()
    return plan
