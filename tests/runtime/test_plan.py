"""Plans: arithmetic, and a precise refusal for every rule they can break."""

import json

import pytest

from toprovar.runtime.decisions import (
    EnergyMassDecision,
    LogisticModel,
    RhoDecision,
    SatsDecision,
    SkipvarDecision,
)
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import (
    Backbone,
    CfgStop,
    CodeWeight,
    Plan,
    PlanPath,
    Restore,
    Score,
    dense_plan,
    load_plan,
    save_plan,
)

SCHEDULE = tuple((side, side) for side in (1, 2, 4, 8, 16, 20, 24))
BACKBONE = Backbone(family="infinity", layers=4, width=64, heads=2, bits=16)


def planned(**changes):
    """A plan that prunes scales 5 (400 tokens) and 6 (576 tokens) in layers 2 and 3."""
    values = {
        "backbone": BACKBONE,
        "schedule": SCHEDULE,
        "method": "toprovar",
        "score": Score(kind="entropy", source_layer={5: {2: 1, 3: 1}, 6: {2: 1, 3: 1}}),
        "keep": {5: (400, 400, 192, 0), 6: (576, 576, 256, 128)},
        "restore": Restore(kind="cached_residual", ref_scale=4),
    }
    return Plan(**{**values, **changes})


def test_a_good_plan_passes_and_survives_a_round_trip(tmp_path):
    plan = planned()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_cached_tokens_add_up_the_counts_of_earlier_scales():
    plan = planned()
    before = 1 + 4 + 16 + 64 + 256
    assert plan.cached_tokens(5) == (before,) * 4
    assert plan.cached_tokens(6) == (before + 400, before + 400, before + 192, before)


def test_token_layer_equivalents_count_tokens_through_the_whole_depth():
    dense = dense_plan(BACKBONE, SCHEDULE)
    assert dense.token_layer_equivalents == sum(h * w for h, w in SCHEDULE)
    assert dense.tle_speedup == 1
    plan = planned()
    assert plan.token_layer_equivalents == pytest.approx(341 + (400 * 2 + 192) / 4 + (576 * 2 + 256 + 128) / 4)


def test_residuals_are_kept_for_restored_layers_at_the_reference_scale_only():
    plan = planned()
    assert plan.residual_layers(4) == [2, 3]
    assert plan.residual_layers(3) == []
    assert planned(restore=Restore()).residual_layers(4) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": {5: (400, 400, 193, 0)}}, "multiple of 64"),
        ({"keep": {5: (400, 400, 448, 0)}}, "keeps 448 tokens at scale 5, layer 2; the scale has 400"),
        ({"keep": {5: (400, 400, 192)}}, "3 counts; the backbone has 4"),
        ({"keep": {3: (64, 64, 64, 0)}, "restore": Restore(kind="cached_residual", ref_scale=4)}, "must come before"),
        ({"keep": {9: (1, 1, 1, 1)}}, "scales 0 to 6"),
        ({"score": Score()}, "without a score source"),
        ({"score": Score(kind="entropy", source_layer={5: {2: 3, 3: 1}, 6: {2: 1, 3: 1}})}, "must come before it"),
        (
            {"keep": {5: (400, 192, 192, 0)}, "score": Score(kind="entropy", source_layer={5: {1: 0, 2: 1}})},
            "must come before it, and run all|run all 400",
        ),
        ({"restore": Restore(kind="cached_residual", ref_scale=5)}, "is pruned itself"),
        ({"restore": Restore(kind="cached_residual")}, "expected a scale that runs"),
        ({"restore": Restore(kind="cached_residual", ref_scale=40)}, "expected a scale that runs"),
        ({"skip_scales": (5,), "keep": {}}, "suffix"),
        ({"skip_scales": (6,)}, "leaves out"),
        ({"skip_scales": tuple(range(7)), "keep": {}}, "skips every scale"),
    ],
)
def test_a_broken_rule_is_named(changes, message):
    with pytest.raises(ToprovarError, match=message):
        planned(**changes).check()


