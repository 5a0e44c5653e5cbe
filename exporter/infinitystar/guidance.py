"""Adaptive projected guidance on the logits of a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from toprovar.runtime.guidance import Projection


def projected_difference(conditional: Tensor, unconditional: Tensor, projection: Projection) -> Tensor:
    """What guidance adds to the conditional logits, before its factor; a whole map of one image is one vector.

    Source: adaptive projected guidance (arXiv 2410.02416); FoundationVision/InfinityStar's use of it.
    """
    difference = conditional - unconditional
    if projection.norm_threshold > 0:
        size = difference.norm() / difference.numel() ** 0.5
        difference = difference * torch.clamp(projection.norm_threshold / size, max=1)
    wide, along = difference.double(), conditional.double()
    along = along / along.norm().clamp(min=1e-12)
    parallel = (wide * along).sum() * along
    return ((wide - parallel) + projection.eta * parallel).to(difference.dtype)


def guided(logits: Tensor, cfg: float, projection: Projection) -> Tensor:
    """logits: [2B, n, V], conditional rows first -> [B, n, V]."""
    pairs = zip(*logits.chunk(2), strict=True)
    return torch.stack([c + (cfg - 1) * projected_difference(c, u, projection) for c, u in pairs])
