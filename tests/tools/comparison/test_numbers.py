"""From pictures to published numbers, on records whose answers are known."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from toprovar.tools.comparison.numbers import (
    adherence_facts,
    bit_facts,
    raw_facts,
    time_facts,
    variant_facts,
    work_facts,
)
from toprovar.tools.comparison.records import Drawn, DrawnJournal, work_of
from toprovar.tools.comparison.winners import find_winners, sentence
from toprovar.tools.evaluation.closeness import NO_INDEX, NOT_DRAWN, equal_bits, equal_shares
from toprovar.tools.evaluation.intervals import paired_difference, wilson_interval

BASE = Drawn(
    prompt=0, variant="dense", seed=0, steps_ms=100.0, text_ms=3.0, decode_ms=9.0, scale_ms=[40.0, 60.0],
    work_tokens=20.0, ssim=1.0, psnr_db=100.0, bits=[[8, 8, 8], [32, 32, 32]], decisions=[], right={"concept": True},
)  # fmt: skip


def records(count=6, **changes):
    """changes: per field a value, or a list of one per prompt."""

    def at(i):
        return {name: v[i] if isinstance(v, list) and name != "bits" else v for name, v in changes.items()}

    return [replace(BASE, prompt=i, seed=i, **at(i)) for i in range(count)]


def test_work_counts_steps_without_unconditional_rows_half():
    steps = [
        SimpleNamespace(counts=(4, 4), guided=True),
        SimpleNamespace(counts=(16, 8), guided=True),
        SimpleNamespace(counts=(16, 16), guided=False),
    ]
    assert work_of(steps, 2) == 4 + 12 + 8


def test_the_speed_up_taken_is_dense_work_over_mean_work():
    facts = work_facts(records(work_tokens=[10.0, 20.0, 10.0, 10.0, 10.0, 20.0]), records(), None)
    assert facts["taken"] == pytest.approx(20 / (80 / 6), abs=1e-4)
    assert facts["interval"][0] < facts["taken"] < facts["interval"][1]
    assert work_facts(records(work_tokens=8.0), records(), None)["interval"] == [2.5, 2.5]


def test_wall_clock_is_the_median_of_ratios_prompt_by_prompt():
    facts = time_facts(records(3, steps_ms=[50.0, 25.0, 400.0]), records(3, steps_ms=[100.0, 100.0, 400.0]))
    assert facts["speedup"] == 2.0  # ratios 2, 4, 1
    assert facts["median"] == 50.0
    assert facts["interval"] == [1.0, 4.0]


def test_bits_are_shared_out_over_those_that_were_drawn():
    dense = [np.zeros((1, 4), np.uint8), np.ones((4, 4), np.uint8)]
    mine = [np.zeros((1, 4), np.uint8), np.ones((4, 4), np.uint8)]
    mine[1][0] = NOT_DRAWN
    mine[1][1, :2] = 0
    assert equal_bits(mine, dense) == [[4, 4, 4], [10, 12, 16]]
    assert equal_shares(mine[:1], dense) == [1.0]
    assert equal_shares(mine, dense) == [1.0, 10 / 16]
    facts = bit_facts(records(2, bits=[[4, 4, 4], [10, 12, 16]]), 3)
    assert facts == {"share": round(14 / 16, 6), "drawn": 0.8, "per_scale": [1.0, round(10 / 12, 6), None]}


def test_pictures_that_end_at_different_scales_are_counted_where_they_ran():
    longer, shorter = records(1)[0], records(1, bits=[[4, 8, 8]])[0]
    assert bit_facts([longer, shorter], 2)["per_scale"] == [0.75, 1.0]
    facts = variant_facts([replace(longer, scale_ms=[4.0]), longer], records(2), None, {"name": "x"}, 3)
    assert facts["scale_ms_median"] == [22.0, 60.0, None]


def test_adherence_is_a_share_with_wilson_s_interval_and_a_paired_difference():
    mine = records(right=[{"a": True, "b": i != 1} for i in range(6)])
    base = records(right=[{"a": i > 2, "b": True} for i in range(6)])
    facts = adherence_facts(mine, base)
    assert (facts["right"], facts["count"]) == (5, 6)
    assert facts["interval"] == pytest.approx(wilson_interval(5, 6), abs=1e-6)
    difference, low, high = paired_difference([i != 1 for i in range(6)], [i > 2 for i in range(6)])
    assert facts["to_dense"]["difference"] == pytest.approx(difference, abs=1e-6)
    assert facts["to_dense"]["interval"] == pytest.approx([low, high], abs=1e-6)
    assert adherence_facts(records(right=None), None) is None


def test_raw_values_stand_one_per_prompt():
    facts = raw_facts(records(3, steps_ms=[1.0, 2.0, 3.0], right=[{"a": True}, {"a": False}, None]))
    assert facts["steps_ms"] == [1.0, 2.0, 3.0]
    assert facts["right"] == "10-"
    assert facts["wrong_aspects"] == [[], ["a"], []]
    assert facts["drawn_bits"] == [40, 40, 40]


def test_a_record_comes_back_from_its_line():
    record = replace(BASE, decisions=[[9, "path", "exit after 8"]])
    assert DrawnJournal.record(DrawnJournal.line("id", record)) == ("id", record)
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        DrawnJournal.record(DrawnJournal.line("id", record)[:80])


def variant(name, method, ssim, tle, right="111111", wall=None):
    mine = records(
        ssim=list(ssim),
        work_tokens=20 / tle,
        steps_ms=100 / (wall or tle),
        right=[{"a": mark == "1"} for mark in right],
        variant=name,
    )
    plan = SimpleNamespace(tle_speedup=tle, expected_speedup=tle, tle_range=(tle, tle), decisions=())
    return variant_facts(mine, records(), plan, {"name": name, "method": method}, 2)


def test_the_best_is_found_among_those_that_are_fast_enough():
    spread = np.array([0.0, 0.01, -0.01, 0.02, -0.02, 0.0])
    close = spread[[1, 0, 3, 2, 5, 4]]
    variants = [
        variant_facts(records(), records(), None, {"name": "dense", "method": "dense"}, 2),
        variant("slow", "skipvar", 0.99 + spread * 0, 1.2),
        variant("exit", "fixed_exit", 0.90 + spread, 1.96),
        variant("near", "fastvar", 0.90 + close - 1e-4, 2.0),
        variant("ours", "toprovar", 0.80 + spread, 2.1, "111110", wall=1.0),
    ]
    found = {(e["axis"], e["floor"], e["score"]): e for e in find_winners(variants, (2.0,))}
    closest = found["TLE", 2.0, "SSIM"]
    assert closest["best"]["name"] == "exit"  # 1.96 is within the slack of 2
    assert closest["plans"] == 3
    assert closest["not_told_apart"] == ["near"]
    assert closest["ours"]["lag"] == pytest.approx(0.1)
    assert "ToProVAR's best there, ours, is below: 0.800 at 2.10, lag 0.100" in sentence(closest)
    assert found["TLE", 2.0, "adherence"]["best"]["name"] == "near"  # as right as exit, and faster
    assert sentence(found["TLE", 2.0, "adherence"]) == (
        "At 2 times by TLE, adherence decides nothing: none of the 3 plans is told apart from the largest value, 1.000."
    )
    assert "0.900 at 1.96, not told apart from near; ToProVAR's best" in sentence(closest)
    assert found["wall-clock", 2.0, "SSIM"]["ours"] is None
    assert sentence(found["wall-clock", 2.0, "SSIM"]).endswith("no ToProVAR plan is as fast.")
    assert find_winners(variants, (50.0,)) == []


def test_a_best_of_ours_names_those_it_is_not_told_apart_from():
    spread = np.array([0.0, 0.01, -0.01, 0.02, -0.02, 0.0])
    variants = [
        variant_facts(records(), records(), None, {"name": "dense", "method": "dense"}, 2),
        variant("ours", "toprovar", 0.90 + spread, 3.0),
        variant("near", "fastvar", 0.8999 + spread[::-1], 3.0),
        variant("far", "stepvar", 0.70 + spread, 3.0),
    ]
    told = sentence(next(e for e in find_winners(variants, (3.0,)) if (e["axis"], e["score"]) == ("TLE", "SSIM")))
    assert told == "At 3 times by TLE, ours has the best SSIM of 3 plans: 0.900 at 3.00, not told apart from near."


def test_codes_that_were_not_drawn_are_not_counted():
    mine, dense = np.array([4, -1, 7, 200], np.int32), np.array([4, 3, 8, 200], np.int32)
    assert equal_bits([mine], [dense], NO_INDEX) == [[2, 3, 4]]
