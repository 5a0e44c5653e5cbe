"""Rotary positions of HART: one-dimensional for text, row and column for image tokens.

Angles differ from row to row of a batch, because image positions start at the prompt's last text position.
The image table is no rotation: the first half of a head takes row angles, the second half column angles, while element
i is paired with i + D/2. Reproduced as trained. Source: mit-han-lab/hart, hart/modules/networks/basic_hart.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10000.0


def text_angles(positions: Tensor, head_width: int) -> Tensor:
    """positions: [R, T] -> angles [R, T, D] float32."""
    exponents = torch.arange(0, head_width, 2, device=positions.device).float() / head_width
    angles = positions.float()[..., None] * (1.0 / BASE**exponents)  # [R, T, D/2]
    return torch.cat([angles, angles], dim=-1)


def image_angles(side: int, last_side: int, last_position: Tensor, head_width: int) -> Tensor:
    """Every map is spread over the positions of the last one.

    side, last_side: of this square map and of the last one
    last_position:   [R], of the prompt's last text token
    Returns:         [R, side*side, D] float32.
    """
    exponents = torch.arange(0, head_width, 4, device=last_position.device).float() / head_width
    frequencies = 1.0 / BASE**exponents  # [D/4]
    steps = torch.arange(side, device=last_position.device).float() / side * last_side
    places = steps + last_position.float()[:, None]  # [R, side]
    angles = places[..., None] * frequencies  # [R, side, D/4]
    rows = angles[:, :, None].expand(-1, -1, side, -1)
    columns = angles[:, None].expand(-1, side, -1, -1)
    return torch.cat([rows, rows, columns, columns], dim=-1).flatten(1, 2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x: [R, H, L, D]; angles: [R, L, D]. Element i is paired with i + D/2."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
