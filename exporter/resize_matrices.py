"""Resizes as constant matrices: every size is known beforehand, and runtimes disagree about Resize.

Every resize of these models is separable; the matrices equal PyTorch's interpolate up to rounding.
"""

from __future__ import annotations

import numpy as np


def bilinear_matrix(old: int, new: int) -> np.ndarray:
    """[new, old] float32; rows sum to 1. Half-pixel centres, no antialias, clamped at the borders."""
    matrix = np.zeros((new, old), np.float32)
    scale = float(np.float32(old) / np.float32(new))
    for i in range(new):
        # one rounding to float32, as PyTorch's fused multiply-add; float64 positions differ by up to 1e-5 on large maps
        position = max(np.float32(scale * (i + 0.5) - 0.5), np.float32(0))
        low = min(int(position), old - 1)
        high = min(low + 1, old - 1)
        weight = position - np.float32(low)
        matrix[i, low] += np.float32(1) - weight
        matrix[i, high] += weight
    return matrix


def area_matrix(old: int, new: int) -> np.ndarray:
    """[new, old] float32; mean over bins [floor(i*old/new), ceil((i+1)*old/new))."""
    matrix = np.zeros((new, old))
    for i in range(new):
        start, end = i * old // new, -(-(i + 1) * old // new)
        matrix[i, start:end] = 1 / (end - start)
    return matrix.astype(np.float32)


def bicubic_matrix(old: int, new: int) -> np.ndarray:
    """[new, old] float32; rows sum to 1. Half-pixel centres, a = -0.75, no antialias, clamped at the borders."""
    a, matrix = -0.75, np.zeros((new, old))
    for i in range(new):
        position = (i + 0.5) * old / new - 0.5
        low = int(np.floor(position))
        for j in range(low - 1, low + 3):
            x = abs(position - j)
            near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
            matrix[i, min(max(j, 0), old - 1)] += near if x <= 1 else far
    return matrix.astype(np.float32)


RESIZES = {"bilinear": bilinear_matrix, "area": area_matrix, "bicubic": bicubic_matrix}


def resize_pair(kind: str, old: tuple[int, int], new: tuple[int, int]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Row and column matrices of a 2-D resize; None where an axis keeps its size."""
    matrix = RESIZES[kind]
    return (
        None if old[0] == new[0] else matrix(old[0], new[0]),
        None if old[1] == new[1] else matrix(old[1], new[1]),
    )


def smoothing_matrix(size: int, own_count: bool) -> np.ndarray:
    """[size, size] float32; mean of each entry and its neighbours.

    own_count: divides by the neighbours that exist; else by three, as if zeros lay beyond the border.
    """
    matrix = np.zeros((size, size))
    for i in range(size):
        matrix[i, max(i - 1, 0) : i + 2] = 1
    return (matrix / (matrix.sum(1, keepdims=True) if own_count else 3)).astype(np.float32)


def nearest_index(old: int, new: int) -> list[int]:
    """For each of `new` positions the one of `old` it copies, as PyTorch's nearest interpolation."""
    scale = np.float32(old) / np.float32(new)
    return [min(int(np.floor(np.float32(i) * scale)), old - 1) for i in range(new)]
