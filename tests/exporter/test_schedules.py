from __future__ import annotations

import pytest

from toprovar.exporter.schedules import (
    BUDGET_SCALES,
    TEMPLATES,
    nearest_template,
    parent_schedule,
    schedule_for,
    token_counts,
)
from toprovar.runtime.errors import ToprovarError

# Tokens at 0.06M, 0.25M, 0.60M, 1M and pixels (height, width) at 1M.
PUBLISHED = {
    "1.000": ((521, 2521, 6425, 10521), (1024, 1024)),
    "1.250": ((614, 2814, 6854, 10774), (1120, 896)),
    "1.333": ((665, 2657, 7085, 10973), (1152, 864)),
    "1.500": ((533, 2759, 6941, 10997), (1248, 832)),
    "1.750": ((472, 2628, 7220, 11252), (1344, 768)),
    "2.000": ((451, 2681, 7219, 11269), (1440, 720)),
    "2.500": ((555, 2555, 6805, 10805), (1600, 640)),
    "3.000": ((509, 2588, 7016, 11123), (1776, 592)),
}
INVERSE = {
    "0.800": "1.250",
    "0.750": "1.333",
    "0.666": "1.500",
    "0.571": "1.750",
    "0.500": "2.000",
    "0.400": "2.500",
    "0.333": "3.000",
}


def test_there_are_fifteen_templates_of_thirteen_scales() -> None:
    assert set(TEMPLATES) == {*PUBLISHED, *INVERSE}
    assert all(len(schedule) == 13 for schedule in TEMPLATES.values())
    assert [*BUDGET_SCALES] == ["0.06M", "0.25M", "0.60M", "1M"]


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *INVERSE}))
@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_token_sums_are_the_published_ones(name: str, budget: int) -> None:
    totals, _ = PUBLISHED[INVERSE.get(name, name)]
    schedule = schedule_for(float(name), [*BUDGET_SCALES][budget])
    assert schedule == TEMPLATES[name][: len(schedule)]
    assert sum(token_counts(schedule)) == totals[budget]


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *INVERSE}))
def test_last_map_gives_the_published_pixels(name: str) -> None:
    pixels = tuple(16 * side for side in TEMPLATES[name][-1])
    expected = PUBLISHED[INVERSE.get(name, name)][1]
    assert pixels == (expected if name in PUBLISHED else expected[::-1])


@pytest.mark.parametrize("flat", sorted(INVERSE))
def test_flat_templates_are_transposes(flat: str) -> None:
    assert TEMPLATES[flat] == tuple((w, h) for h, w in TEMPLATES[INVERSE[flat]])


@pytest.mark.parametrize(
    ("aspect", "name"),
    [(1.0, "1.000"), (1.1, "1.000"), (9 / 16, "0.571"), (16 / 9, "1.750"), (3 / 2, "1.500"), (100.0, "3.000")],
)
def test_nearest_template_is_by_plain_difference(aspect: float, name: str) -> None:
    assert nearest_template(aspect) == name


@pytest.mark.parametrize("aspect", [0.0, -1.0, float("nan"), float("inf")])
def test_aspect_must_be_positive(aspect: float) -> None:
    with pytest.raises(ToprovarError, match="not a positive number") as caught:
        schedule_for(aspect)
    assert "height over width" in caught.value.hint


def test_unknown_budget_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ToprovarError, match=r"unknown budget 2M; expected one of 0\.06M"):
        schedule_for(1.0, "2M")


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *INVERSE}))
@pytest.mark.parametrize("budget", [*BUDGET_SCALES])
def test_every_budget_finds_its_template_again(name: str, budget: str) -> None:
    assert parent_schedule(schedule_for(float(name), budget)) == TEMPLATES[name]


def test_own_schedule_is_its_own_parent() -> None:
    own = ((1, 1), (2, 2), (3, 5), (4, 7))
    assert parent_schedule(own) == own
