"""From drawn bits to the latent: values of codes, and the resizes between maps and the latent.

Frames lie on top of one another, [B, d, t*h, w], as plans and bundles see a map.
Source: FoundationVision/InfinityStar, infinity/schedules/infinity_elegant.py, interpolate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toprovar.exporter.infinitystar.schedule import Pass, VideoSchedule


def contribution(code: Tensor, step: Pass, channels: int, schedule: VideoSchedule) -> Tensor:
    """What a pass adds to the latent of all frames.

    code:     [B, n, t*h, w], codes of the pass on its own map
    channels: of the latent; fewer codes are stretched to them, linearly along the channel axis
    Returns:  [B, channels, F*H, W], zero in the frames of other clips
    """
    height, width = schedule.last
    flat = _frames(code, step.frames).flatten(0, 1)  # [B*t, n, h, w]
    if flat.shape[1] != channels:
        flat = F.interpolate(flat[:, None], size=(channels, height, width), mode="trilinear")[:, 0]
    elif step.size != schedule.last:
        flat = F.interpolate(flat, size=schedule.last, mode="bilinear")
    own = _stacked(flat.unflatten(0, (len(code), step.frames)))
    before, after = step.first_frame, schedule.frames - step.first_frame - step.frames
    return F.pad(own, (0, 0, before * height, after * height))


def map_of(latent: Tensor, step: Pass, schedule: VideoSchedule) -> Tensor:
    """The clip's latent on the map of a pass: mean over areas of every frame. [B, d, F*H, W] -> [B, d, t*h, w]."""
    height = schedule.last[0]
    own = latent[:, :, step.first_frame * height : (step.first_frame + step.frames) * height]
    frames = _frames(own, step.frames)
    small = F.interpolate(frames.flatten(0, 1), size=step.size, mode="area")
    return _stacked(small.unflatten(0, frames.shape[:2]))


def latent_video(latent: Tensor, schedule: VideoSchedule) -> Tensor:
    """What the tokenizer's decoder takes. [B, d, F*H, W] -> [B, d, F, H, W]."""
    return latent.unflatten(2, (schedule.frames, schedule.last[0]))


def _frames(stacked: Tensor, count: int) -> Tensor:
    """[B, d, t*h, w] -> [B, t, d, h, w]."""
    return stacked.unflatten(2, (count, -1)).transpose(1, 2)


def _stacked(frames: Tensor) -> Tensor:
    """[B, t, d, h, w] -> [B, d, t*h, w]."""
    return torch.flatten(frames.transpose(1, 2), 2, 3)
