"""A plan on other maps keeps its shares, stays valid, and says where it comes from."""

import pytest
from conftest import tiny_model
from plans import DECIDED, STATIC, plan_of

from toprovar.exporter.plan_transfer import carried_over, template_text
from toprovar.exporter.schedules import BUDGET_SCALES, TEMPLATES, schedule_for
from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.plan import COUNT_GRID, MIN_PRUNED_TOKENS, Calibration, Plan, Restore, Score, load_plan, save_plan

LAYERS = 4


def entropy_plan(aspect: float, budget: str, share: float) -> Plan:
    """Prunes every scale that is large enough, layers 2 and 3 by layer 1, to about a share of its tokens."""
    schedule = schedule_for(aspect, budget)
    keep, sources = {}, {}
    reference = None
    for k, (h, w) in enumerate(schedule):
        if h * w < MIN_PRUNED_TOKENS or reference is None:
            reference = k if h * w < MIN_PRUNED_TOKENS or reference is None else reference
            continue
        count = min(-(-int(share * h * w) // COUNT_GRID) * COUNT_GRID, h * w)
        keep[k] = (h * w, h * w, count, 0)
        sources[k] = {2: 1, 3: 1}
    plan = Plan(
        backbone=tiny_model().backbone, schedule=schedule, method="made", keep=keep,
        score=Score(kind="entropy", source_layer=sources), restore=Restore(kind="cached_residual", ref_scale=reference),
        calib=Calibration(measured_ssim=0.9, expected_speedup=1.5),
    )  # fmt: skip
    plan.check()
    return plan


@pytest.mark.parametrize("budget", BUDGET_SCALES)
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_template_takes_a_plan_of_the_square_one(budget: str, name: str) -> None:
    plan = entropy_plan(1.0, budget, 0.4)
    schedule = schedule_for(float(name), budget)
    moved = carried_over(plan, schedule)
    assert moved.schedule == schedule
    assert moved.keep.keys() == plan.keep.keys()
    assert moved.keep
    for k, counts in moved.keep.items():
        before, after = plan.tokens(k), moved.tokens(k)
        assert counts[:2] == (after, after)
        assert counts[3] == 0
        if after >= MIN_PRUNED_TOKENS:
            exact = plan.keep[k][2] * after / before
            assert exact <= counts[2] < exact + COUNT_GRID or counts[2] == after
            assert counts[2] % COUNT_GRID == 0 or counts[2] == after
        else:
            assert counts[2] == after
    assert moved.tle_speedup == pytest.approx(plan.tle_speedup, rel=0.12)  # counts are rounded up to 64


def test_the_plan_says_where_it_comes_from_and_forgets_what_was_measured(tmp_path) -> None:
    moved = carried_over(entropy_plan(1.0, "1M", 0.4), schedule_for(1.5))
    assert moved.calib.template == "1.000 (height over width), 64x64 tokens"
    assert moved.calib.measured_ssim is None
    assert moved.calib.expected_speedup is None
    assert moved.calib.warnings[-1].startswith("counts come from template 1.000")
    assert "scaled to 1.500 (height over width), 78x52 tokens" in moved.calib.warnings[-1]
    save_plan(moved, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == moved
    again = carried_over(moved, schedule_for(0.75))
    assert again.calib.template == moved.calib.template


@pytest.mark.parametrize("name", [*STATIC, *DECIDED])
def test_plans_of_every_kind_carry_over(tiny, name: str) -> None:
    """Scales 4 and 5 of 256 and 400 tokens become 288 and 220: the last one is too small to prune."""
    plan = plan_of(tiny, **{**STATIC, **DECIDED}[name])
    schedule = (*plan.schedule[:4], (24, 12), (20, 11))
    moved = carried_over(plan, schedule)
    assert moved.schedule == schedule
    for k in moved.run_scales:
        assert max(moved.counts(k)) <= moved.tokens(k)
        assert len(moved.choices(k)) <= len(plan.choices(k))
    assert moved.score == plan.score
    assert moved.decisions == plan.decisions


def test_another_budget_is_refused() -> None:
    with pytest.raises(ToprovarError, match="13 scales, the schedule asked for 12") as fault:
        carried_over(entropy_plan(1.0, "1M", 0.4), schedule_for(1.5, "0.60M"))
    assert "calibrate at this budget" in fault.value.hint


def test_schedules_of_no_template_are_told_by_their_last_map() -> None:
    assert template_text(((1, 1), (2, 3), (5, 7))) == "maps up to 5x7 tokens"
