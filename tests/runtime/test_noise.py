"""Noise: known answers of Philox, independence of coordinates, range."""

import threading

import numpy as np
import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.noise import (
    MAX_SEED,
    SMOOTHING_PLANE,
    NoiseAhead,
    check_seed,
    philox_4x32,
    stream_noise,
    uniform_noise,
)


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


def philox_4x64(counter, key):
    """Ten rounds as published, on Python's integers."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        high, low = divmod(0xD2E7470EE14C6C93 * a, 2**64)
        high_2, low_2 = divmod(0xCA5A826395121157 * c, 2**64)
        a, b, c, d = high_2 ^ b ^ k0, low_2, high ^ d ^ k1, low
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % 2**64, (k1 + 0xBB67AE8584CAA73B) % 2**64
    return a, b, c, d


@pytest.mark.parametrize(("seed", "plane", "image"), [(0, 0, 0), (7, 3, 2), (MAX_SEED, SMOOTHING_PLANE + 5, 1)])
def test_streams_are_philox_4x64_one_per_64_tokens(seed, plane, image):
    noise = stream_noise(seed, plane, 130, 3, image)
    for part in range(3):
        count = 3 * min(64, 130 - 64 * part)
        blocks = [philox_4x64((1 + n, part, plane, image), (seed, 0)) for n in range(-(-count // 8))]
        halves = [half for block in blocks for word in block for half in (word % 2**32, word >> 32)]
        expected = (np.array([half >> 8 for half in halves[:count]], np.float64) / 2**24).astype(np.float32)
        assert np.array_equal(noise[64 * part :][:64], expected.reshape(-1, 3))


def test_streams_are_uniform_and_differ():
    noise = stream_noise(1, 12, 512, 256)
    assert noise.min() >= 0
    assert noise.max() < 1
    histogram = np.histogram(noise, bins=16, range=(0, 1))[0] / noise.size
    assert np.abs(histogram - 1 / 16).max() < 0.003  # four standard deviations of a bin at 131072 draws
    for other in (stream_noise(2, 12, 512, 256), stream_noise(1, 13, 512, 256), stream_noise(1, 12, 512, 256, image=1)):
        assert (noise == other).mean() < 0.001


def test_noise_made_ahead_is_the_same_and_nothing_is_left_running():
    planes = {0: (1, 6), 1: (12, 6), 2**16: (16, 5)}
    for make in (uniform_noise, stream_noise):
        with NoiseAhead([5, None, 9], planes, make) as ahead:
            for image, seed in ((0, 5), (1, 7), (2, 9)):
                for plane, (tokens, columns) in planes.items():
                    expected = make(seed, plane, tokens, columns)
                    assert np.array_equal(ahead.of(image, seed, plane), expected)
                    assert np.array_equal(ahead.of(image, seed, plane), expected)
    before = threading.active_count()
    with pytest.raises(RuntimeError), NoiseAhead([1], {k: (4096, 32) for k in range(50)}):
        raise RuntimeError
    assert threading.active_count() == before
