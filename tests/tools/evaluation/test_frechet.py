import numpy as np
import pytest
from scipy.linalg import sqrtm

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.evaluation.frechet import (
    FILE,
    features_of,
    frechet_distance,
    half_width,
    read_reference,
    resampled_distances,
    write_reference,
)

TOLERANCE = {"root": 1e-6, "stored": 1e-5}  # two ways to the same root; float32 on disk


def crops(count, seed, shift=0.0, width=7):
    generator = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).normal(size=(width, width))
    return (generator.normal(size=(count, width)) @ mixing + shift).astype(np.float32)


def test_distance_agrees_with_a_matrix_square_root():
    a, b = features_of(crops(81, 1)), features_of(crops(97, 2, shift=0.3) * 1.4)
    (m, C), (n, D) = ((f.mean.numpy(), f.covariance.numpy()) for f in (a, b))
    expected = np.square(m - n).sum() + np.trace(C + D - 2 * sqrtm(C @ D).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=TOLERANCE["root"])


def test_mean_and_covariance_are_numpys():
    rows = crops(81, 3)
    found = features_of(rows)
    np.testing.assert_allclose(found.mean, rows.astype(np.float64).mean(0))
    np.testing.assert_allclose(found.covariance, np.cov(rows.astype(np.float64), rowvar=False))


def test_distance_of_equals_is_nothing_and_of_a_shift_its_square():
    rows = crops(300, 1)
    same, moved = features_of(rows), features_of(rows + 2.0)
    assert frechet_distance(same, same) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(same, moved) == pytest.approx(4 * 7, rel=1e-5)


def test_fewer_crops_lie_further_away():
    reference = features_of(crops(20_000, 5))
    small = np.mean([frechet_distance(features_of(crops(20, s)), reference) for s in range(20)])
    large = np.mean([frechet_distance(features_of(crops(400, s)), reference) for s in range(20)])
    assert small > 4 * large


def test_bootstrap_spread_is_that_of_repeated_experiments():
    reference = features_of(crops(20_000, 5))
    values = [frechet_distance(features_of(crops(200, s, shift=0.5)), reference) for s in range(200)]
    spread = half_width(resampled_distances([row[None] for row in crops(200, 777, shift=0.5)], reference))
    assert spread == pytest.approx(1.96 * np.std(values), rel=0.3)


def test_resamples_of_equally_many_pictures_are_paired():
    reference = features_of(crops(300, 8))
    pictures = [crops(2, s) for s in range(30)]
    nearly = [rows + 1e-4 for rows in pictures]
    mine, theirs = (resampled_distances(rows, reference, resamples=20) for rows in (pictures, nearly))
    assert half_width(mine - theirs) < 1e-2 * half_width(mine)


@pytest.mark.parametrize("rows", [np.zeros((1, 3)), np.array([[1.0, np.nan], [1.0, 2.0]])])
def test_too_few_or_broken_crops_are_refused(rows):
    with pytest.raises(ValueError, match="crops"):
        features_of(rows)


def test_reference_comes_back(tmp_path):
    features = features_of(crops(81, 1))
    write_reference(tmp_path / FILE, features, {"pictures": "9"})
    stored = read_reference(tmp_path / FILE, 7)
    assert stored.count == 81
    np.testing.assert_allclose(stored.covariance.numpy(), features.covariance.numpy(), rtol=TOLERANCE["stored"])
    with pytest.raises(ToprovarError, match=r"features of shape \[7\]; the classifier has 112"):
        read_reference(tmp_path / FILE, 112)


def test_damaged_reference_is_refused(tmp_path):
    with pytest.raises(ToprovarError, match="no readable reference features"):
        read_reference(tmp_path / FILE, 7)
    (tmp_path / FILE).write_bytes(b"nonsense")
    with pytest.raises(ToprovarError, match="no readable reference features"):
        read_reference(tmp_path / FILE, 7)
    features = features_of(crops(81, 1))
    features.mean[2] = np.inf
    write_reference(tmp_path / FILE, features, {})
    with pytest.raises(ToprovarError, match="not finite"):
        read_reference(tmp_path / FILE, 7)
