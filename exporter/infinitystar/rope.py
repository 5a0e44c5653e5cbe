"""Rotary positions of InfinityStar: pass, frame, row and column, the same frequencies for each.

Source: FoundationVision/InfinityStar, infinity/schedules/infinity_elegant.py.
"""

from __future__ import annotations

import numpy as np

from toprovar.exporter.infinitystar.schedule import Pass

BASE = 10000.0
FIRST_PASS = 512  # text tokens have 0 .. 511 on the axis of passes


def frequencies(head_width: int) -> np.ndarray:
    """[c/8] float32."""
    count = head_width // 8
    exponents = np.arange(count, dtype=np.float32) / np.float32(count)
    # the power correctly rounded: float32 powers of NumPy and PyTorch are one unit off, here or there by processor
    return np.float32(1) / np.power(BASE, exponents.astype(np.float64)).astype(np.float32)


def _angles(places: np.ndarray, head_width: int) -> np.ndarray:
    """places: [L, 4] float32 -> angles of neighbouring pairs [L, c/2] float32."""
    return (places[:, :, None] * frequencies(head_width)).reshape(len(places), head_width // 2)


def text_angles(tokens: int, head_width: int) -> np.ndarray:
    places = np.zeros((tokens, 4), np.float32)
    places[:, 0] = np.arange(tokens)
    return _angles(places, head_width)


def map_angles(step: Pass, last: tuple[int, int], head_width: int) -> np.ndarray:
    """Every map is spread over the positions of the clip's last one, rounded half to even in float32.

    last: height and width of that map
    """
    rows, columns = (
        np.rint(np.arange(own, dtype=np.float32) * np.float32(full / own))
        for own, full in zip(step.size, last, strict=True)
    )
    places = np.empty((step.frames, *step.size, 4), np.float32)
    places[..., 0] = FIRST_PASS + step.index
    places[..., 1] = np.arange(step.first_frame, step.first_frame + step.frames)[:, None, None]
    places[..., 2], places[..., 3] = rows[:, None], columns
    return _angles(places.reshape(-1, 4), head_width)
