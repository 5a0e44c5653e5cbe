"""Two-dimensional rotary positions of Infinity.

Positions always come from the 1M schedule of the aspect template, and are rounded half to even in float32: some
half-way cases come out differently in float64.
Source: Infinity (arXiv 2412.04431), FoundationVision/Infinity, dynamic_resolution.py.
"""

from __future__ import annotations

import numpy as np

from toprovar.exporter.schedules import Schedule, parent_schedule


def rope_angles(head_width: int, schedule: Schedule) -> np.ndarray:
    """Rotation angles of every token of a schedule, scales concatenated.

    Returns: [sum of h*w, head_width/2] float32; first half rows (y), second half columns (x).
    """
    last_height, last_width = parent_schedule(schedule)[-1]
    count = head_width // 4
    exponents = np.arange(count, dtype=np.float32) * 2 / np.float32(head_width // 2)
    # the power correctly rounded: float32 powers of NumPy and PyTorch are one unit off, here or there by processor
    frequencies = np.float32(1) / np.power(10000.0, exponents.astype(np.float64)).astype(np.float32)
    tables = []
    for height, width in schedule:
        rows = np.rint(np.arange(height, dtype=np.float32) * np.float32(last_height / height))
        columns = np.rint(np.arange(width, dtype=np.float32) * np.float32(last_width / width))
        table = np.empty((height, width, 2 * count), np.float32)
        table[:, :, :count] = np.outer(rows, frequencies)[:, None, :]
        table[:, :, count:] = np.outer(columns, frequencies)[None, :, :]
        tables.append(table.reshape(height * width, 2 * count))
    return np.concatenate(tables)


def rope_table(head_width: int, schedule: Schedule) -> np.ndarray:
    """Cosines and sines of `rope_angles`. Returns: [2, sum of h*w, head_width/2] float32."""
    angles = rope_angles(head_width, schedule)
    return np.stack([np.cos(angles), np.sin(angles)])