WHOLE = {"score": Score(kind="code_energy", granularity="scale"), "keep": {5: (192,) * 4, 6: (256,) * 4}}
BY_SCALE = {**WHOLE, "restore": Restore(kind="prev_code")}
MASS, SATS = EnergyMassDecision(mass=0.5), SatsDecision(scales=(4, 5), delta=0.1)
LADDER = {**BY_SCALE, "ladder": {5: (64, 192, 400), 6: (256, 576)}, "decisions": (MASS,)}
RHO = RhoDecision(tau=0.4, direction="le", layers=(0, 1), paths={5: "late"})
LATE = {
    "keep": {}, "paths": {"late": PlanPath(keep={6: (576, 576, 256, 128)})}, "decisions": (RHO,),
}  # fmt: skip
MODEL = LogisticModel(mean=(0, 0), std=(1, 1), weights=((0, 0), (0, 0)), intercepts=(0, 0), labels=(0, 1))
SKIPVAR = SkipvarDecision(scale=4, feature_scale=3, skip=MODEL, skip_paths={1: "exit"})
EXIT = {
    "keep": {}, "score": Score(), "restore": Restore(), "paths": {"exit": PlanPath(skip_scales=(5, 6))},
    "decisions": (SKIPVAR,),
}  # fmt: skip


@pytest.mark.parametrize("changes", [BY_SCALE, LADDER, LATE, EXIT, {"cfg_stop": CfgStop(mode="static", scale=5)}])
def test_parts_of_the_schema_go_together(changes, tmp_path):
    plan = planned(**changes)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": Score(kind="structure")}, "kind structure has granularity block; expected scale"),
        ({"restore": Restore(kind="nn_kept")}, "restore is nn_kept where tokens are gathered per block"),
        ({**WHOLE, "restore": Restore(kind="prev_residual")}, "restore is prev_residual where .* per scale"),
        ({**BY_SCALE, "keep": {5: (192, 192, 256, 192)}}, "192 to 256 tokens at scale 5"),
        ({**BY_SCALE, "keep": {5: (0,) * 4}}, "keeps no token at scale 5, layer 0"),
        ({**BY_SCALE, "keep": {5: (100,) * 4}}, "multiple of 64"),
        ({**BY_SCALE, "score": Score(kind="code_energy", granularity="scale", row="each")}, "row is each"),
        ({"score": Score(kind="variance", source_layer={5: {2: 1}})}, "belongs to the score entropy; found variance"),
        ({"score": Score(kind="change", rotation={9: 0.1}), "keep": {}}, "rotation names scale 9"),
        ({**LADDER, "decisions": ()}, "no energy_mass decision"),
        ({**BY_SCALE, "decisions": (MASS,)}, "energy_mass without a ladder"),
        ({**LADDER, "ladder": {5: (64, 64, 400)}}, "without duplicates"),
        ({**LADDER, "ladder": {5: (192, 64, 400)}}, "rising counts"),
        ({**LADDER, "ladder": {5: (64, 192)}}, "up to all 400 tokens"),
        ({**LADDER, "ladder": {5: (65, 192, 400)}}, "multiple of 64"),
        ({**LADDER, "ladder": {5: (64, 256, 400)}}, "keeps 192 tokens at scale 5, which is no rung"),
        ({"decisions": (SATS,)}, "mode decided go together"),
        ({"cfg_stop": CfgStop(mode="decided")}, "mode decided go together"),
        ({"cfg_stop": CfgStop(mode="decided"), "decisions": (SATS, SATS)}, "expected each kind once"),
        (
            {"cfg_stop": CfgStop(mode="decided"), "decisions": (SatsDecision(scales=(4, 4), delta=0.1),)},
            "without duplicates",
        ),
        ({"cfg_stop": CfgStop(mode="static")}, "cfg_stop.scale is None"),
        ({"cfg_stop": CfgStop(mode="static", scale=7)}, "cfg_stop.scale is 7"),
        ({"cfg_stop": CfgStop(mode="none", scale=3)}, "only static has one"),
        ({"code_weight": CodeWeight(kind="depth", ramp={5: (0.1, 1.0)})}, "needs the score change"),
        ({"code_weight": CodeWeight(ramp={5: (0.1, 1.0)})}, "a ramp and kind none"),
        ({**LATE, "paths": {}}, "leads to path late; plan.paths has none"),
        ({**EXIT, "paths": {**EXIT["paths"], "idle": PlanPath()}}, "no decision leads to path idle"),
        ({**EXIT, "paths": {"exit": PlanPath(skip_scales=(4, 5, 6))}}, "differs from the plan at scale 4 already"),
        ({**EXIT, "paths": {"exit": PlanPath(cfg_stop=3)}}, "differs from the plan at scale 3 already"),
        ({**EXIT, "paths": {"exit": PlanPath(skip_scales=(5,))}}, "path exit: plan.skip_scales is .5.; expected"),
        ({**EXIT, "decisions": (SKIPVAR.model_copy(update={"scale": 6}),)}, "skipvar decides after scale 6"),
        ({**EXIT, "decisions": (SKIPVAR, RHO)}, "rho and skipvar"),
        ({**LATE, "keep": {5: (400, 192, 192, 0)}, "score": Score(kind="entropy", source_layer={5: {1: 0, 2: 0}})},
         "rho averages layer 1 at scale 5"),
        ({"restore": Restore(kind="prev_residual"), "score": Score(kind="variance"), "grid": 1,
          "keep": {0: (0, 1, 1, 1)}}, "scale 0 is pruned; nothing comes before it"),
    ],
)  # fmt: skip
def test_a_broken_rule_of_parts_and_decisions_is_named(changes, message):
    with pytest.raises(ToprovarError, match=message):
        planned(**changes).check()


