"""How close a plan's picture is to the dense one of the same noise: SSIM, PSNR and equal bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toprovar.calibrate.measures import psnr_db, ssim

NO_INDEX = -1  # likewise, where indices of a codebook are drawn
NOT_DRAWN = 255  # bit of a position that drew none: its codes come from the scale before, or from nowhere


def picture_distances(image: np.ndarray, dense: np.ndarray) -> dict[str, float]:
    """image, dense: [H, W, 3] uint8. Returns: ssim and psnr_db, rounded as they are written down."""
    return {"ssim": round(ssim(image, dense), 6), "psnr_db": round(psnr_db(image, dense), 4)}


def equal_shares(bits: Sequence[np.ndarray], dense: Sequence[np.ndarray]) -> list[float]:
    """Share of equal bits per scale that ran; a bit that was not drawn is not equal.

    bits, dense: per scale from 0 on, [N, bits] uint8; `dense` may have more scales
    """
    return [float((mine == theirs).mean()) for mine, theirs in zip(bits, dense, strict=False)]


def equal_bits(bits: Sequence[np.ndarray], dense: Sequence[np.ndarray], not_drawn: int = NOT_DRAWN) -> list[list[int]]:
    """Per scale that ran: equal bits, drawn bits, all bits. Arguments as in `equal_shares`."""
    return [
        [int((mine == theirs).sum()), int((mine != not_drawn).sum()), mine.size]
        for mine, theirs in zip(bits, dense, strict=False)
    ]
