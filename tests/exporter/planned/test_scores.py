"""Scores, restores and features against plain float64 NumPy, on awkward sizes."""

import numpy as np
import pytest
import torch

from toprovar.exporter.infinity.generate import previous_values
from toprovar.exporter.planned import scores
from toprovar.exporter.planned.restore import nearest_kept, resampled_residual
from toprovar.runtime.decisions import (
    EnergyMassDecision,
    SatsDecision,
    frequency_features,
    sobel_magnitude,
    tokens_for_mass,
)

RTOL = 2e-4  # fp32 sums of up to a thousand squares, power iterations included; measured below 3e-5
SIZES = [(3, 5), (16, 16), (9, 7)]


def values(seed, *shape):
    return np.random.Generator(np.random.PCG64(seed)).normal(size=shape)


def close(found, expected):
    assert found.shape == expected.shape
    assert expected.size
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.parametrize("size", SIZES)
def test_variance_is_the_squared_distance_from_the_mean_token(size):
    x = values(1, 2, size[0] * size[1], 17) + 3
    expected = np.stack([[-sum((t - row.mean(0)) ** 2) for t in row] for row in x])
    close(scores.variance_score(torch.from_numpy(x).float()).numpy(), expected)


def reference_structure(x, size, weight, iterations):
    """x: [N, C]."""
    centred = x - x.mean(0)
    v = centred[np.argmax((centred**2).sum(1))]
    for _ in range(iterations):
        v = centred.T @ (centred @ v)
        v = v / np.sqrt(v @ v)
    structure = np.abs(centred @ v)
    grid, texture = x.reshape(*size, -1), np.zeros(size)
    for i in range(size[0]):
        for j in range(size[1]):
            window = grid[max(i - 1, 0) : i + 2, max(j - 1, 0) : j + 2].reshape(-1, x.shape[1])
            texture[i, j] = ((grid[i, j] - window.mean(0)) ** 2).sum()
    texture = texture.ravel()
    return -(weight * structure / structure.mean() + texture / texture.mean())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("weight", "iterations"), [(1.0, 4), (0.3, 1)])
def test_structure_is_projection_plus_local_high_pass(size, weight, iterations):
    x = values(2, 2, size[0] * size[1], 11)
    expected = np.stack([reference_structure(row, size, weight, iterations) for row in x])
    close(scores.structure_score(torch.from_numpy(x).float(), size, weight, iterations).numpy(), expected)


