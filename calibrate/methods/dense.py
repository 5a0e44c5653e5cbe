"""The dense plan: everything runs. The baseline of every comparison."""

from __future__ import annotations

from toprovar.calibrate.methods.method import Method
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.plan import Backbone, Plan, dense_plan


def dense_plan_from_stats(stats: Statistics, backbone: Backbone, settings: MethodSettings) -> Plan:
    return dense_plan(backbone, stats.schedule)


DENSE = Method("Dense", dense_plan_from_stats, is_tunable=False)
