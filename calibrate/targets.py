"""Fits a method to a target SSIM: the strongest plan whose pictures, measured, stay as close to dense as asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.measures import ssim
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.prompt_run import picture_of, run_in_torch
from toprovar.calibrate.statistics import Statistics
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.guidance import Guidance
from toprovar.runtime.plan import Plan

if TYPE_CHECKING:
    from toprovar.exporter.model import Model

MEASURED_PROMPTS = 8
SPEEDUPS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 9.0, 14.0, 20.0)  # tried in order, before bisection
BISECTIONS = 4  # leaves a sixteenth of the last interval


class SsimMeter:
    """Mean SSIM of a plan's pictures to the dense ones of the same noise, over the first prompts of the statistics."""

    def __init__(self, model: Model, guidance: Guidance, stats: Statistics) -> None:
        self._model, self._guidance, self._schedule = model, guidance, stats.schedule
        self._asked = list(zip(stats.prompts, stats.seeds, strict=True))[:MEASURED_PROMPTS]
        self._dense: list[np.ndarray] = []
        self._known: dict[str, float] = {}

    def _pictures(self, plan: Plan | None) -> list[np.ndarray]:
        return [
            picture_of(self._model, run_in_torch(self._model, self._schedule, self._guidance, prompt, seed, plan).codes)
            for prompt, seed in self._asked
        ]

    def __call__(self, plan: Plan) -> float:
        key = plan.model_dump_json(exclude={"calib", "layers", "D"})
        if key not in self._known:
            self._dense = self._dense or self._pictures(None)
            pairs = zip(self._pictures(plan), self._dense, strict=True)
            self._known[key] = float(np.mean([ssim(planned, dense) for planned, dense in pairs]))
        return self._known[key]


def fit_to_ssim(
    method: str,
    stats: Statistics,
    settings: MethodSettings,
    target: float,
    fit: Callable[[MethodSettings], Plan],
    meter: Callable[[Plan], float],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """The plan of largest work saved whose mean SSIM is at least `target`, by trying speed-ups and bisecting.

    fit:    settings -> plan; raises ToprovarError where a speed-up is out of reach
    meter:  plan -> mean SSIM
    Raises: ToprovarError naming the SSIM of the gentlest plan if even that misses the target.
    """
    total, tried = len(SPEEDUPS) + BISECTIONS, 0
    best: Plan | None = None
    found = float("nan")

    def passes(speedup: float) -> bool:
        nonlocal best, found, tried
        tried += 1
        on_progress(tried, total)
        try:
            plan = fit(replace(settings, target_speedup=speedup))
        except ToprovarError:
            if best is None:
                raise
            return False
        reached = meter(plan)
        if best is None and reached < target:
            raise ToprovarError(
                f"target SSIM {target:g} is out of reach of {method}: its gentlest plan has {reached:.3f}",
                "lower the target, or leave --preset paper out",
            )
        if reached < target:
            return False
        if best is None or plan.expected_speedup >= best.expected_speedup:
            best, found = plan, reached
        return True

    low, high = SPEEDUPS[0], None
    for speedup in SPEEDUPS:
        if not passes(speedup):
            high = speedup
            break
        low = speedup
    for _ in range(BISECTIONS if high is not None else 0):
        assert high is not None
        middle = (low * high) ** 0.5
        if passes(middle):
            low = middle
        else:
            high = middle
    on_progress(total, total)
    assert best is not None
    facts = {**best.calib.settings, "target_ssim": target}
    return best.model_copy(
        update={"calib": best.calib.model_copy(update={"settings": facts, "measured_ssim": round(found, 6)})}
    )


def plan_for_ssim(
    method: str,
    model: Model,
    guidance: Guidance,
    stats: Statistics,
    settings: MethodSettings,
    target: float,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """`fit_to_ssim` with pictures drawn in PyTorch."""
    return fit_to_ssim(
        method,
        stats,
        settings,
        target,
        lambda changed: fit_plan(method, stats, model.backbone, changed),
        SsimMeter(model, guidance, stats),
        on_progress,
    )
