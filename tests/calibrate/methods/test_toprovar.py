"""ToProVAR from statistics to plan, on made statistics whose answer is known."""

import math

import numpy as np
import pytest
from made_statistics import backbone_of, statistics_of

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.common import keep_count
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.calibrate.methods.toprovar import fit_depth, fit_layers
from toprovar.calibrate.statistics import Statistics, guard_scale
from toprovar.exporter.schedules import TEMPLATES, schedule_for
from toprovar.runtime.decisions import RhoDecision
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Backbone

SCHEDULE = schedule_for(1.0, "0.25M")
LAYERS = 8
BACKBONE = Backbone(family="infinity", layers=LAYERS, width=192, heads=3, bits=16)
RATIOS = np.array([120.0, 100.0, 12.0, 10.0, 9.0, 8.0, 7.0, 90.0])  # first two and last layer Global


def made(prompts=9, rho=None, ratios=RATIOS):
    """Statistics whose rho falls from 0.6 at the guard scale by 0.05 per scale; SSIM crosses 0.8 at scale 6."""
    curve = np.array([0, 0.5, 0.6, 0.6, 0.6, 0.6, 0.55, 0.50, 0.45, 0.40]) if rho is None else rho
    ssim = np.array([np.nan] * 5 + [0.7, 0.82, 0.9, 0.95, 1.0])
    return Statistics(
        schedule=SCHEDULE,
        prompts=[f"prompt {i}" for i in range(prompts)],
        seeds=list(range(prompts)),
        rho=np.tile(curve, (prompts, 1)),
        mean_entropy=np.ones((prompts, len(SCHEDULE), LAYERS)),
        singular_ratio=np.tile(ratios, (prompts, 1)),
        truncated_ssim=np.tile(ssim, (prompts, 1)),
        shown=[],
        digest="0" * 64,
    )


@pytest.mark.parametrize(("template", "guard"), [("1.000", 8), ("3.000", 8), ("0.500", 8)])
def test_guard_scale_is_relative_to_the_last_map(template, guard):
    assert guard_scale(TEMPLATES[template]) == guard
    assert guard_scale(SCHEDULE) == 5


def test_tau_is_the_median_rho_of_settled_scales_and_depth_its_first_crossing():
    depth = fit_depth(made(), MethodSettings())
    assert depth.direction == "le"
    assert depth.tau == pytest.approx(0.50)  # median of 0.55, 0.50, 0.45: scales 6, 7, 8 are settled
    assert depth.value == 7


