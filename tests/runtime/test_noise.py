"""Noise: known answers of Philox, independence of coordinates, range."""

import threading

import numpy as np
import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.noise import MAX_SEED, NoiseAhead, check_seed, philox_4x32, uniform_noise


def test_philox_gives_the_published_answers():
    zero = np.uint64(0)
    ones = np.uint64(0xFFFFFFFF)
    assert [hex(int(w)) for w in philox_4x32((zero,) * 4, (0, 0))] == [
        "0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8",
    ]  # fmt: skip
    assert [hex(int(w)) for w in philox_4x32((ones,) * 4, (0xFFFFFFFF, 0xFFFFFFFF))] == [
        "0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd",
    ]  # fmt: skip


def test_a_value_depends_on_its_own_coordinates_only():
    whole = uniform_noise(7, 3, 100, 16)
    assert np.array_equal(uniform_noise(7, 3, 17, 5), whole[:17, :5])


def test_every_coordinate_matters():
    base = uniform_noise(7, 3, 64, 16)
    for other in (uniform_noise(8, 3, 64, 16), uniform_noise(7, 4, 64, 16), uniform_noise(7, 3, 64, 16, image=1)):
        assert (base == other).mean() < 0.01
    assert (uniform_noise(7, 0, 8, 8) == uniform_noise(7 + 2**32, 0, 8, 8)).mean() < 0.1


def test_noise_is_uniform_in_the_half_open_unit_interval():
    noise = uniform_noise(1, 12, 4096, 32)
    assert noise.dtype == np.float32
    assert noise.min() >= 0
    assert noise.max() < 1
    histogram = np.histogram(noise, bins=16, range=(0, 1))[0] / noise.size
    assert np.abs(histogram - 1 / 16).max() < 0.003  # four standard deviations of a bin at 131072 draws


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**62, MAX_SEED])
def test_seeds_up_to_two_to_the_63_are_fine(seed):
    assert check_seed(seed) == seed
    assert np.isfinite(uniform_noise(seed, 0, 1, 4)).all()


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 2**64])
def test_other_seeds_are_refused(seed):
    with pytest.raises(ToprovarError, match="out of range"):
        check_seed(seed)


def test_noise_made_ahead_is_the_same_and_nothing_is_left_running():
    schedule = ((1, 1), (4, 3), (2, 8))
    with NoiseAhead([5, None, 9], schedule, 6) as ahead:
        for image, seed in ((0, 5), (1, 7), (2, 9)):
            for scale, (height, width) in enumerate(schedule):
                assert np.array_equal(ahead.of(image, seed, scale), uniform_noise(seed, scale, height * width, 6))
                assert np.array_equal(ahead.of(image, seed, scale), uniform_noise(seed, scale, height * width, 6))
    before = threading.active_count()
    with pytest.raises(RuntimeError), NoiseAhead([1], ((64, 64),) * 50, 32):
        raise RuntimeError
    assert threading.active_count() == before
