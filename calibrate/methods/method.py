"""What a method is: a pure function from statistics to a plan, and how strong it can be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toprovar.calibrate.methods.settings import MethodOptions, MethodSettings
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.plan import Backbone, Plan

Fit = Callable[[Statistics, Backbone, MethodSettings], Plan]


@dataclass(frozen=True)
class Method:
    """title:       how the literature writes it
    plan:        (statistics, backbone, settings) -> plan; `settings.target_speedup` is reached or refused
    options:     class of its own options (`--set`)
    is_tunable:  whether it can reach a target
    needs:       names of further statistics it reads (statistics.FURTHER)
    reads:       names of the settings it reads beside its own options and a target; others are refused
    """

    title: str
    plan: Fit
    options: type[MethodOptions] = MethodOptions
    is_tunable: bool = True
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