def reference_energy(code, new):
    """code: [d, h, w]."""
    code = np.pad(code, ((0, 0), (0, code.shape[1] % 2), (0, code.shape[2] % 2)), mode="edge")
    h, w = code.shape[1:]
    raw = np.zeros((h // 2, w // 2))
    for i in range(h // 2):
        for j in range(w // 2):
            (a, b), (c, e) = code[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].transpose(1, 2, 0)
            details = 0.5 * np.stack([-a + b - c + e, -a - b + c + e, -a + b + c - e])
            raw[i, j] = (details**2).sum()
    padded = np.pad(raw, 1)
    smooth = sum(padded[i : i + h // 2, j : j + w // 2] for i in range(3) for j in range(3)) / 9
    return resized(smooth, new).ravel()


def resized(grid, new):
    """Bilinear, half-pixel centres, clamped."""

    def along(old, size):
        matrix = np.zeros((size, old))
        for i in range(size):
            place = max((i + 0.5) * old / size - 0.5, 0)
            low = min(int(place), old - 1)
            matrix[i, low] += 1 - (place - low)
            matrix[i, min(low + 1, old - 1)] += place - low
        return matrix

    return along(grid.shape[0], new[0]) @ grid @ along(grid.shape[1], new[1]).T


@pytest.mark.parametrize(("old", "new"), [((8, 8), (16, 16)), ((7, 5), (12, 9)), ((2, 3), (4, 4))])
def test_code_energy_is_the_smoothed_haar_energy(old, new):
    code = values(3, 2, 6, *old)
    expected = np.stack([reference_energy(image, new) for image in code])
    close(scores.code_energy(torch.from_numpy(code).float(), 1, new).numpy(), expected)


def test_constant_codes_have_no_energy():
    assert scores.code_energy(torch.full((1, 5, 8, 8), 0.7), 1, (12, 12)).abs().max() == 0


def test_code_energy_of_a_four_by_four_example():
    """One bright cell in the upper left patch: LH = HL = -1/2, HH = 1/2, so 3/4; a ninth of it reaches every patch."""
    code = torch.zeros(1, 1, 4, 4)
    code[0, 0, 0, 0] = 1
    np.testing.assert_allclose(scores.code_energy(code, 1, (2, 2)).numpy(), np.full((1, 4), 0.75 / 9), rtol=1e-6)


def test_mass_takes_as_few_tokens_as_hold_it_and_the_ladder_never_fewer():
    energy = np.array([4.0, 1.0, 3.0, 2.0])
    assert [tokens_for_mass(energy, share) for share in (0.0, 0.4, 0.41, 0.7, 0.71, 1.0)] == [1, 1, 2, 2, 3, 4]
    assert tokens_for_mass(np.zeros(5), 0.5) == 1
    for seed in range(50):
        energy = values(seed, 400) ** 2
        for mass in (0.1, 0.5, 0.9, 1.0):
            needed = tokens_for_mass(energy, mass)
            assert np.sort(energy)[::-1][:needed].sum() >= mass * energy.sum() * (1 - 1e-12)
            count = EnergyMassDecision(mass=mass).count(energy, (64, 128, 192, 256, 320, 400))
            assert count >= needed
            assert count - 64 < needed or count == 64 or count == 400


@pytest.mark.parametrize(
    ("rotation", "expected"), [(0.0, [2, 0, 3, 1, 4]), (0.4, [4, 2, 0, 3, 1]), (0.8, [1, 4, 2, 0, 3])]
)
def test_the_order_is_turned_by_a_share(rotation, expected):
    """Scores 5, 1, 7, 3, 9 have places 2, 0, 3, 1, 4; a turn of 0.4 adds two of them, modulo five."""
    places = scores.rotated_order(torch.tensor([[5.0, 1.0, 7.0, 3.0, 9.0]]), rotation)
    assert places[0].tolist() == expected


def test_equal_changes_keep_their_order():
    assert scores.rotated_order(torch.ones(1, 6), 0.0)[0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [(16, 16), (20, 20), (27, 18), (13, 30)])
@pytest.mark.parametrize("count", [64, 128, 192])
def test_every_region_keeps_its_share(size, count):
    score = torch.from_numpy(values(4, size[0] * size[1])).float()
    score[: size[0] * size[1] // 2] += 100  # the upper half alone would keep nothing
    kept = set(scores.lowest_scores(scores.stratified(score, size, count), count).tolist())
    regions = scores.strata(size)
    assert sorted(index for region in regions for index in region) == list(range(size[0] * size[1]))
    assert len(regions) == 16
    for region in regions:
        assert len(kept & set(region)) >= -(-count // 64)
    plain = set(scores.lowest_scores(score, count).tolist())
    if count <= size[0] * size[1] // 2 - size[1]:
        assert min(len(plain & set(region)) for region in regions) == 0


def test_nearest_kept_is_the_closest_and_the_first_of_equal_ones():
    size = (6, 9)
    kept = torch.tensor([0, 4, 20, 22, 38, 53])
    found = nearest_kept(kept, size).tolist()
    for index in range(54):
        y, x = divmod(index, 9)
        distances = [(y - k // 9) ** 2 + (x - k % 9) ** 2 for k in kept.tolist()]
        assert found[index] == int(np.argmin(distances))


@pytest.mark.parametrize("patch", [1, 2])
def test_previous_codes_are_repeated_to_the_nearest_token(patch):
    code = torch.from_numpy(values(5, 1, 2, 3 * patch, 2 * patch)).float()
    found = previous_values(code, (5, 4), patch)[0].numpy()  # [20, bits]
    for y in range(5):
        for x in range(4):
            cell = [
                code[0, d, (y * patch + i) * 3 // 5, (x * patch + j) * 2 // 4]
                for d in range(2)
                for i in range(patch)
                for j in range(patch)
            ]
            np.testing.assert_array_equal(found[y * 4 + x], np.array(cell))


def test_area_resampling_averages_the_cells_that_an_output_overlaps():
    residual = torch.from_numpy(values(6, 1, 6, 3)).float()  # a 2 x 3 map
    found = resampled_residual(residual, (2, 3), (3, 4), "area")[0].numpy().reshape(3, 4, 3)
    grid = residual[0].numpy().reshape(2, 3, 3)
    for y in range(3):
        for x in range(4):
            window = grid[y * 2 // 3 : -(-(y + 1) * 2 // 3), x * 3 // 4 : -(-(x + 1) * 3 // 4)]
            np.testing.assert_allclose(found[y, x], window.mean((0, 1)), rtol=1e-5)


def test_features_of_flat_and_of_sharp_pictures():
    flat = np.full((3, 16, 16), 0.25)
    assert frequency_features(flat, flat).tolist() == [pytest.approx(0), pytest.approx(0, abs=1e-12)]
    board = np.where(np.indices((16, 16)).sum(0) % 2, 1.0, -1.0)[None].repeat(3, 0)
    assert frequency_features(flat, board)[1] == pytest.approx(1)  # all of it at the highest frequency


def test_sobel_equals_the_kernels_written_out():
    image = values(7, 6, 5)
    padded, kernel = np.pad(image, 1), np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    for y in range(6):
        for x in range(5):
            window = padded[y : y + 3, x : x + 3]
            assert sobel_magnitude(image)[y, x] == pytest.approx(
                np.hypot((window * kernel).sum(), (window * kernel.T).sum())
            )


def test_guidance_ends_where_the_gap_hardly_moves():
    sats = SatsDecision(scales=(4,), delta=0.15)
    assert sats.ends_guidance(1.1, 1.0)
    assert not sats.ends_guidance(1.2, 1.0)
    assert not sats.ends_guidance(0.8, 1.0)
    assert SatsDecision(scales=(4,), delta=0.15, norm="l2").gap(0.5, 64) == 4.0
