"""Methods: small pure functions from statistics to a plan. Adding one takes a file here and a line in METHODS."""

from __future__ import annotations

from collections.abc import Callable

from toprovar.calibrate.methods.dense import dense_plan_from_stats
from toprovar.calibrate.methods.fixed_exit import fixed_exit_plan_from_stats
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.methods.toprovar import toprovar_plan_from_stats
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.plan import Backbone, Plan

Method = Callable[[Statistics, Backbone, MethodSettings], Plan]

METHODS: dict[str, Method] = {
    "dense": dense_plan_from_stats,
    "fixed_exit": fixed_exit_plan_from_stats,
    "toprovar": toprovar_plan_from_stats,
}
