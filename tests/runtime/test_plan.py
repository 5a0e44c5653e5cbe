"""Plans: arithmetic, and a precise refusal for every rule they can break."""

import json

import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import Backbone, Plan, Restore, Score, dense_plan, load_plan, save_plan

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


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"schema_version": "1"}, "schema_version"),
        ({"surprise": 1}, "surprise"),
        ({"keep": {"5": [400, 400, -64, 0]}}, "keep.5.2"),
        ({"keep": {"5": [400, 400, 192.5, 0]}}, "keep.5.2"),
        ({"schedule": []}, "schedule"),
        ({"restore": {"kind": "magic"}}, "restore.kind"),
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
