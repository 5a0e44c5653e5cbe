"""Fits a plan by a method's name."""

from __future__ import annotations

import difflib
from dataclasses import fields

from toprovar.calibrate.methods import METHODS
from toprovar.calibrate.methods.settings import MethodSettings, options_of
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Backbone, Plan

ALWAYS_READ = ("target_speedup", "ssim_threshold", "options")
COMMAND_LINE = {"tau": "--rho-threshold"}  # settings whose option has another name


def check_settings(method: str, settings: MethodSettings) -> None:
    """Refuses what can be refused without statistics: unknown methods and options, and settings the method ignores.

    Raises: ToprovarError.
    """
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, 1)
        raise ToprovarError(
            f"unknown method {method}", f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(METHODS)}"
        )
    found = METHODS[method]
    options_of(found.options, settings, method)
    for name in (field.name for field in fields(MethodSettings)):
        if name not in (*ALWAYS_READ, *found.reads) and getattr(settings, name) != getattr(MethodSettings(), name):
            option = COMMAND_LINE.get(name, "--" + name.replace("_", "-"))
            raise ToprovarError(f"method {method} does not read {option}", "leave it out")
    if settings.target_speedup is not None and not found.is_tunable:
        raise ToprovarError(
            f"method {method} has one strength; it cannot be fitted to a target", "leave the target out"
        )


def check_model_fits(method: str, settings: MethodSettings, scales: int, layers: int) -> None:
    """Refuses options that name scales or layers a model does not have.

    Raises: ToprovarError.
    """
    options = options_of(METHODS[method].options, settings, method)
    for name, largest in options.largest(scales, layers).items():
        value = getattr(options, name)
        size = len(value) if isinstance(value, tuple) else value
        if size is not None and size > largest:
            unit = " entries" if isinstance(value, tuple) else ""
            raise ToprovarError(
                f"--set {name}: found {size}{unit}; the model has {scales} scales and {layers} layers",
                f"give at most {largest}{unit}",
            )


def fit_plan(method: str, stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    """The method's plan, checked.

    Raises: ToprovarError for an unknown method, settings that contradict the model, or a target out of reach.
    """
    check_settings(method, settings)
    scales = len(stats.schedule)
    check_model_fits(method, settings, scales, stats.layers)
    if settings.scale_depth is not None and settings.scale_depth >= scales:
        raise ToprovarError(f"scale depth {settings.scale_depth} is not in the schedule of scales 0 to {scales - 1}")
    if settings.global_layers is not None and not 1 <= settings.global_layers <= stats.layers:
        raise ToprovarError(
            f"{settings.global_layers} Global layers asked for; the model has {stats.layers}, give 1 or more"
        )
    if settings.alpha_min > settings.alpha_max:
        raise ToprovarError(f"alpha-min {settings.alpha_min} is larger than alpha-max {settings.alpha_max}")
    plan = METHODS[method].plan(stats, backbone, settings)
    plan.check()
    return plan