def test_a_rising_curve_reads_the_other_way():
    rho = np.array([0, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    depth = fit_depth(made(rho=rho), MethodSettings())
    assert depth.direction == "ge"
    assert depth.value == 7


def test_a_given_tau_direction_and_depth_are_taken():
    assert fit_depth(made(), MethodSettings(tau=0.57)).value == 6
    assert fit_depth(made(), MethodSettings(tau=0.45, direction="ge")).value == 5
    assert fit_depth(made(), MethodSettings(scale_depth=8)).value == 8


def test_no_crossing_means_no_pruning():
    plan = fit_plan("toprovar", made(), BACKBONE, MethodSettings(tau=0.1))
    assert plan.D.mode == "none"
    assert plan.tle_speedup == 1
    assert not plan.keep


def test_the_split_puts_r_at_one_half_and_classes_follow_the_ratio():
    fit = fit_layers(np.tile(RATIOS, (5, 1)))
    assert fit.is_detail.tolist() == [False, False, True, True, True, True, True, False]
    boundary = 1 + math.log(2) / fit.beta
    assert 12 < boundary < 90
    assert np.all((fit.R >= 0.5) == fit.is_detail)


def test_a_layer_that_changes_class_between_prompts_stays_global():
    ratios = np.tile(RATIOS, (10, 1))
    ratios[:4, 4] = 110.0
    fit = fit_layers(ratios)
    assert fit.ambiguous.tolist() == [False] * 4 + [True] + [False] * 3
    assert not fit.is_detail[4]


def test_a_given_number_of_global_layers_takes_the_largest_ratios():
    fit = fit_layers(np.tile(RATIOS, (3, 1)), global_layers=2)
    assert fit.is_detail.tolist() == [False, False] + [True] * 6
    assert fit.beta == pytest.approx(math.log(2) / (math.sqrt(100 * 90) - 1))


@pytest.mark.parametrize(
    ("tokens", "share", "expected"),
    [(1024, 0.0, 1024), (1024, 0.5, 512), (1024, 0.51, 512), (1024, 0.9, 128), (1024, 1.0, 0), (400, 0.1, 384),
     (400, 0.01, 400), (144, 0.9, 144), (256, 0.75, 64), (1497, 0.5, 768)],
)  # fmt: skip
def test_keep_counts_round_up_to_the_grid(tokens, share, expected):
    assert keep_count(tokens, share) == expected


def test_the_plan_prunes_detail_layers_after_the_depth_by_the_expected_count_rule():
    plan = fit_plan("toprovar", made(), BACKBONE, MethodSettings())
    plan.check()
    assert sorted(plan.keep) == [8, 9]  # D = 7
    fit = fit_layers(made().singular_ratio)
    share = 0.9 * (9 / 10) * fit.R[3]
    assert plan.counts(8)[3] == 64 * math.ceil(576 * (1 - share) / 64)
    assert plan.counts(8)[0] == plan.counts(8)[1] == plan.counts(8)[7] == 576
    assert plan.score.source_layer[8] == dict.fromkeys([2, 3, 4, 5, 6], 1)
    assert plan.restore.ref_scale == 7


def test_the_first_layer_stays_dense_even_if_its_score_says_detail():
    plan = fit_plan("toprovar", made(ratios=RATIOS[::-1].copy()), BACKBONE, MethodSettings(scale_depth=6))
    assert plan.layers.classes[0] == "global"
    plan = fit_plan("toprovar", made(ratios=np.roll(RATIOS, 3)), BACKBONE, MethodSettings(scale_depth=6))
    assert plan.layers.classes[0] == "global"
    assert any("layer 0" in warning for warning in plan.calib.warnings)


def test_paper_preset_skips_the_last_two_scales():
    plan = fit_plan("toprovar", made(), BACKBONE, MethodSettings(preset="paper", scale_depth=6))
    assert plan.skip_scales == (8, 9)
    assert sorted(plan.keep) == [7]
    share = 0.9 * (8 / 8) * fit_layers(made().singular_ratio).R[2]  # the last scale that runs has phi = 1
    assert plan.counts(7)[2] == keep_count(400, share)


@pytest.mark.parametrize("target", [1.2, 1.5, 1.9])
def test_a_target_is_reached_closely_and_as_late_as_possible(target):
    plan = fit_plan("toprovar", made(), BACKBONE, MethodSettings(target_speedup=target, tau=0.6))
    assert target <= plan.tle_speedup < target * 1.15
    later = MethodSettings(target_speedup=target, scale_depth=plan.D.value + 1)
    with pytest.raises(ToprovarError, match="out of reach"):
        fit_plan("toprovar", made(), BACKBONE, later)


def test_a_target_may_need_an_earlier_depth_than_rho_tells_and_the_plan_says_so():
    stats = made()
    told = fit_depth(stats, MethodSettings()).value
    gentle = fit_plan("toprovar", stats, BACKBONE, MethodSettings(target_speedup=1.3))
    assert gentle.D.value >= told
    assert not any("rho tells" in warning for warning in gentle.calib.warnings)
    strong = fit_plan("toprovar", stats, BACKBONE, MethodSettings(target_speedup=2.5))
    assert stats.guard_scale <= strong.D.value < told
    assert f"rho tells {told}" in " ".join(strong.calib.warnings)


def test_a_target_out_of_reach_says_what_is_in_reach():
    with pytest.raises(ToprovarError, match=r"out of reach: at most \d\.\d\d times"):
        fit_plan("toprovar", made(), BACKBONE, MethodSettings(target_speedup=50))


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("magic", MethodSettings(), "unknown method magic"),
        ("toprovar", MethodSettings(scale_depth=10), "scale depth 10"),
        ("toprovar", MethodSettings(global_layers=9), "9 Global layers"),
        ("toprovar", MethodSettings(alpha_min=0.95), "alpha-min"),
    ],
)
def test_settings_that_contradict_the_model_are_named(method, settings, message):
    with pytest.raises(ToprovarError, match=message):
        fit_plan(method, made(), BACKBONE, settings)


