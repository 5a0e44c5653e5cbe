"""From drawn bits to the latent: values of codes, and the resizes between maps and the latent.

Source: FoundationVision/InfinityStar, infinity/schedules/infinity_elegant.py, interpolate.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from toprovar.exporter.infinitystar.schedule import Pass


def contribution(bits: Tensor, step: Pass, channels: int, size: tuple[int, int]) -> Tensor:
    """What a pass adds to the latent of its clip.

    bits:     [B, t*h*w, n], 0 or 1; worth +-1/sqrt(n)
    channels: of the latent; fewer bits are stretched to them, linearly along the channel axis
    size:     height and width of the latent
    Returns:  [B, channels, t, H, W]
    """
    count = bits.shape[-1]
    values = (bits.float() * 2 - 1) * count**-0.5
    frames = values.unflatten(1, (step.frames, *step.size)).permute(0, 1, 4, 2, 3)  # [B, t, n, h, w]
    flat = frames.flatten(0, 1)
    if count != channels:
        flat = F.interpolate(flat[:, None], size=(channels, *size), mode="trilinear")[:, 0]
    elif step.size != size:
        flat = F.interpolate(flat, size=size, mode="bilinear")
    return flat.unflatten(0, frames.shape[:2]).transpose(1, 2)


def resized_down(latent: Tensor, size: tuple[int, int]) -> Tensor:
    """Mean over areas of every frame. latent: [B, d, t, H, W] -> [B, d, t, h, w]."""
    frames = latent.transpose(1, 2)
    small = F.interpolate(frames.flatten(0, 1), size=size, mode="area")
    return small.unflatten(0, frames.shape[:2]).transpose(1, 2)
