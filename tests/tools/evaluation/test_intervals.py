import math

import numpy as np
import pytest

from toprovar.tools.evaluation.intervals import mcnemar_p, paired_difference, wilson_interval


def test_wilson_agrees_with_known_values():
    # Newcombe 1998, table I, method 3
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson_interval(right, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("right", "count"), [(0, 0), (-1, 5), (6, 5)])
def test_no_share_is_refused(right, count):
    with pytest.raises(ValueError, match="is no share"):
        wilson_interval(right, count)


def test_paired_interval_covers_the_difference_as_often_as_it_says():
    generator = np.random.default_rng(0)
    chances = np.array([0.62, 0.06, 0.12, 0.20])  # both right, only mine, only base, neither
    covered = 0
    for _ in range(800):
        cells = generator.choice(4, size=256, p=chances)
        mine, base = np.isin(cells, (0, 1)).tolist(), np.isin(cells, (0, 2)).tolist()
        difference, low, high = paired_difference(mine, base)
        assert low <= difference <= high
        covered += low <= 0.06 - 0.12 <= high
    assert 0.93 < covered / 800 < 0.975


def test_equal_verdicts_differ_by_nothing_and_still_have_an_interval():
    difference, low, high = paired_difference([True] * 50, [True] * 50)
    assert difference == 0
    assert low < 0 < high < 0.06


def test_pairs_must_match():
    for mine, base in (([], []), ([True], [True, False])):
        with pytest.raises(ValueError, match="cannot be paired"):
            paired_difference(mine, base)


def test_mcnemar_is_the_sign_test_on_disagreements():
    def verdicts(gained, lost, same):
        return [True] * gained + [False] * lost + [True] * same, [False] * gained + [True] * lost + [True] * same

    assert mcnemar_p(*verdicts(0, 0, 9)) == 1
    assert mcnemar_p(*verdicts(5, 5, 3)) == 1
    assert mcnemar_p(*verdicts(1, 9, 40)) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar_p(*verdicts(9, 1, 0)) == pytest.approx(2 * (1 + 10) / 2**10)
    assert math.isclose(mcnemar_p(*verdicts(0, 6, 0)), 2 / 64)