# -- stages and adaptive depth -----------------------------------------------------------------------------------------

FULL = backbone_of(32)


def full_size(**settings):
    """Six Global layers of 32, pruning behind scale 9, the last two scales skipped: the paper's 2B ablation."""
    return fit_plan("toprovar", statistics_of(), FULL, MethodSettings(preset="paper", scale_depth=9, **settings))


def test_the_stages_reproduce_the_rows_of_the_ablation():
    """Work as the paper's arithmetic has it: 2521 tokens up to 32x32, 1600 behind them."""
    work = {
        stages: full_size(options={"stages": stages}).token_layer_equivalents
        for stages in ("none", "scale", "scale,token", "scale,layer", "scale,layer,token")
    }
    assert work["none"] == work["scale"] == 2521  # a given depth; without one, `none` looks at nothing (below)
    assert work["scale,layer"] == pytest.approx(2521 + 1600 * 6 / 32)
    R = fit_layers(statistics_of().singular_ratio).R[3]
    kept = keep_count(1600, 0.9 * R)
    assert work["scale,layer,token"] == pytest.approx(2521 + 1600 * 6 / 32 + kept * 26 / 32)
    assert work["scale,token"] == pytest.approx(2521 + 1600 / 32 + keep_count(1600, 0.9) * 31 / 32)
    assert work["scale,layer"] < work["scale,layer,token"]
    plan = full_size(options={"stages": "scale,layer"})
    assert set(plan.counts(10)) == {0, 1600}
    assert plan.score.source_layer == {10: {}}


def test_without_stages_the_exit_is_the_guard_scale_for_all():
    plan = fit_plan("toprovar", made(), BACKBONE, MethodSettings(options={"stages": "none"}))
    assert plan.skip_scales == (6, 7, 8, 9)
    assert fit_plan("toprovar", made(), BACKBONE, MethodSettings(options={"stages": "scale"})).skip_scales == (8, 9)


def test_each_picture_may_have_its_own_depth():
    rho = np.stack([np.full(10, 0.6)] * 3)
    rho[0, 6:], rho[1, 7:] = 0.3, 0.3  # D = 6, D = 7, never
    stats = made(prompts=3)
    stats.rho[:] = rho
    settings = MethodSettings(tau=0.4, direction="le", options={"depth": "adaptive"})
    plan = fit_plan("toprovar", stats, BACKBONE, settings)
    decision = plan.decision(RhoDecision)
    assert decision.paths == {6: "D = 6", 7: "D = 7"}
    assert decision.layers == tuple(range(LAYERS))
    assert not plan.keep
    for depth, name in decision.paths.items():
        path, static = plan.on_path(name), fit_plan(
            "toprovar", stats, BACKBONE, MethodSettings(tau=0.4, direction="le", scale_depth=depth)
        )  # fmt: skip
        assert path.keep == static.keep
        assert path.restore == static.restore
    work = [plan.on_path(name).token_layer_equivalents for name in decision.paths.values()] + [2521]
    assert plan.expected_speedup == pytest.approx(2521 / np.mean(work), abs=1e-5)
    with pytest.raises(ToprovarError, match="one depth for all"):
        fit_plan("toprovar", stats, BACKBONE, MethodSettings(target_speedup=1.5, options={"depth": "adaptive"}))


def test_stages_that_do_not_exist_are_refused():
    with pytest.raises(ToprovarError, match=r"option stages.1 of method toprovar"):
        full_size(options={"stages": "scale,head"})
