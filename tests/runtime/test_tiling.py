"""Tiles cover everything once: what depends on single cells comes out exactly, what looks further nearly so."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from toprovar.runtime.errors import ToprovarError
from toprovar.runtime.tiling import decode_in_tiles, tiles_of_axis

# sums of fp32 weights; measured 1e-7
TOLERANCE = 1e-6


def repeated(codes: np.ndarray) -> np.ndarray:
    """A decoder that looks at one cell at a time."""
    return codes.repeat(4, axis=-2).repeat(4, axis=-1)


def blurred(codes: np.ndarray) -> np.ndarray:
    """A decoder that looks one cell far, with zeros beyond the border."""
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 2) + [(1, 1), (1, 1)])
    height, width = codes.shape[-2:]
    return repeated(sum(padded[..., y : y + height, x : x + width] for y in range(3) for x in range(3)) / 9)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 31, 64])
@pytest.mark.parametrize(("size", "overlap"), [(1, 0), (2, 1), (5, 0), (5, 4), (16, 3), (100, 10)])
def test_weights_add_up_to_one_and_tiles_overlap_enough(length, size, overlap):
    tiles = tiles_of_axis(length, size, overlap, 3)
    size = min(size, length)
    total = np.zeros(3 * length)
    for tile in tiles:
        assert len(tile.weight) == 3 * size
        assert (tile.weight > 0).all()
        total[3 * tile.start : 3 * (tile.start + size)] += tile.weight
    assert np.abs(total - 1).max() <= TOLERANCE
    assert (tiles[0].start, tiles[-1].start + size) == (0, length)
    for before, after in pairwise(tiles):
        assert before.start < after.start <= before.start + size - overlap


def test_weights_change_linearly_where_two_tiles_overlap():
    first, second = tiles_of_axis(14, 9, 4, 2)
    assert np.allclose(first.weight, [1] * 10 + [(i + 0.5) / 8 for i in reversed(range(8))])
    assert np.allclose(second.weight, first.weight[::-1])


@pytest.mark.parametrize("shape", [(1, 2, 13, 7), (3, 5, 5), (1, 2, 3, 6, 9)])
@pytest.mark.parametrize(("tile", "overlap"), [((4, 4), 2), ((5, 3), 0), ((64, 64), 8), ((1, 9), 3)])
def test_a_decoder_of_single_cells_is_not_changed(shape, tile, overlap):
    codes = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = decode_in_tiles(repeated, codes, tile, overlap, 4)
    assert found.dtype == np.float32
    assert np.abs(found - repeated(codes)).max() <= 4 * TOLERANCE


def test_all_tiles_have_one_shape():
    shapes = set()

    def watch(codes: np.ndarray) -> np.ndarray:
        shapes.add(codes.shape)
        return repeated(codes)

    decode_in_tiles(watch, np.zeros((1, 2, 13, 17), np.float32), (6, 5), 2, 4)
    assert shapes == {(1, 2, 6, 5)}


def test_overlap_lessens_the_error_of_a_decoder_that_looks_further():
    codes = np.random.default_rng(1).standard_normal((1, 1, 30, 30)).astype(np.float32)
    whole = blurred(codes)
    errors = [
        float(np.mean((decode_in_tiles(blurred, codes, (10, 10), overlap, 4) - whole) ** 2)) for overlap in (0, 2, 4)
    ]
    assert errors[0] > 2 * errors[1] > 2 * errors[2] > 0


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (4, 4), (4, -1)])
def test_tiles_that_leave_nothing_are_refused(size, overlap):
    with pytest.raises(ToprovarError, match=f"tiles of {size} cells cannot overlap by {overlap}"):
        tiles_of_axis(10, size, overlap, 8)
