"""Counter-based uniform noise: the same bits for every backend, whatever was pruned before.

Philox-4x32-10, counter = (position, bit, scale, image), key = the 64-bit seed. A value depends on nothing but its own
coordinates, so a pruned run draws the same noise at every position as the dense run does.
Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from toprovar.runtime.errors import ToprovarError

MAX_SEED = 2**63
# planes of noise besides those of the scales: smoothing at scale s, the residual head's start and its steps behind it
SMOOTHING_PLANE, RESIDUAL_PLANE = 2**16, 2**17
STREAM_TOKENS = 64  # that share a stream of `stream_noise`
STREAM_THREADS = min(4, os.cpu_count() or 1)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


def philox_4x32(
    counter: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], key: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ten Philox rounds. counter: four broadcastable uint32-valued arrays; returns four uint32-valued uint64 arrays."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & 0xFFFFFFFF, (k1 + _WEYL_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def check_seed(seed: int) -> int:
    """Raises: ToprovarError unless 0 <= seed <= 2^63."""
    if not 0 <= seed <= MAX_SEED:
        raise ToprovarError(f"seed {seed} is out of range", f"give a whole number from 0 to 2^63 ({MAX_SEED})")
    return seed


def uniform_noise(seed: int, scale: int, tokens: int, bits: int, image: int = 0) -> np.ndarray:
    """Uniform numbers for one scale of one image.

    Returns: [tokens, bits] float32 in [0, 1), 24 random bits each (exactly representable).
    """
    position = np.arange(tokens, dtype=np.uint64)[:, None]
    bit = np.arange(bits, dtype=np.uint64)[None, :]
    words = philox_4x32(
        (position, bit, np.uint64(scale), np.uint64(image)), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    )
    return ((words[0] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)).reshape(tokens, bits)


def stream_noise(seed: int, plane: int, tokens: int, columns: int, image: int = 0) -> np.ndarray:
    """The same for families that need a number per code of a codebook, millions for a map: one stream per block of
    tokens, which NumPy makes some 30 times as fast, on several threads.

    Returns: [tokens, columns] float32 in [0, 1), 24 random bits each.
    """
    made = np.empty((tokens, columns), np.float32)

    def fill(first: int) -> None:
        # key and counter as 64-bit words; a number is the upper 24 bits of half a word, as Generator.random makes it
        key, counter = np.array([seed, 0], np.uint64), np.array([0, first // STREAM_TOKENS, plane, image], np.uint64)
        stream = np.random.Generator(np.random.Philox(key=key, counter=counter))
        stream.random(dtype=np.float32, out=made[first : first + STREAM_TOKENS])

    with ThreadPoolExecutor(STREAM_THREADS, "noise") as workers:
        list(workers.map(fill, range(0, tokens, STREAM_TOKENS)))
    return made


def normal_noise(seed: int, plane: int, tokens: int, channels: int) -> np.ndarray:
    """Standard normal numbers by Box-Muller on neighbouring columns. Returns: [tokens, channels] float32."""
    radius, angle = np.split(uniform_noise(seed, plane, tokens, 2 * channels).astype(np.float64), 2, axis=-1)
    return (np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)).astype(np.float32)


def noise_that_draws(bits: Sequence[np.ndarray], seed: int) -> Callable[[int, int, int], np.ndarray]:
    """Noise for `Pipeline.generate` that makes the first scales draw given bits, and is the seed's own from there on.

    bits: per scale [tokens, n], 0 or 1; n may be less than the columns that a step takes
    """

    def noise(scale: int, tokens: int, columns: int) -> np.ndarray:
        if scale >= len(bits):
            return uniform_noise(seed, scale, tokens, columns)
        made = np.full((tokens, columns), 2, np.float32)  # above every probability: zero
        made[:, : bits[scale].shape[1]][bits[scale] == 1] = -1  # below every probability: one
        return made

    return noise


class NoiseAhead:
    """Makes noise of later steps while earlier ones run: NumPy takes 28 ms for 4096 tokens of 32 bits, a GPU less for
    the whole scale.

    seeds:  per image; None where noise comes from elsewhere
    planes: {plane: (tokens, columns)} in the order in which they are needed
    make:   (seed, plane, tokens, columns) -> [tokens, columns]
    """

    def __init__(
        self,
        seeds: Sequence[int | None],
        planes: Mapping[int, tuple[int, int]],
        make: Callable[[int, int, int, int], np.ndarray] = uniform_noise,
    ) -> None:
        self._seeds, self._planes, self._make = seeds, planes, make
        self._made: dict[tuple[int, int], Future[np.ndarray]] = {}

    def __enter__(self) -> NoiseAhead:
        self._worker = ThreadPoolExecutor(1, "noise")
        for plane, (tokens, columns) in self._planes.items():
            for image, seed in enumerate(self._seeds):
                if seed is not None:
                    self._made[image, plane] = self._worker.submit(self._make, seed, plane, tokens, columns)
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.shutdown(cancel_futures=True)

    def of(self, image: int, seed: int, plane: int) -> np.ndarray:
        """[tokens, columns] of one plane; waits where it is not made yet. Each is given once."""
        if (image, plane) in self._made:
            return self._made.pop((image, plane)).result()
        return self._make(seed, plane, *self._planes[plane])
