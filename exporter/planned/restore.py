"""What pruned positions get, in PyTorch; step.py writes the same arithmetic as ONNX."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resampled(grid: Tensor, size: tuple[int, int], kind: str = "bilinear") -> Tensor:
    """[B, d, h, w] on another map, "area" or "bilinear" (corners not aligned)."""
    return F.interpolate(grid, size=size, mode=kind, align_corners=None if kind == "area" else False)


def resampled_residual(residual: Tensor, old: tuple[int, int], new: tuple[int, int], kind: str) -> Tensor:
    """A residual of one map on another. residual: [R, N_old, C] -> [R, N_new, C]."""
    grid = residual.transpose(1, 2).unflatten(-1, old)  # [R, C, h, w]
    return resampled(grid, new, kind).flatten(2).transpose(1, 2)


def nearest_kept(kept: Tensor, size: tuple[int, int]) -> Tensor:
    """For every position the index, among the kept ones, of the nearest; ties to the smaller. kept: [n] -> [N]."""
    height, width = size
    y = torch.arange(height, device=kept.device).repeat_interleave(width)
    x = torch.arange(width, device=kept.device).repeat(height)
    distance = (y[:, None] - y[kept]) ** 2 + (x[:, None] - x[kept]) ** 2  # [N, n]
    # int64 distances below 2^40, made different by the index: the first of the nearest wins on every device
    return (distance * len(kept) + torch.arange(len(kept), device=kept.device)).argmin(1)


def take_rows(x: Tensor, kept: Tensor) -> Tensor:
    """Rows' own tokens. x: [R, N, C], kept: [R, n] -> [R, n, C]."""
    return x.gather(1, kept[:, :, None].expand(-1, -1, x.shape[-1]))


def put_rows(x: Tensor, kept: Tensor, y: Tensor) -> Tensor:
    """x with y at the kept positions. x: [R, N, C], kept: [R, n], y: [R, n, C]."""
    return x.scatter(1, kept[:, :, None].expand(-1, -1, x.shape[-1]), y)
