from __future__ import annotations

import numpy as np
import pytest

from toprovar.exporter.resize_matrices import RESIZES, area_matrix, bilinear_matrix, resize_pair

torch = pytest.importorskip("torch", reason="needs PyTorch, whose interpolate is the reference")

# Times the largest value. Sums of fp32 products; for bilinear also positions up to 111, which PyTorch rounds to fp32
# (half a unit in the last place is 4e-6), times the difference of two neighbours, at most twice the largest value.
# Bicubic weights change by up to 1.5 per position and PyTorch's positions are rounded as much; two axes.
TOLERANCE = {"area": 1e-6, "bilinear": 1e-6 + 2 * 4e-6, "bicubic": 1e-6 + 2 * 2 * 1.5 * 4e-6}

SIZES = [
    ((1, 1), (1, 1)),
    ((1, 1), (17, 5)),
    ((2, 3), (64, 64)),
    ((6, 4), (78, 52)),
    ((64, 64), (48, 48)),
    ((111, 37), (9, 3)),
    ((17, 81), (5, 7)),
    ((13, 13), (13, 9)),
    ((16, 16), (1, 1)),
]


@pytest.mark.parametrize("kind", ["bilinear", "bicubic", "area"])
@pytest.mark.parametrize(("old", "new"), SIZES)
def test_matrices_do_what_interpolate_does(kind: str, old: tuple[int, int], new: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *old, generator=torch.Generator().manual_seed(7))
    options = {"align_corners": False} if kind != "area" else {}
    expected = torch.nn.functional.interpolate(x, size=new, mode=kind, **options).numpy()
    rows, columns = resize_pair(kind, old, new)
    found = x.numpy()
    found = found if columns is None else found @ columns.T
    found = found if rows is None else rows @ found
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE[kind] * np.abs(x.numpy()).max()


@pytest.mark.parametrize("kind", ["bilinear", "bicubic", "area"])
@pytest.mark.parametrize(("old", "new"), [(1, 9), (9, 1), (7, 20), (20, 7), (64, 63)])
def test_rows_sum_to_one(kind: str, old: int, new: int) -> None:
    matrix = RESIZES[kind](old, new)
    assert matrix.shape == (new, old)
    assert np.abs(matrix.sum(1) - 1).max() <= 1e-6


def test_kept_axes_need_no_matrix() -> None:
    rows, columns = resize_pair("bilinear", (4, 6), (4, 3))
    assert rows is None
    assert columns is not None


def test_halving_takes_the_mean_of_neighbours_either_way() -> None:
    expected = np.array([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]], np.float32)
    assert (bilinear_matrix(4, 2) == expected).all()
    assert (area_matrix(4, 2) == expected).all()