def test_a_plan_tells_what_its_decisions_can_save():
    plan = planned(**LADDER)
    dense = sum(h * w for h, w in SCHEDULE)
    assert plan.tle_speedup == pytest.approx(dense / (341 + 192 + 256))
    assert plan.tle_range == (1.0, pytest.approx(dense / (341 + 64 + 256)))
    half = planned(keep={}, score=Score(), restore=Restore(), cfg_stop=CfgStop(mode="static", scale=6))
    assert half.token_layer_equivalents == 341 + 400 + 576 / 2
    assert planned(**EXIT).tle_range == (1.0, pytest.approx(dense / 341))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"schema_version": 1}, "schema version 1; this toprovar reads version 2"),
        ({"schema_version": "2"}, "schema_version"),
        ({"surprise": 1}, "surprise"),
        ({"keep": {"5": [400, 400, -64, 0]}}, "keep.5.2"),
        ({"keep": {"5": [400, 400, 192.5, 0]}}, "keep.5.2"),
        ({"schedule": []}, "schedule"),
        ({"restore": {"kind": "magic"}}, "restore.kind"),
        ({"score": {"kind": "magic"}}, "score.kind"),
        ({"decisions": [{"kind": "magic"}]}, "decisions.0"),
        ({"decisions": [{"kind": "sats", "scales": [4], "delta": -1}]}, "decisions.0.sats.delta"),
        ({"ladder": {"5": [-64]}}, "ladder.5.0"),
    ],
)
def test_a_damaged_file_names_the_place(tmp_path, edit, message):
    path = tmp_path / "plan.json"
    save_plan(planned(), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(ToprovarError, match=message) as caught:
        load_plan(path)
    assert "plan.json" in caught.value.message


@pytest.mark.parametrize("field", ["family", "layers", "width", "heads", "bits"])
def test_a_plan_for_another_model_is_refused(field):
    values = BACKBONE.model_dump()
    values[field] = "var" if field == "family" else values[field] * 2
    with pytest.raises(ToprovarError, match=f"another model: {field}"):
        planned().check_backbone(Backbone(**values), SCHEDULE)


def test_a_plan_for_another_schedule_is_refused():
    with pytest.raises(ToprovarError, match="another schedule"):
        planned().check_backbone(BACKBONE, SCHEDULE[:-1])
