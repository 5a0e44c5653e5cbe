"""StepVAR, DepthVAR and LD-Pruning: what their plans say, on made statistics."""

import numpy as np
import pytest
from made_statistics import backbone_of, statistics_of

from toprovar.calibrate.fitting import fit_plan
from toprovar.calibrate.methods.depthvar import active_counts, depth_ramp, layer_order
from toprovar.calibrate.methods.ld_pruning import ladder_of
from toprovar.calibrate.methods.settings import MethodSettings
from toprovar.runtime.decisions import EnergyMassDecision, SatsDecision
from toprovar.runtime.errors import ToprovarError

BACKBONE = backbone_of(32)


def fitted(method, **settings):
    plan = fit_plan(method, statistics_of(), BACKBONE, MethodSettings(**settings))
    plan.check()
    return plan


# -- StepVAR -----------------------------------------------------------------------------------------------------------


def test_stepvar_gathers_late_scales_whole():
    plan = fitted("stepvar")
    assert [set(plan.counts(k)) for k in (9, 10, 11, 12)] == [{640}, {832}, {576}, {640}]
    assert (plan.score.kind, plan.score.granularity, plan.restore.kind) == ("structure", "scale", "nn_kept")
    assert (plan.score.structure_weight, plan.score.iterations) == (1.0, 4)
    paper = fitted("stepvar", preset="paper", options={"weight": "0.25", "iterations": 2})
    assert paper.skip_scales == (11, 12)
    assert sorted(paper.keep) == [9, 10]
    assert (paper.score.structure_weight, paper.score.iterations) == (0.25, 2)


# -- DepthVAR ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "first"),
    [
        (32, [0, 16, 8, 24, 4, 20, 12, 28, 2]),
        (40, [0, 32, 16, 8, 24, 4, 36, 20]),
        (24, [0, 16, 8, 4, 20, 12, 2, 18]),
    ],
)
def test_layers_come_in_bit_reversed_order(layers, first):
    order = layer_order(layers)
    assert order[: len(first)] == first
    assert sorted(order) == list(range(layers))


@pytest.mark.parametrize("layers", [8, 24, 32, 40])
@pytest.mark.parametrize("mean", [0.05, 0.14, 0.36, 0.5625, 0.9, 1.0])
def test_the_ramp_has_its_mean_and_is_never_clipped(layers, mean):
    low, high = depth_ramp(mean, layers)
    assert (low + high) / 2 == pytest.approx(max(mean, 1 / layers))
    assert 1 / layers - 1e-12 <= low <= high <= 1 + 1e-12


@pytest.mark.parametrize("layers", [24, 32, 40])
def test_active_counts_are_those_of_tokens_taken_one_by_one(layers):
    tokens, ramp = 1024, depth_ramp(0.5625, layers)
    depths = [int((ramp[0] + (ramp[1] - ramp[0]) * (i + 0.5) / tokens) * layers + 1e-9) for i in range(tokens)]
    found = active_counts(tokens, ramp, layers)
    order = layer_order(layers)
    assert [found[layer] for layer in order] == sorted(found, reverse=True)  # sets are prefixes of one order
    assert len({found[layer] for layer in order}) <= 8 + 1  # at most eight depths, and no token at all
    exact = [sum(depth > rank for depth in depths) for rank in range(layers)]
    assert abs(sum(found) - sum(exact)) <= 0.03 * sum(exact)  # eight levels instead of all
    assert found[order[0]] == tokens


@pytest.mark.parametrize(("reference", "expected"), [(9, 1.88), (8, 2.77), (7, 3.60)])
def test_a_late_scale_spends_as_much_as_the_reference(reference, expected):
    """The predictions of the budget rule. Depths are whole layers, rounded down: half a layer less per token; counts
    are rounded up to the grid. Together 3 to 5 % less work."""
    plan = fitted("depthvar", options={"reference": reference})
    assert min(plan.keep) == reference + 1
    assert expected <= plan.tle_speedup <= expected * 1.06
    assert plan.restore.ref_scale == reference
    assert plan.score.rotation[min(plan.keep)] == 0
    assert plan.score.rotation[12] == pytest.approx(0.5 * (11 - reference) / (12 - reference), abs=1e-6)
    low, high = plan.code_weight.ramp[12]
    budget = {9: 1024, 8: 576, 7: 400}[reference]
    assert (low + high) / 2 == pytest.approx(budget / 4096, abs=1e-5)


def test_codes_may_go_unweighted():
    assert fitted("depthvar", options={"weighted": "no"}).code_weight.kind == "none"


# -- LD-Pruning --------------------------------------------------------------------------------------------------------


def test_the_ladder_is_eighths_on_the_grid():
    assert ladder_of(1600) == (256, 448, 640, 832, 1024, 1216, 1600)
    assert ladder_of(4096) == (512, 1024, 1536, 2048, 2560, 3072, 4096)
    assert ladder_of(256) == (64, 128, 192, 256)


