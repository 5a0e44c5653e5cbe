"""A target SSIM: the strongest plan that keeps it, on a made meter and on pictures of the tiny model."""

import numpy as np
import pytest
from conftest import GUIDANCE, SCHEDULE
from made_statistics import backbone_of, statistics_of

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.statistics import collect_statistics
from toprovar.calibrate.targets import SsimMeter, fit_to_ssim, plan_for_ssim
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import dense_plan

BACKBONE = backbone_of(32)


def closeness(plan):
    """Falls with the work that is saved: 1 at a speed-up of 1, 0.8 at 2."""
    return 1 - 0.2 * (plan.expected_speedup - 1)


def fitted(method, target, **settings):
    stats = statistics_of(prompts=40)
    return fit_to_ssim(
        method, stats, MethodSettings(**settings), target,
        lambda changed: fit_plan(method, stats, BACKBONE, changed), closeness,
    )  # fmt: skip


@pytest.mark.parametrize(
    "method", ["fixed_exit", "fastvar", "stepvar", "depthvar", "ld_pruning", "toprovar", "skipvar"]
)
@pytest.mark.parametrize("target", [0.9, 0.75])
def test_the_target_is_kept_and_no_more_work_is_done_than_needed(method, target):
    plan = fitted(method, target)
    assert closeness(plan) >= target
    assert plan.calib.measured_ssim == pytest.approx(closeness(plan), abs=1e-6)
    assert plan.calib.settings["target_ssim"] == target
    most = 1 + (1 - target) / 0.2
    plan.check()
    with pytest.raises(ToprovarError, match="out of reach"):
        fit_plan(method, statistics_of(prompts=40), BACKBONE, MethodSettings(target_speedup=99))
    if method in ("fastvar", "stepvar", "depthvar"):  # these can reach any speed-up in this range closely
        assert plan.tle_speedup >= most * 0.9


def test_a_target_beyond_the_gentlest_plan_is_refused():
    with pytest.raises(
        ToprovarError, match=r"target SSIM 0.99 is out of reach of fastvar: its gentlest plan has 0\.\d"
    ):
        fitted("fastvar", 0.99, preset="paper")


def test_pictures_are_measured_against_dense_ones_of_the_same_noise(tiny, tmp_path):
    stats = collect_statistics(tiny, SCHEDULE, GUIDANCE, ["red apple", "green dog"], 3, tmp_path)
    meter = SsimMeter(tiny, GUIDANCE, stats)
    assert meter(dense_plan(tiny.backbone, SCHEDULE)) == 1
    exits = fit_plan("fixed_exit", stats, tiny.backbone, MethodSettings(scale_depth=3))
    assert meter(exits) == pytest.approx(np.mean(stats.truncated_ssim[:, 3]), abs=1e-6)
    target = float(np.mean(stats.truncated_ssim[:, 4]))
    plan = plan_for_ssim("fixed_exit", tiny, GUIDANCE, stats, MethodSettings(), target)
    assert plan.skip_scales == (5,)
    assert plan.calib.measured_ssim == pytest.approx(target, abs=1e-6)
