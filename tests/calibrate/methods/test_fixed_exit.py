"""Fixed exit: which scales run, and that a plan of it exports and draws what PyTorch draws."""

import numpy as np
import pytest
from conftest import GUIDANCE, SCHEDULE
from helpers import differing_bits, generate_in_torch, open_pipeline

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import Statistics
from toprovar.exporter.bundle_writer import export_bundle
from toprovar.exporter.planned.step import StepOptions
from toprovar.exporter.schedules import schedule_for
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Backbone

DEMO = schedule_for(1.0, "0.25M")
BACKBONE = Backbone(family="infinity", layers=8, width=192, heads=3, bits=16)


def made(schedule, ssim):
    scales = len(schedule)
    return Statistics(
        schedule=schedule,
        prompts=["a", "b"],
        seeds=[0, 1],
        rho=np.full((2, scales), 0.5),
        mean_entropy=np.ones((2, scales, 8)),
        singular_ratio=np.full((2, 8), 9.0),
        truncated_ssim=np.tile(ssim, (2, 1)),
        shown=[],
        digest="0" * 64,
    )


STATS = made(DEMO, [np.nan] * 5 + [0.70, 0.79, 0.83, 0.92, 1.0])


def test_without_a_wish_the_first_settled_scale_is_the_last_one():
    plan = fit_plan("fixed_exit", STATS, BACKBONE, MethodSettings())
    assert plan.skip_scales == (8, 9)
    assert plan.tle_speedup == pytest.approx(2521 / 921)


def test_a_given_depth_is_the_last_scale_that_runs():
    assert fit_plan("fixed_exit", STATS, BACKBONE, MethodSettings(scale_depth=5)).skip_scales == (6, 7, 8, 9)
    assert fit_plan("fixed_exit", STATS, BACKBONE, MethodSettings(scale_depth=9)).tle_speedup == 1


@pytest.mark.parametrize(("target", "first_skipped"), [(1.5, 9), (2.0, 8), (3.0, 7), (5.0, 6)])
def test_a_target_takes_the_latest_exit_that_reaches_it(target, first_skipped):
    plan = fit_plan("fixed_exit", STATS, BACKBONE, MethodSettings(target_speedup=target))
    assert plan.skip_scales[0] == first_skipped
    assert plan.tle_speedup >= target


def test_a_target_beyond_the_guard_scale_is_refused():
    with pytest.raises(ToprovarError, match=r"at most 9\.51 times"):
        fit_plan("fixed_exit", STATS, BACKBONE, MethodSettings(target_speedup=10))


def test_the_plan_exports_and_draws_what_pytorch_draws(tiny, tmp_path):
    stats = made(SCHEDULE, [np.nan] * 3 + [0.9, 0.95, 1.0])
    plan = fit_plan("fixed_exit", stats, tiny.backbone, MethodSettings())
    export_bundle(tiny, tmp_path / "b", GUIDANCE, StepOptions(text_tokens=12), plan)
    result = open_pipeline(tmp_path / "b").generate("red apple", 3, "planned")
    run = generate_in_torch(tiny, SCHEDULE, GUIDANCE, "red apple", 3, plan=plan)
    assert len(result.steps) == 4
    assert sum(differing_bits(run, result.bits)) == 0
