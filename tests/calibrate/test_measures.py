"""Measures against plain definitions, with awkward sizes."""

import numpy as np
import pytest

from toprovar.calibrate.measures import (
    otsu_threshold,
    psnr_db,
    rank_correlation,
    singular_ratio,
    ssim,
)
from toprovar.runtime.decisions import low_entropy_ratio


def test_low_entropy_ratio_is_the_share_below_the_mean():
    assert low_entropy_ratio(np.array([0.0, 0.0, 3.0])) == pytest.approx(2 / 3)
    assert low_entropy_ratio(np.full(17, 2.5)) == 0
    assert low_entropy_ratio(np.array([1.0])) == 0


@pytest.mark.parametrize("bad", [np.empty(0), np.array([1.0, np.nan])])
def test_low_entropy_ratio_refuses_empty_maps_and_nan(bad):
    with pytest.raises(ValueError, match="empty or holds NaN"):
        low_entropy_ratio(bad)


def test_low_entropy_ratio_does_not_depend_on_the_logarithm():
    values = np.random.default_rng(0).gamma(2, size=987)
    assert low_entropy_ratio(values) == low_entropy_ratio(values / np.log(2))


@pytest.mark.parametrize("shape", [(12, 12), (17, 9), (2, 81), (64, 64)])
def test_singular_ratio_equals_the_svd(shape):
    values = np.random.default_rng(1).random(shape) + 0.5
    sigma = np.linalg.svd(values, compute_uv=False)
    assert singular_ratio(values) == pytest.approx(sigma[0] / sigma[1], rel=1e-6)


def test_a_rank_one_map_has_the_largest_ratio_and_a_zero_map_the_smallest():
    assert singular_ratio(np.outer(np.arange(1, 9), np.ones(8))) == pytest.approx(1e6)
    assert singular_ratio(np.zeros((4, 4))) == 1


def test_otsu_splits_two_groups_between_their_edges():
    values = np.array([1.0, 1.1, 1.2, 5.0, 5.1])
    assert 1.2 < otsu_threshold(values) < 5.0
    assert otsu_threshold(np.full(9, 3.0)) == 3.0
    rng = np.random.default_rng(2)
    mixture = np.concatenate([rng.normal(0, 0.3, 500), rng.normal(4, 0.3, 50)])

    def within_variance(threshold):
        low, high = mixture[mixture <= threshold], mixture[mixture > threshold]
        return low.var() * low.size + high.var() * high.size

    brute = min(np.unique(mixture)[:-1], key=within_variance)
    assert (mixture <= otsu_threshold(mixture)).sum() == (mixture <= brute).sum()


def test_rank_correlation_knows_rising_falling_and_constant_curves():
    assert rank_correlation(np.array([1.0, 2.0, 5.0, 9.0])) == pytest.approx(1)
    assert rank_correlation(np.array([4.0, 3.0, 1.0])) == pytest.approx(-1)
    assert rank_correlation(np.array([2.0, 2.0, 2.0])) == 0
    assert rank_correlation(np.array([2.0])) == 0


def test_picture_measures_of_equal_and_different_pictures():
    rng = np.random.default_rng(3)
    picture = rng.integers(0, 256, (32, 48, 3), dtype=np.uint8)
    assert ssim(picture, picture) == pytest.approx(1)
    assert psnr_db(picture, picture) == 100
    off_by_one = np.where(picture < 255, picture + 1, picture - 1).astype(np.uint8)
    assert psnr_db(picture, off_by_one) == pytest.approx(20 * np.log10(255), abs=1e-9)
    assert ssim(picture, 255 - picture) < 0.1