def test_ld_pruning_decides_counts_and_guidance():
    plan = fitted("ld_pruning")
    assert sorted(plan.ladder) == [10, 11, 12]
    assert plan.decision(EnergyMassDecision).mass == 0.5
    sats = plan.decision(SatsDecision)
    assert (sats.scales, sats.delta, sats.norm) == ((9, 10, 11), 0.15, "rms")
    assert plan.cfg_stop.mode == "decided"
    assert (plan.restore.kind, plan.score.granularity) == ("prev_code", "scale")
    # half of the energy is in half of the tokens: the rung of one half
    assert [plan.counts(k)[0] for k in (10, 11, 12)] == [832, 1152, 2048]
    paper = fitted("ld_pruning", preset="paper")
    assert sorted(paper.ladder) == [10]
    assert paper.decision(SatsDecision).scales == (9,)


def test_the_expected_work_counts_rungs_and_the_end_of_guidance():
    """Gaps that stay put end guidance after scale 9; those that double never do."""
    even, doubling = np.ones((4, 13)), np.tile(2.0 ** np.arange(13), (4, 1))
    alone = fitted("ld_pruning", options={"sats_scales": 0}).expected_speedup
    assert alone == pytest.approx(10521 / (2521 + 832 + 1152 + 2048), abs=1e-5)
    goes_on = fit_plan("ld_pruning", statistics_of(guidance_gap=doubling), BACKBONE, MethodSettings())
    assert goes_on.expected_speedup == pytest.approx(alone)
    ends = fit_plan("ld_pruning", statistics_of(guidance_gap=even), BACKBONE, MethodSettings())
    assert ends.expected_speedup == pytest.approx(10521 / (2521 + (832 + 1152 + 2048) / 2), abs=1e-5)
    # the L2 norm over 1600 to 4096 tokens of a scale against 832 to 2048 that run: no step is below 15 %
    l2 = MethodSettings(options={"norm": "l2"})
    assert (
        fit_plan("ld_pruning", statistics_of(guidance_gap=even), BACKBONE, l2).expected_speedup < ends.expected_speedup
    )


def test_fixed_counts_are_enough_for_nine_of_ten_prompts():
    stats = statistics_of(prompts=10)
    stats.energy_tokens[9, 12] = 4096  # one prompt of ten needs all
    plan = fit_plan("ld_pruning", stats, BACKBONE, MethodSettings(options={"counts": "fixed"}))
    assert not plan.ladder
    assert plan.decision(EnergyMassDecision) is None
    needed = np.percentile([2048] * 9 + [4096], 90)
    assert plan.counts(12)[0] == -(-int(needed) // 64) * 64


def test_parts_of_ld_pruning_can_be_left_out():
    plan = fitted("ld_pruning", options={"sats_scales": 0})
    assert plan.cfg_stop.mode == "none"
    assert [decision.kind for decision in plan.decisions] == ["energy_mass"]
    plan = fitted("ld_pruning", options={"lhep_scales": "0", "norm": "l2"})
    assert not plan.keep
    assert [decision.kind for decision in plan.decisions] == ["sats"]


def test_statistics_without_code_energy_are_refused():
    with pytest.raises(ToprovarError, match="hold no energy_tokens"):
        fit_plan("ld_pruning", statistics_of(energy_tokens=None), BACKBONE, MethodSettings())


@pytest.mark.parametrize("method", ["stepvar", "depthvar", "ld_pruning"])
@pytest.mark.parametrize("target", [1.2, 1.8])
def test_a_target_is_reached_closely(method, target):
    plan = fitted(method, target_speedup=target)
    assert target <= plan.expected_speedup <= target * 1.25
    with pytest.raises(ToprovarError, match=r"out of reach: at most \d+\.\d\d times"):
        fitted(method, target_speedup=60)


# -- Options that a model cannot have ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fastvar", {"first_layer": 32}, "first_layer: found 32; the model has 13 scales and 32 layers"),
        ("fastvar", {"last_layer": 40}, "last_layer: found 40"),
        ("fastvar", {"ratios": ",".join(["0.5"] * 14)}, "ratios: found 14 entries"),
        ("fastvar", {"ratios": ""}, "ratios"),
        ("stepvar", {"ratios": ",".join(["0.5"] * 14)}, "ratios: found 14 entries"),
        ("stepvar", {"weight": "1e308"}, "weight"),
        ("depthvar", {"reference": 13}, "reference: found 13"),
    ],
)
def test_options_beyond_the_model_are_refused(method, options, message):
    with pytest.raises(ToprovarError, match=message) as error:
        fitted(method, options=options)
    assert error.value.hint


def test_options_beyond_the_model_are_refused_before_anything_is_measured():
    from toprovar.calibrate.fitting import check_model_fits

    with pytest.raises(ToprovarError, match="first_layer: found 9; the model has 10 scales and 8 layers"):
        check_model_fits("fastvar", MethodSettings(options={"first_layer": 9}), scales=10, layers=8)
    check_model_fits("fastvar", MethodSettings(options={"first_layer": 7}), scales=10, layers=8)
