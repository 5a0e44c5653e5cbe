"""Inputs of a recorded run of the families that draw indices (VAR, HART), read from a parity file and checked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from toprovar.runtime.errors import ToprovarError
from toprovar.tools.parity_file import MAKE_AGAIN, MAX_MAP_SIDE, MAX_SCALES, MAX_TOKENS, ParityFile


def read_sides(file: ParityFile, value: Any) -> tuple[int, ...]:
    """Sides of the schedule's square maps. Raises: ToprovarError if they cannot be ones."""
    fits = isinstance(value, list) and 2 <= len(value) <= MAX_SCALES
    if not fits or not all(type(n) is int and 1 <= n <= MAX_MAP_SIDE for n in value) or value[0] != 1:
        raise ToprovarError(
            f"{file.path}: meta.patch_nums is {repr(value)[:80]}; expected 2 to {MAX_SCALES} sides from 1 to "
            f"{MAX_MAP_SIDE}, the first of them 1",
            MAKE_AGAIN,
        )
    total = sum(n * n for n in value)
    if total > MAX_TOKENS:
        raise ToprovarError(
            f"{file.path}: meta.patch_nums has {total} tokens; expected at most {MAX_TOKENS}", MAKE_AGAIN
        )
    return tuple(value)


def read_number(
    file: ParityFile, settings: dict[str, Any], key: str, lowest: float, highest: float, default: float | None = None
) -> float:
    """A number of the settings. Raises: ToprovarError if it is none or out of bounds."""
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise ToprovarError(
            f"{file.path}: meta.{key} is {repr(value)[:80]}; expected a number from {lowest} to {highest}", MAKE_AGAIN
        )
    return float(value)


def read_array(file: ParityFile, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """An array of this shape; None stands for any length. Raises: ToprovarError if it has another one."""
    array = file.read(name)
    fits = len(array.shape) == len(shape) and all(w in (None, n) for n, w in zip(array.shape, shape, strict=True))
    if not fits or not array.size:
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise ToprovarError(
            f"{file.path}: array {name} has shape {list(array.shape)}; expected [{expected}]", MAKE_AGAIN
        )
    return array


def read_indices(file: ParityFile, name: str, shape: tuple[int, int], vocabulary: int) -> np.ndarray:
    """[B, n*n] int64 indices of the codebook. Raises: ToprovarError if they cannot be ones."""
    array = file.read(name)
    if array.size == math.prod(shape):
        array = array.reshape(shape)
    if array.shape != shape or array.dtype.kind not in "iu":
        raise ToprovarError(
            f"{file.path}: array {name} is {array.dtype}{list(array.shape)}; expected whole numbers {list(shape)}",
            MAKE_AGAIN,
        )
    if (array < 0).any() or (array >= vocabulary).any():
        raise ToprovarError(
            f"{file.path}: array {name} holds indices from {array.min()} to {array.max()}; expected 0 to "
            f"{vocabulary - 1}",
            MAKE_AGAIN,
        )
    return array.astype(np.int64)
